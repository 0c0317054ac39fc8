// The kernels as an op of ggml's CUDA backend: the one file that includes its headers.
#include "../hooks.h"
#include "dispatch.h"

#include "ggml-cuda/common.cuh"

// CMake defines it where devices of compute capability 9.0 run that code.
#ifdef LCTX_CUDA_SM_90A
constexpr bool COMPILED_FOR_SM_90A = true;
#else
constexpr bool COMPILED_FOR_SM_90A = false;
#endif

static lctx_cuda_device device_of(int device) {
    constexpr size_t MOST_SCRATCH = 64 << 20, SHARE = 128;  // of all memory
    const auto & info = ggml_cuda_info().devices[device];
    const bool has_warpgroups = COMPILED_FOR_SM_90A && info.cc == GGML_CUDA_CC_HOPPER;
    return {info.nsm, info.smpbo, lctx_min(MOST_SCRATCH, info.total_vram / SHARE),
            has_warpgroups && lctx_cuda_wants_warpgroups()};
}

void lctx_cuda_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    constexpr size_t ALIGN = 256;  // the pool's blocks begin at multiples of 128
    const lctx_cuda_device device = device_of(ctx.device);
    const size_t size = lctx_cuda_wsize(device, dst);
    ggml_cuda_pool_alloc<char> work(ctx.pool());
    char * aligned = size > 0 ? (char *)GGML_PAD((uintptr_t)work.alloc(size + ALIGN), ALIGN) : nullptr;
    lctx_cuda_run({device, ctx.stream(), aligned}, dst);
    CUDA_CHECK(cudaGetLastError());
}

bool lctx_cuda_supported(int device, const ggml_tensor * op) {
    return ggml_cuda_info().devices[device].cc >= GGML_CUDA_CC_TURING && !lctx_cuda_refusal(device_of(device), op);
}
