// The Hadamard transform of rows (../ops/hadamard.h).
#pragma once

#include "../ops/args.h"
#include "rows.h"

constexpr int LCTX_MOST_BLOCK = 256;  // channels that are transformed together

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

// Elements [d, d + 8) of a stored row as they were before they were transformed.
static __device__ inline void lctx_load_8(ggml_type type, const char * row, int d, int block, float (&x)[8]) {
    if (block == 0) {
        return lctx_load_8(type, row, d, x);
    }
    const int first = d / block * block, mine = d % block / 8;
    float sum[8] = {};
    for (int octet = 0; octet < block / 8; octet++) {
        float y[8];
        lctx_load_8(type, row, first + 8 * octet, y);
        const float sign = __popc(octet & mine) & 1 ? -1.0f : 1.0f;
        lctx_unrolled<8>([&](int i) { sum[i] += sign * y[i]; });
    }
    const float scale = 1.0f / sqrtf((float)block);
    lctx_unrolled<8>([&](int i) {
        float all = 0.0f;
        lctx_unrolled<8>([&](int j) { all += (i & j & 1) ^ (i >> 1 & j >> 1 & 1) ^ (i >> 2 & j >> 2 & 1) ? -sum[j] : sum[j]; });
        x[i] = scale * all;
    });
}

// Transform a row of floats in place. The lanes of a warp together; each reads what it wrote.
static __device__ inline void lctx_transform_row(float * row, int dim, int block) {
    for (int first = 0; first < dim; first += block) {
        float x[LCTX_MOST_BLOCK / LCTX_WARP];
        lctx_unrolled<LCTX_MOST_BLOCK / LCTX_WARP>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            x[i] = d < block ? row[first + d] : 0.0f;
        });
        lctx_transform(x, block);
        lctx_unrolled<LCTX_MOST_BLOCK / LCTX_WARP>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            if (d < block) {
                row[first + d] = x[i];
            }
        });
    }
}

// The query of a token and head, times scale, turned to the position from which it looks and transformed as keys are, as a row of DIM f16
// numbers: 0 beyond the head. The lanes of a warp together.
template <int DIM>
static __device__ void lctx_put_query(const lctx_attend_args & a, int token, int head, int32_t angle, float scale, uint16_t * to) {
    constexpr int N = (DIM + LCTX_WARP - 1) / LCTX_WARP;
    const float * q = (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
    const float * cs = a.angles + (size_t)angle * a.n_dims;
    float x[N];
    lctx_unrolled<N>([&](int i) {
        const int d = i * LCTX_WARP + lctx_lane();
        x[i] = d < a.head_dim_k ? scale * lctx_rotated(q, d, cs, a.n_dims, a.params.rope_mode) : 0.0f;
    });
    lctx_transform(x, a.params.hadamard.k);
    lctx_unrolled<N>([&](int i) {
        const int d = i * LCTX_WARP + lctx_lane();
        if (d < DIM) {
            to[d] = (uint16_t)lctx_pack_limited(x[i], 0.0f);
        }
    });
}
