#include "module.h"

#include "ggml-cuda.h"

#ifdef LCTX_CUDA_ARENA
static const lctx_cuda_arenas * const arenas = &lctx_cuda_own_arenas;
#else
static const lctx_cuda_arenas * const arenas = nullptr;
#endif

const lctx_cuda_module * lctx_cuda_module_get(void) {
    static const lctx_cuda_module module = {LCTX_BUILD, LCTX_CUDA_ARCHITECTURES, ggml_backend_cuda_reg, ggml_log_set, arenas};
    return &module;
}
