// Blocks of K and V rows as f16 in shared memory, [ROWS][DIM + 8]: the padding keeps eight rows of a matrix in
// different banks.
#pragma once

#include "../ops/cache.h"
#include "rows.h"

// Slots [first, first + ROWS) of a head's page list, of which [lo, hi) are read.
struct lctx_cuda_block {
    const lctx_cache_args & cache;
    int32_t head, seq, first, lo, hi;
    size_t row;  // of the pools: of the first cell that is read
    bool near;

    // Near keys of a head that evicts do not lie together: their ring goes by row number.
    __device__ bool is_gathered() const { return near && cache.held.data; }
    // Return where the first slot is or would be: what is read lies together, what is before it may be elsewhere.
    __device__ const char * k() const { return near ? lctx_near_row(cache, first, head, seq) : of(cache.k_pool); }
    __device__ const char * v() const { return of(cache.v_pool); }
    __device__ const char * of(const lctx_pool_args & pool) const {
        return lctx_pool_at(pool, row) - lo * pool.row_size;
    }
    __device__ const char * gathered_k(int i) const {
        return lctx_near_row(cache, lctx_cells(cache, head, seq).row(first + i), head, seq);
    }
};

// f(type) with one of the element types of rows.h.
template <typename F> static __device__ __forceinline__ void lctx_cuda_with_rows(ggml_type type, F && f) {
    switch (type) {
        case GGML_TYPE_F32:  return f(lctx_cuda_f32());
        case GGML_TYPE_F16:  return f(lctx_cuda_f16());
        case GGML_TYPE_BF16: return f(lctx_cuda_bf16());
        case GGML_TYPE_Q8_0: return f(lctx_cuda_q8_0());
        case GGML_TYPE_Q4_0: return f(lctx_cuda_q4_0());
        case GGML_TYPE_Q4_1: return f(lctx_cuda_q4_1());
        case GGML_TYPE_Q5_0: return f(lctx_cuda_q5_0());
        case GGML_TYPE_Q5_1: return f(lctx_cuda_q5_1());
        default:             return f(lctx_cuda_iq4_nl());
    }
}

// f(row, first element) for every 8 elements of the groups of 16 rows that have one of [lo, hi), dealt to the threads.
template <typename S, typename F> static __device__ __forceinline__ void lctx_cuda_each_8(int lo, int hi, F && f) {
    constexpr int PER_ROW = S::DIM / 8;  // constants: a division takes as long as several products of a tile
    const int end = (hi + 15) / 16 * 16 * PER_ROW;
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (int i = lo / 16 * 16 * PER_ROW + (int)threadIdx.x; i < end; i += S::THREADS) {
        f(i / PER_ROW, i % PER_ROW * 8);
    }
}

// Begin to copy f16 rows [lo, hi) into a tile; the others of their groups of 16 and dimensions that no row has become
// 0, for what is not read may be anything, and 0 times NaN is NaN.
template <typename S, typename Row>
static __device__ __forceinline__ void lctx_cuda_copy_rows(int n_dim, int lo, int hi, Row && row, uint16_t * tile) {
    lctx_cuda_each_8<S>(lo, hi, [&](int i, int d) {
        const bool is_read = i >= lo && i < hi && d < n_dim;
        lctx_copy_16_or_zeros(tile + i * S::STRIDE + d, is_read ? row(i) + d * sizeof(uint16_t) : nullptr);
    });
}

// Copy a tile of which all is read.
template <typename S>
static __device__ __forceinline__ void lctx_cuda_copy_tile(const char * from, size_t row_size, uint16_t * tile) {
    constexpr int PER_ROW = S::DIM / 8, STEPS = S::ROWS * PER_ROW / S::THREADS;
    static_assert(S::ROWS * PER_ROW % S::THREADS == 0, "every thread has as much");
    [[maybe_unused]] constexpr int AT_ONCE = STEPS > 8 ? 4 : STEPS;  // wide rows leave no registers for more
#ifdef __CUDACC__
#pragma unroll AT_ONCE
#endif
    for (int step = 0; step < STEPS; step++) {
        const int i = step * S::THREADS + (int)threadIdx.x, row = i / PER_ROW, d = i % PER_ROW * 8;
        lctx_copy_16(tile + row * S::STRIDE + d, from + (row * (uint32_t)row_size + d * (uint32_t)sizeof(uint16_t)));
    }
}

// Rows of any type into a tile, in the same way.
template <typename S, typename Row>
static __device__ void lctx_cuda_unpack_rows(ggml_type type, int n_dim, int lo, int hi, Row && row, uint16_t * tile) {
    lctx_cuda_with_rows(type, [&](auto rows) {
        lctx_cuda_each_8<S>(lo, hi, [&](int i, int d) {
            const bool is_read = i >= lo && i < hi && d < n_dim;
            *(uint4 *)(tile + i * S::STRIDE + d) =
                is_read ? lctx_load_halves<decltype(rows)>(row(i), d) : uint4{0, 0, 0, 0};
        });
    });
}

// All rows of a tile, of any type, without what is left of a tile that is read in part.
template <typename S> static __device__ __forceinline__ void lctx_cuda_unpack_tile(ggml_type type, const char * from,
                                                                                   size_t row_size, uint16_t * tile) {
    constexpr int PER_ROW = S::DIM / 8, STEPS = S::ROWS * PER_ROW / S::THREADS;
    lctx_cuda_with_rows(type, [&](auto rows) {
#ifdef __CUDACC__
#pragma unroll 4
#endif
        for (int step = 0; step < STEPS; step++) {
            const int i = step * S::THREADS + (int)threadIdx.x, row = i / PER_ROW, d = i % PER_ROW * 8;
            *(uint4 *)(tile + row * S::STRIDE + d) =
                lctx_load_halves<decltype(rows)>(from + row * (uint32_t)row_size, d);
        }
    });
}

// Values that may be larger than a half, times `factor`, into a tile. Returns the largest of this thread before that.
template <typename T, typename S, typename Row>
static __device__ float lctx_cuda_unpack_values(int n_dim, int lo, int hi, Row && row, float factor, uint16_t * tile) {
    float most = 0.0f;
    lctx_cuda_each_8<S>(lo, hi, [&](int i, int d) {
        float x[8] = {};
        if (i >= lo && i < hi && d < n_dim) {
            lctx_load_8<T>(row(i), d, x);
        }
        lctx_unrolled<8>([&](int j) {
            most = fabsf(x[j]) > most ? fabsf(x[j]) : most;  // not NaN
            x[j] *= factor;
        });
        *(uint4 *)(tile + i * S::STRIDE + d) = lctx_pack_8(x);
    });
    return most;
}

// The power of two, 2^15 at most, by which values are divided so that the largest is a half; its bits, 0: all are.
static __device__ __forceinline__ float lctx_cuda_factor_of(int32_t most) {
    constexpr int BIAS = 127, LARGEST = 15;
    const int exponent = (most >> 23) - BIAS;
    return most == 0 ? 1.0f : lctx_as_float((uint32_t)(BIAS + lctx_min(exponent - 14, LARGEST)) << 23);
}

// Unpack the values of block number i, which may be larger than a half: unpack(factor) divides them by it and returns
// the largest of this thread. most: bits of the largest, 0 at first; blocks use them in turn. Returns the factor, when
// all threads are done.
template <typename F> static __device__ __forceinline__ float lctx_cuda_scaled(int32_t (&most)[2], int i, F && unpack) {
    if (threadIdx.x == 0) {
        most[(i + 1) % 2] = 0;
    }
    for (float factor = 1.0f;;) {
        const float mine = unpack(factor);
        if (mine > LCTX_MOST_HALF) {
            atomicMax(&most[i % 2], (int)lctx_as_uint(mine));
        }
        __syncthreads();
        const float wanted = lctx_cuda_factor_of(most[i % 2]);
        if (factor == wanted) {
            return factor;
        }
        factor = wanted;  // all threads see the same and come again
    }
}

// Begin to copy bytes [begin, end) of a block as they are, in steps of 16: a block has a multiple of 16 bytes.
static __device__ __forceinline__ void lctx_cuda_copy_bytes(char * to, const char * from, size_t begin, size_t end) {
    for (size_t i = begin / 16 * 16 + threadIdx.x * 16; i < end; i += blockDim.x * 16) {
        lctx_copy_16(to + i, from + i);
    }
}
