// device.h with nvcc. The names that emulate.h defines too; sm_75 and newer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

// Shared memory given at the launch; 16-byte aligned.
static __device__ __forceinline__ char * lctx_shared() {
    extern __shared__ __align__(16) char lctx_shared_memory[];
    return lctx_shared_memory;
}

// Programmatic dependent launch: a kernel may begin while the one before it ends, since lctx_begin waits for that.
#if CUDART_VERSION >= 12030
#define LCTX_BEGINS_EARLY
#endif

// Every kernel calls this before anything else: what the kernels before it have written is there.
static __device__ __forceinline__ void lctx_begin() {
#if defined(LCTX_BEGINS_EARLY) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// Let the next kernel of the stream begin, and wait for this one: worth it where this one is short.
static __device__ __forceinline__ void lctx_let_next_begin() {
#if defined(LCTX_BEGINS_EARLY) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

#ifdef LCTX_BEGINS_EARLY
// Return whether the code of a kernel that this device runs waits; GGML_CUDA_PDL=0 in the environment forbids it, as
// for ggml's own kernels.
inline bool lctx_begins_early(const void * kernel) {
    static const bool allowed = [] {
        const char * text = getenv("GGML_CUDA_PDL");
        return !text || atoi(text) != 0;
    }();
    static std::mutex mutex;
    static std::map<std::pair<int, const void *>, bool> known;
    int device = 0;
    if (!allowed || cudaGetDevice(&device) != cudaSuccess) {
        return false;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find({device, kernel});
    if (found != known.end()) {
        return found->second;
    }
    cudaFuncAttributes attributes = {};
    return known[{device, kernel}] =
               cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}
#endif

// Launch a kernel. What goes wrong shows in cudaGetLastError, which ggml looks at.
template <typename... P, typename... A> void lctx_launch(void (*kernel)(P...), dim3 grid, int n_thread, size_t n_shared,
                                                         cudaStream_t stream, const A &... args) {
    constexpr size_t WITHOUT_ASKING = 48 * 1024;
    if (n_shared > WITHOUT_ASKING) {
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_shared);
    }
#ifdef LCTX_BEGINS_EARLY
    if (lctx_begins_early((const void *)kernel)) {
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = grid, config.blockDim = dim3((unsigned)n_thread), config.dynamicSmemBytes = n_shared;
        config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
        cudaLaunchKernelEx(&config, kernel, P(args)...);
        return;
    }
#endif
    kernel<<<grid, n_thread, n_shared, stream>>>(args...);
}

// ---- the lanes of a warp, all of which must come here ----

template <typename T> static __device__ __forceinline__ T lctx_shuffle_xor(T x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename T> static __device__ __forceinline__ T lctx_shuffle(T x, int lane) {
    return __shfl_sync(0xffffffffu, x, lane);
}

static __device__ __forceinline__ uint32_t lctx_ballot(bool x) {
    return __ballot_sync(0xffffffffu, x);
}

static __device__ __forceinline__ void lctx_sync_warp() {
    __syncwarp();
}

// The largest of x, and their sum; every lane gets the result.
static __device__ __forceinline__ uint32_t lctx_reduce_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    for (int step = 16; step > 0; step /= 2) {
        x = max(x, lctx_shuffle_xor(x, step));
    }
    return x;
#endif
}

static __device__ __forceinline__ uint32_t lctx_reduce_add(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(0xffffffffu, x);
#else
    for (int step = 16; step > 0; step /= 2) {
        x += lctx_shuffle_xor(x, step);
    }
    return x;
#endif
}

// ---- numbers ----

static __device__ __forceinline__ float lctx_from_half(uint16_t x) {
    return __half2float(__ushort_as_half(x));
}

static __device__ __forceinline__ uint16_t lctx_to_half(float x) {
    return __half_as_ushort(__float2half_rn(x));
}

// Two floats as two f16, the first in the low half.
static __device__ __forceinline__ uint32_t lctx_pack(float low, float high) {
    const __half2 x = __floats2half2_rn(low, high);
    return *(const uint32_t *)&x;
}

// Pairs of f16, each number rounded once: x - y, x y, x y + z.
static __device__ __forceinline__ uint32_t lctx_sub_2(uint32_t x, uint32_t y) {
    const __half2 z = __hsub2(*(const __half2 *)&x, *(const __half2 *)&y);
    return *(const uint32_t *)&z;
}

static __device__ __forceinline__ uint32_t lctx_mul_2(uint32_t x, uint32_t y) {
    const __half2 z = __hmul2(*(const __half2 *)&x, *(const __half2 *)&y);
    return *(const uint32_t *)&z;
}

static __device__ __forceinline__ uint32_t lctx_fma_2(uint32_t x, uint32_t y, uint32_t z) {
    const __half2 sum = __hfma2(*(const __half2 *)&x, *(const __half2 *)&y, *(const __half2 *)&z);
    return *(const uint32_t *)&sum;
}

// Byte i is that of x and y together which hexadecimal digit i of `choice` names.
static __device__ __forceinline__ uint32_t lctx_permute(uint32_t x, uint32_t y, uint32_t choice) {
    return __byte_perm(x, y, choice);
}

// sum + the products of four signed bytes.
static __device__ __forceinline__ int lctx_dot_bytes(uint32_t x, uint32_t y, int sum) {
    return __dp4a((int)x, (int)y, sum);
}

static __device__ __forceinline__ float lctx_from_bf16(uint16_t x) {
    return __uint_as_float((uint32_t)x << 16);
}

static __device__ __forceinline__ uint16_t lctx_to_bf16(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

static __device__ __forceinline__ float lctx_as_float(uint32_t x) {
    return __uint_as_float(x);
}

static __device__ __forceinline__ uint32_t lctx_as_uint(float x) {
    return __float_as_uint(x);
}

// Each rounded on its own, to the nearest: no fused multiply-add, no approximate division.
static __device__ __forceinline__ float lctx_add(float x, float y) {
    return __fadd_rn(x, y);
}

static __device__ __forceinline__ float lctx_mul(float x, float y) {
    return __fmul_rn(x, y);
}

static __device__ __forceinline__ float lctx_div(float x, float y) {
    return __fdiv_rn(x, y);
}

// Return x so that the compiler does not know its value: a constant stays in its register instead of being written
// again.
static __device__ __forceinline__ int lctx_kept(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

static __device__ __forceinline__ float lctx_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- tensor cores (PTX ISA, mma.m16n8k16 and ldmatrix); lane = 4 g + t ----

// c += a b: a is 16 x 16 f16, b 16 x 8 f16, c 16 x 8 f32. c = rows g, g, g + 8, g + 8 at columns 2 t, 2 t + 1.
static __device__ __forceinline__ void lctx_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    for (int k = 0; k < 2; k++) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(k == 0 ? b0 : b1));
    }
#endif
}

// GeForce multiplies twice as fast with f16 sums; so do a few other GPUs of these architectures.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ < 800 || (__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1200)
constexpr bool LCTX_HALF_SUMS = true;
#else
constexpr bool LCTX_HALF_SUMS = false;
#endif

// The same with f16 sums: c = rows g, g + 8 at columns 2 t and 2 t + 1.
static __device__ __forceinline__ void lctx_mma_halves(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                 : "+r"(c[0]), "+r"(c[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    for (int k = 0; k < 2; k++) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
                     : "+r"(c[0]), "+r"(c[1])
                     : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(k == 0 ? b0 : b1));
    }
#endif
}

// d = a b + c of bytes: a is 16 x 32, b 32 x 8, c and d 16 x 8 integers. a.x, a.y = rows g, g + 8 at columns 4 t to 4 t
// + 3, a.z, a.w the same 16 columns on; b0, b1 = rows 4 t to 4 t + 3 and those 16 on at column g; d as in lctx_mma.
static __device__ __forceinline__ void lctx_mma_bytes(int (&d)[4], const uint4 & a, uint32_t b0, uint32_t b1,
                                                      const int (&c)[4]) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
        "%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#else
    const uint32_t rows[2][2] = {{a.x, a.z}, {a.y, a.w}};
    for (int half = 0; half < 2; half++) {
        int sum[2] = {c[2 * half], c[2 * half + 1]};
        for (int k = 0; k < 2; k++) {
            asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                         : "+r"(sum[0]), "+r"(sum[1])
                         : "r"(rows[half][k]), "r"(k == 0 ? b0 : b1));
        }
        d[2 * half] = sum[0], d[2 * half + 1] = sum[1];
    }
#endif
}

// Four 8 x 8 matrices of f16: lane l gives the address of row l % 8 of matrix l / 8; r[i] = matrix i at row g, columns
// 2 t, 2 t + 1.
static __device__ __forceinline__ void lctx_load_matrices(uint32_t (&r)[4], const void * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// Load the transposed matrices: r[i] = matrix i at rows 2 t, 2 t + 1, column g.
static __device__ __forceinline__ void lctx_load_transposed(uint32_t (&r)[4], const void * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// ---- 16 bytes from global to shared memory, copied while the thread continues; in groups ----

static __device__ __forceinline__ void lctx_copy_16(void * to_shared, const void * from_global) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to_shared)),
                 "l"(from_global)
                 : "memory");
#else
    *(uint4 *)to_shared = *(const uint4 *)from_global;
#endif
}

// From nullptr: zeros.
static __device__ __forceinline__ void lctx_copy_16_or_zeros(void * to_shared, const void * from_global) {
#if __CUDA_ARCH__ >= 800
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(to_shared),
                   n_byte = from_global ? 16 : 0;  // the rest of 16 becomes 0
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global), "r"(n_byte) : "memory");
#else
    *(uint4 *)to_shared = from_global ? *(const uint4 *)from_global : uint4{0, 0, 0, 0};
#endif
}

static __device__ __forceinline__ void lctx_copy_end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most N groups of this thread are on their way. Other threads' copies: __syncthreads after it.
template <int N> static __device__ __forceinline__ void lctx_copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
