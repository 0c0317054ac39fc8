#include "module.h"

#include "ggml-cuda.h"

#ifdef LCTX_CUDA_ARENA
static const lctx_device_memory_kind * const memory = &lctx_cuda_memory;
#else
static const lctx_device_memory_kind * const memory = nullptr;
#endif

const lctx_cuda_module * lctx_cuda_module_get(void) {
    static const lctx_cuda_module module = {LCTX_BUILD, LCTX_CUDA_ARCHITECTURES, ggml_backend_cuda_reg, ggml_log_set,
                                            memory};
    return &module;
}
