// CUDA on one CPU thread, as far as our kernels use it. A block's threads are fibers that change at barriers, in an
// order that is shuffled, with the shared memory poisoned: a missing barrier, an unwritten value and a barrier that not
// all reach show in the tests.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
using cudaStream_t = void *;

extern dim3 gridDim, blockIdx, blockDim, threadIdx;

// Bytes that a block may ask for: LCTX_EMULATED_SHARED in the environment, in KiB, else 163. GPUs have 64, 99, 163 or
// 227.
size_t lctx_emulated_shared();

// Run every thread of every block. n_shared bytes of shared memory.
void lctx_emulate(const std::function<void()> & kernel, dim3 grid, int n_thread, size_t n_shared);
// What the next launch is called in the log of launches; words: as they stand in the source, "attend<S, F16>, grid,
// ...".
void lctx_emulated_name(const char * words);
char * lctx_shared();
void __syncthreads();
// Every kernel calls this before anything else: a launch ends with an error where a thread did not.
void lctx_begin();
inline void lctx_let_next_begin() {}
// Give up to 32 bytes to the other lanes of the warp and wait for theirs: what lane i gave is at [i].
struct lctx_gift {
    alignas(16) char bytes[32];
};
const lctx_gift * lctx_exchange(const void * data, size_t size);
// A copy that arrives when it is waited for.
void lctx_copy_16(void * to, const void * from);
void lctx_copy_16_or_zeros(void * to, const void * from);
void lctx_copy_end_group();
void lctx_copy_wait_for(int n_group);

template <typename... P, typename... A> void lctx_emulated_launch(void (*kernel)(P...), dim3 grid, int n_thread,
                                                                  size_t n_shared, cudaStream_t, const A &... args) {
    lctx_emulate([&] { kernel(args...); }, grid, n_thread, n_shared);
}
// Nothing but the source knows the names of kernels.
#define lctx_launch(...) (lctx_emulated_name(#__VA_ARGS__), lctx_emulated_launch(__VA_ARGS__))

template <int N> inline void lctx_copy_wait() {
    lctx_copy_wait_for(N);
}

template <typename T> inline T lctx_shuffle(T x, int lane) {
    T y;
    memcpy(&y, lctx_exchange(&x, sizeof(x))[lane].bytes, sizeof(y));
    return y;
}

template <typename T> inline T lctx_shuffle_xor(T x, int mask) {
    return lctx_shuffle(x, (int)threadIdx.x % 32 ^ mask);
}

inline uint32_t lctx_ballot(bool x) {
    const lctx_gift * all = lctx_exchange(&x, sizeof(x));
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; lane++) {
        votes |= (uint32_t)(all[lane].bytes[0] != 0) << lane;
    }
    return votes;
}

inline void lctx_sync_warp() {
    lctx_exchange(nullptr, 0);
}

// f(result so far, what a lane gave) for all lanes.
template <typename F> inline uint32_t lctx_reduce(uint32_t x, F && f) {
    const lctx_gift * all = lctx_exchange(&x, sizeof(x));
    uint32_t result = 0;
    for (int lane = 0; lane < 32; lane++) {
        uint32_t y;
        memcpy(&y, all[lane].bytes, sizeof(y));
        result = f(result, y);
    }
    return result;
}

inline uint32_t lctx_reduce_max(uint32_t x) {
    return lctx_reduce(x, [](uint32_t a, uint32_t b) { return std::max(a, b); });
}

inline uint32_t lctx_reduce_add(uint32_t x) {
    return lctx_reduce(x, [](uint32_t a, uint32_t b) { return a + b; });
}

inline uint32_t lctx_as_uint(float x) {
    uint32_t y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

inline float lctx_as_float(uint32_t x) {
    float y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

inline float lctx_from_half(uint16_t x) {
    return ggml_fp16_to_fp32(x);
}

inline uint16_t lctx_to_half(float x) {
    return ggml_fp32_to_fp16(x);
}

inline uint32_t lctx_pack(float low, float high) {
    return lctx_to_half(low) | (uint32_t)lctx_to_half(high) << 16;
}

// f(the half of x, of y, of z) of both numbers of pairs. Floats hold sums and products of two halves exactly.
template <typename F> inline uint32_t lctx_each_half(uint32_t x, uint32_t y, uint32_t z, F && f) {
    const auto at = [](uint32_t pair, int bit) { return lctx_from_half((uint16_t)(pair >> bit)); };
    const auto of = [&](int bit) { return (uint32_t)lctx_to_half(f(at(x, bit), at(y, bit), at(z, bit))); };
    return of(0) | of(16) << 16;
}

inline uint32_t lctx_sub_2(uint32_t x, uint32_t y) {
    return lctx_each_half(x, y, 0, [](float a, float b, float) { return a - b; });
}

inline uint32_t lctx_mul_2(uint32_t x, uint32_t y) {
    return lctx_each_half(x, y, 0, [](float a, float b, float) { return a * b; });
}

inline uint32_t lctx_fma_2(uint32_t x, uint32_t y, uint32_t z) {
    return lctx_each_half(x, y, z, [](float a, float b, float c) { return a * b + c; });
}

inline uint32_t lctx_permute(uint32_t x, uint32_t y, uint32_t choice) {
    const uint64_t both = (uint64_t)y << 32 | x;
    uint32_t z = 0;
    for (int i = 0; i < 4; i++) {
        z |= (uint32_t)(both >> (choice >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return z;
}

inline int lctx_dot_bytes(uint32_t x, uint32_t y, int sum) {
    for (int shift = 0; shift < 32; shift += 8) {
        sum += (int8_t)(x >> shift) * (int8_t)(y >> shift);
    }
    return sum;
}

inline float lctx_from_bf16(uint16_t x) {
    return lctx_as_float((uint32_t)x << 16);
}

inline uint16_t lctx_to_bf16(float x) {
    return ggml_fp32_to_bf16(x).bits;
}

inline int lctx_kept(int x) {
    return x;
}

inline float lctx_exp2(float x) {
    return exp2f(x);
}

// Each rounded on its own.
inline float lctx_add(float x, float y) {
    return x + y;
}

inline float lctx_mul(float x, float y) {
    return x * y;
}

inline float lctx_div(float x, float y) {
    return x / y;
}

inline int __ffs(int x) {
    return __builtin_ffs(x);
}

inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}

// T is that of what is changed.
template <typename T> T atomicAdd(T * at, std::common_type_t<T> x) {
    return std::exchange(*at, *at + x);
}

template <typename T> T atomicMax(T * at, std::common_type_t<T> x) {
    return std::exchange(*at, std::max(*at, x));
}

template <typename T> T atomicMin(T * at, std::common_type_t<T> x) {
    return std::exchange(*at, std::min(*at, x));
}

template <typename T> T atomicOr(T * at, std::common_type_t<T> x) {
    return std::exchange(*at, *at | x);
}

template <typename T> T atomicAnd(T * at, std::common_type_t<T> x) {
    return std::exchange(*at, *at & x);
}

void lctx_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
// As on GeForce.
constexpr bool LCTX_HALF_SUMS = true;
void lctx_mma_halves(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void lctx_mma_bytes(int (&d)[4], const uint4 & a, uint32_t b0, uint32_t b1, const int (&c)[4]);
void lctx_load_matrices(uint32_t (&r)[4], const void * row);
void lctx_load_transposed(uint32_t (&r)[4], const void * row);

// Products of a group, whose sums are there when they are waited for. A tile that changes before, a fence that is
// missing, and a descriptor of another layout than a swizzle of 128 bytes end the program.
constexpr bool LCTX_HAS_WARPGROUPS = true;
char * lctx_shared_panels();
uint32_t lctx_shared_address(const void * at);
void lctx_group_begin();
void lctx_group_end();
void lctx_group_wait_for(int n_group);
void lctx_group_sees_copies();
void lctx_group_mma_of(float * d, int n_sum, const uint32_t (&a)[4], uint64_t b, bool transposed, bool adds);

template <bool TRANSPOSED, int N>
inline void lctx_group_mma(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
    lctx_group_mma_of(&d[0][0], 4 * N, a, b, TRANSPOSED, adds);
}

template <int N> inline void lctx_group_wait() {
    lctx_group_wait_for(N);
}

template <typename T> inline void lctx_group_hold(T &) {}

template <typename T> inline void lctx_group_keep(const T &) {}
