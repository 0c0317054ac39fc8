// device.h with nvcc: products of a group of four warps, which run while these continue (PTX ISA, wgmma). Only code for
// sm_90a may call them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool LCTX_HAS_WARPGROUPS = true;
#else
constexpr bool LCTX_HAS_WARPGROUPS = false;
#endif

// Shared memory given at the launch, at a multiple of 1024 bytes.
static __device__ __forceinline__ char * lctx_shared_panels() {
    extern __shared__ __align__(1024) char lctx_shared_memory_of_panels[];
    return lctx_shared_memory_of_panels;
}

static __device__ __forceinline__ uint32_t lctx_shared_address(const void * at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

#define LCTX_SUMS_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define LCTX_SUMS_32(d, i)                                                                                         \
    LCTX_SUMS_4(d[i]), LCTX_SUMS_4(d[i + 1]), LCTX_SUMS_4(d[i + 2]), LCTX_SUMS_4(d[i + 3]), LCTX_SUMS_4(d[i + 4]), \
        LCTX_SUMS_4(d[i + 5]), LCTX_SUMS_4(d[i + 6]), LCTX_SUMS_4(d[i + 7])

// Begin d = a b, or d += a b where `adds`: a is 16 x 16 f16 of each warp, laid out as in lctx_mma, b 16 x 64 in shared
// memory as a descriptor says, TRANSPOSED where its rows are those that are added over; d as in lctx_mma, 8 columns
// each.
template <bool TRANSPOSED>
static __device__ __forceinline__ void lctx_group_mma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
        : LCTX_SUMS_32(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"((int)TRANSPOSED));
}

// The same with 128 columns.
template <bool TRANSPOSED> static __device__ __forceinline__ void lctx_group_mma(float (&d)[16][4],
                                                                                 const uint32_t (&a)[4], uint64_t b,
                                                                                 bool adds) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
        : LCTX_SUMS_32(d, 0), LCTX_SUMS_32(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds), "n"((int)TRANSPOSED));
}

// Before the first of some products: what the threads have written to registers is there.
static __device__ __forceinline__ void lctx_group_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Those that began since the last one are waited for together.
static __device__ __forceinline__ void lctx_group_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most N of these are on their way.
template <int N> static __device__ __forceinline__ void lctx_group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Before the barrier after which products read what this thread has copied.
static __device__ __forceinline__ void lctx_group_sees_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The compiler, which does not know what is on its way, takes sums as they are here, and keeps factors up to here.
template <int N> static __device__ __forceinline__ void lctx_group_hold(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : LCTX_SUMS_4(d[i])::"memory");
    }
}

template <int N> static __device__ __forceinline__ void lctx_group_keep(const uint32_t (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
    }
}
