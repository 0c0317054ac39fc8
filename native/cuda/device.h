// Declares the primitives that the CUDA kernels are written with. nvcc sees CUDA; with LCTX_EMULATE a C++ compiler sees
// emulate.h, which runs the same kernels on the CPU, so that all of them are tested where there is no GPU.
#pragma once

#include "../ops/half.h"

#include <cstdint>

#ifdef LCTX_EMULATE
#include "emulate.h"
#else
#include "hardware-group.h"
#include "hardware.h"
#endif

constexpr int LCTX_WARP = 32;

static __device__ __forceinline__ int lctx_lane() {
    return (int)threadIdx.x % LCTX_WARP;
}

static __device__ __forceinline__ int lctx_warp() {
    return (int)threadIdx.x / LCTX_WARP;
}

// Unrolled: what is indexed lives in registers.
template <int N, typename F> static __device__ __forceinline__ void lctx_unrolled(F && f) {
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int i = 0; i < N; i++) {
        f(i);
    }
}

// Over `n` neighbouring lanes, a power of two; every lane gets the result.
static __device__ __forceinline__ float lctx_warp_max(float x, int n = LCTX_WARP) {
    for (int step = n / 2; step > 0; step /= 2) {
        x = fmaxf(x, lctx_shuffle_xor(x, step));
    }
    return x;
}

template <typename T> static __device__ __forceinline__ T lctx_warp_sum(T x, int n = LCTX_WARP) {
    for (int step = n / 2; step > 0; step /= 2) {
        x += lctx_shuffle_xor(x, step);
    }
    return x;
}

// The sum of x over the threads before this one, and in `all` over the block; every thread must come. sums: [LCTX_WARP]
// in shared memory.
static __device__ __forceinline__ int lctx_block_scan(int x, int * sums, int & all) {
    int before = x;
    for (int step = 1; step < LCTX_WARP; step *= 2) {
        const int y = lctx_shuffle(before, lctx_lane() < step ? lctx_lane() : lctx_lane() - step);
        before += lctx_lane() < step ? 0 : y;
    }
    __syncthreads();  // no thread still reads the sums of an earlier call
    if (lctx_lane() == LCTX_WARP - 1) {
        sums[lctx_warp()] = before;
    }
    __syncthreads();
    all = 0;
    before -= x;
    for (int warp = 0; warp < (int)blockDim.x / LCTX_WARP; warp++) {
        before += warp < lctx_warp() ? sums[warp] : 0;
        all += sums[warp];
    }
    return before;
}

template <typename T> static __device__ __forceinline__ T lctx_warp_min(T x, int n = LCTX_WARP) {
    for (int step = n / 2; step > 0; step /= 2) {
        const T y = lctx_shuffle_xor(x, step);
        x = y < x ? y : x;
    }
    return x;
}

// lctx_pack with what is too large as the largest: bf16 and f32 rows go through f16 on their way to the tensor cores.
static __device__ __forceinline__ uint32_t lctx_pack_limited(float low, float high) {
    return lctx_pack(lctx_limited(low), lctx_limited(high));
}

// tanh to 1e-6: that of fast math is too coarse for scores, which a softcap multiplies.
static __device__ __forceinline__ float lctx_tanh(float x) {
    return 1.0f - 2.0f / (1.0f + lctx_exp2(2.88539008f * x));
}
