// What the CUDA kernels are written with. nvcc sees CUDA; with LCTX_EMULATE a C++ compiler sees emulate.h, which runs the same kernels
// on the CPU, so that all of them are tested where there is no GPU.
#pragma once

#include <cstdint>

#ifdef LCTX_EMULATE
#include "emulate.h"
#else
#include "hardware.h"
#endif

constexpr int LCTX_WARP = 32;

static __device__ __forceinline__ int lctx_lane() {
    return (int)threadIdx.x % LCTX_WARP;
}

static __device__ __forceinline__ int lctx_warp() {
    return (int)threadIdx.x / LCTX_WARP;
}

// Over `n` neighbouring lanes, a power of two; every lane gets the result.
static __device__ __forceinline__ float lctx_warp_max(float x, int n = LCTX_WARP) {
    for (int step = n / 2; step > 0; step /= 2) {
        x = fmaxf(x, lctx_shuffle_xor(x, step));
    }
    return x;
}

static __device__ __forceinline__ float lctx_warp_sum(float x, int n = LCTX_WARP) {
    for (int step = n / 2; step > 0; step /= 2) {
        x += lctx_shuffle_xor(x, step);
    }
    return x;
}

static __device__ __forceinline__ int lctx_warp_min(int x, int n = LCTX_WARP) {
    for (int step = n / 2; step > 0; step /= 2) {
        const int y = lctx_shuffle_xor(x, step);
        x = y < x ? y : x;
    }
    return x;
}

// lctx_pack with what is too large as the largest: bf16 and f32 rows go through f16 on their way to the tensor cores.
static __device__ __forceinline__ uint32_t lctx_pack_limited(float low, float high) {
    const float most = 65504.0f;
    return lctx_pack(fminf(fmaxf(low, -most), most), fminf(fmaxf(high, -most), most));
}
