// The Hadamard transform of rows (../ops/hadamard.h).
#pragma once

#include "../ops/args.h"
#include "rows.h"

constexpr int LCTX_MOST_HADAMARD = 512;  // channels that are transformed together

// Transform a row that a warp holds, element 32 i + lane in x[i]; 0 leaves it as it is. Blocks end within the row.
template <int N> static __device__ __forceinline__ void lctx_transform(float (&x)[N], int block) {
    if (block == 0) {
        return;
    }
    const float scale = 1.0f / sqrtf((float)block);
    lctx_unrolled<N>([&](int i) { x[i] *= scale; });
    lctx_unrolled<5>([&](int bit) {
        lctx_unrolled<N>([&](int i) {
            const float other = lctx_shuffle_xor(x[i], 1 << bit);
            x[i] = lctx_lane() >> bit & 1 ? other - x[i] : x[i] + other;
        });
    });
    lctx_unrolled<N>([&](int bit) {  // larger steps lead out of the row and do nothing
        const int step = 1 << bit;
        lctx_unrolled<N>([&](int i) {
            if (i % (2 * step) < step && i + step < N && step * LCTX_WARP < block) {
                const float first = x[i], second = x[i + step];
                x[i] = first + second, x[i + step] = first - second;
            }
        });
    });
}

// Elements [d, d + 8) of a stored row as they were before they were transformed; block 0: they were not.
// One loop for both, so that what unpacks a row is there once.
static __device__ __forceinline__ void lctx_load_8(ggml_type type, const char * row, int d, int block, float (&x)[8]) {
    const int first = block != 0 ? d / block * block : d, n = block != 0 ? block / 8 : 1, mine = (d - first) / 8;
    lctx_unrolled<8>([&](int i) { x[i] = 0.0f; });
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (int octet = 0; octet < n; octet++) {
        float y[8];
        lctx_load_8(type, row, first + 8 * octet, y);
        const float sign = __popc(octet & mine) & 1 ? -1.0f : 1.0f;
        lctx_unrolled<8>([&](int i) { x[i] += sign * y[i]; });
    }
    if (block == 0) {
        return;
    }
    const float scale = 1.0f / sqrtf((float)block);
    lctx_unrolled<3>([&](int bit) {
        lctx_unrolled<8>([&](int i) {
            if (!(i >> bit & 1)) {
                const float low = x[i], high = x[i + (1 << bit)];
                x[i] = low + high, x[i + (1 << bit)] = low - high;
            }
        });
    });
    lctx_unrolled<8>([&](int i) { x[i] *= scale; });
}

// Transform blocks of at most 32 N elements of a row, each lane those that it wrote.
template <int N> static __device__ __forceinline__ void lctx_transform_blocks(float * row, int dim, int block) {
    for (int first = 0; first < dim; first += block) {
        float x[N];
        lctx_unrolled<N>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            x[i] = d < block ? row[first + d] : 0.0f;
        });
        lctx_transform(x, block);
        lctx_unrolled<N>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            if (d < block) {
                row[first + d] = x[i];
            }
        });
    }
}

// Transform a row of floats in place; block 0 leaves it as it is. The lanes of a warp together; each reads what it
// wrote. Heads of up to 128 channels have a loop of their own, with a quarter of the shuffles.
static __device__ inline void lctx_transform_row(float * row, int dim, int block) {
    constexpr int SMALL = 128;
    if (block > SMALL) {
        lctx_transform_blocks<LCTX_MOST_HADAMARD / LCTX_WARP>(row, dim, block);
    } else if (block > 0) {
        lctx_transform_blocks<SMALL / LCTX_WARP>(row, dim, block);
    }
}

// The query of a token and head, times scale, turned to the position from which it looks and transformed as keys are:
// element 32 i + lane in x[i], 0 beyond the head. The lanes of a warp together.
template <int N> static __device__ void lctx_turn_query(const lctx_attend_args & a, int token, int head, int32_t angle,
                                                        float scale, float (&x)[N]) {
    const float * q = (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
    const float * cs = a.angles + (size_t)angle * a.n_dims;
    lctx_unrolled<N>([&](int i) {
        const int d = i * LCTX_WARP + lctx_lane();
        x[i] = d < a.head_dim_k ? scale * lctx_rotated(q, d, cs, a.n_dims, a.params.rope_mode) : 0.0f;
    });
    lctx_transform(x, a.params.hadamard.k);
}

// Write the turned query as a row of DIM f16 numbers.
template <int DIM> static __device__ void lctx_put_query(const lctx_attend_args & a, int token, int head, int32_t angle,
                                                         float scale, uint16_t * to) {
    constexpr int N = (DIM + LCTX_WARP - 1) / LCTX_WARP;
    float x[N];
    lctx_turn_query(a, token, head, angle, scale, x);
    lctx_unrolled<N>([&](int i) {
        const int d = i * LCTX_WARP + lctx_lane();
        if (d < DIM) {
            to[d] = (uint16_t)lctx_pack_limited(x[i], 0.0f);
        }
    });
}
