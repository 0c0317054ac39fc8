// Rows of K and V in every type, 8 elements at a time. Rows lie at even addresses; those of blocks of 32 begin with the scale.
#pragma once

#include "device.h"
#include "ggml.h"

#include <cstring>

// The two bytes at an even address.
static __device__ __forceinline__ uint32_t lctx_word(const char * at) {
    return *(const uint16_t *)at;
}

// Element types: elements per block, bytes of a block, and load(block, first, x): elements [first, first + 8) of a block, first a
// multiple of 8. (ggml: quants.c)
struct lctx_cuda_f32 {
    static constexpr int BLOCK = 8, SIZE = 32;
    static __device__ __forceinline__ void load(const char * block, int, float (&x)[8]) {
        for (int i = 0; i < 8; i++) {
            x[i] = ((const float *)block)[i];
        }
    }
};

struct lctx_cuda_f16 {
    static constexpr int BLOCK = 8, SIZE = 16;
    static __device__ __forceinline__ void load(const char * block, int, float (&x)[8]) {
        for (int i = 0; i < 8; i++) {
            x[i] = lctx_from_half(((const uint16_t *)block)[i]);
        }
    }
};

struct lctx_cuda_bf16 {
    static constexpr int BLOCK = 8, SIZE = 16;
    static __device__ __forceinline__ void load(const char * block, int, float (&x)[8]) {
        for (int i = 0; i < 8; i++) {
            x[i] = lctx_from_bf16(((const uint16_t *)block)[i]);
        }
    }
};

struct lctx_cuda_q8_0 {
    static constexpr int BLOCK = 32, SIZE = 34;
    static __device__ __forceinline__ void load(const char * block, int first, float (&x)[8]) {
        const float d = lctx_from_half((uint16_t)lctx_word(block));
        for (int i = 0; i < 8; i += 2) {
            const uint32_t two = lctx_word(block + 2 + first + i);
            x[i] = d * (float)(int8_t)(two & 0xff);
            x[i + 1] = d * (float)(int8_t)(two >> 8);
        }
    }
};

// 4 bits and, with HIGH, a fifth of each: d * (q - MIDDLE), or d * q + m with MIN. Elements 0 to 15 are the low nibbles.
template <bool HIGH, bool MIN> struct lctx_cuda_nibbles {
    static constexpr int BLOCK = 32, AT_HIGH = MIN ? 4 : 2, AT_LOW = AT_HIGH + (HIGH ? 4 : 0), SIZE = AT_LOW + 16;
    static constexpr int MIDDLE = MIN ? 0 : HIGH ? 16 : 8;
    static __device__ __forceinline__ void load(const char * block, int first, float (&x)[8]) {
        const float d = lctx_from_half((uint16_t)lctx_word(block)), m = MIN ? lctx_from_half((uint16_t)lctx_word(block + 2)) : 0.0f;
        const uint32_t high = HIGH ? (lctx_word(block + AT_HIGH) | lctx_word(block + AT_HIGH + 2) << 16) >> first : 0;
        for (int i = 0; i < 8; i += 2) {
            const uint32_t two = lctx_word(block + AT_LOW + first % 16 + i) >> (first < 16 ? 0 : 4);
            const uint32_t q0 = (two & 15) | (high >> i & 1) << 4, q1 = (two >> 8 & 15) | (high >> (i + 1) & 1) << 4;
            x[i] = d * (float)((int)q0 - MIDDLE) + m;
            x[i + 1] = d * (float)((int)q1 - MIDDLE) + m;
        }
    }
};
using lctx_cuda_q4_0 = lctx_cuda_nibbles<false, false>;
using lctx_cuda_q4_1 = lctx_cuda_nibbles<false, true>;
using lctx_cuda_q5_0 = lctx_cuda_nibbles<true, false>;
using lctx_cuda_q5_1 = lctx_cuda_nibbles<true, true>;

// Elements [i, i + 8) of a row, i a multiple of 8.
template <typename T> static __device__ __forceinline__ void lctx_load_8(const char * row, int i, float (&x)[8]) {
    T::load(row + (size_t)(i / T::BLOCK) * T::SIZE, i % T::BLOCK, x);
}

// The same where the type is known at run time only.
static __device__ inline void lctx_load_8(ggml_type type, const char * row, int i, float (&x)[8]) {
    switch (type) {
        case GGML_TYPE_F32:  return lctx_load_8<lctx_cuda_f32>(row, i, x);
        case GGML_TYPE_F16:  return lctx_load_8<lctx_cuda_f16>(row, i, x);
        case GGML_TYPE_BF16: return lctx_load_8<lctx_cuda_bf16>(row, i, x);
        case GGML_TYPE_Q8_0: return lctx_load_8<lctx_cuda_q8_0>(row, i, x);
        case GGML_TYPE_Q4_0: return lctx_load_8<lctx_cuda_q4_0>(row, i, x);
        case GGML_TYPE_Q4_1: return lctx_load_8<lctx_cuda_q4_1>(row, i, x);
        case GGML_TYPE_Q5_0: return lctx_load_8<lctx_cuda_q5_0>(row, i, x);
        default:             return lctx_load_8<lctx_cuda_q5_1>(row, i, x);
    }
}

// The same of floats in memory, at once where they are aligned.
static __device__ __forceinline__ void lctx_load_8(const float * at, float (&x)[8]) {
    if ((uintptr_t)at % 16 == 0) {
        const float4 low = *(const float4 *)at, high = *(const float4 *)(at + 4);
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        return;
    }
    for (int i = 0; i < 8; i++) {
        x[i] = at[i];
    }
}

// To a 16-byte aligned place.
static __device__ __forceinline__ void lctx_store_8(float * at, const float (&x)[8]) {
    *(float4 *)at = {x[0], x[1], x[2], x[3]};
    *(float4 *)(at + 4) = {x[4], x[5], x[6], x[7]};
}

// One element of a rotated row: pairs are (2i, 2i + 1), or with NEOX (i, i + n_dims/2); dimensions from n_dims on stay. cs: cos, sin, ...
// element(d) gives one that is not rotated.
template <typename E> static __device__ __forceinline__ float lctx_rotated_of(E && element, int d, const float * cs, int n_dims, int mode) {
    if (d >= n_dims) {
        return element(d);
    }
    const int half = n_dims / 2;
    const bool neox = mode == GGML_ROPE_TYPE_NEOX;
    const int pair = !neox ? d / 2 : d < half ? d : d - half, first = neox ? pair : 2 * pair, second = neox ? pair + half : first + 1;
    const float c = cs[2 * pair], s = cs[2 * pair + 1];
    return d == first ? element(first) * c - element(second) * s : element(first) * s + element(second) * c;
}

static __device__ __forceinline__ float lctx_rotated(const float * row, int d, const float * cs, int n_dims, int mode) {
    return lctx_rotated_of([&](int e) { return row[e]; }, d, cs, n_dims, mode);
}

// Rotate elements [d, d + 8) of a row, which x holds: octet(d, y) gives 8 others, d a multiple of 8; element(d) as above, where halves
// are no multiples of 8.
template <typename O, typename E> static __device__ __forceinline__ void lctx_rotate_8(float (&x)[8], int d, const float * cs, int n_dims,
                                                                                       int mode, O && octet, E && element) {
    const int half = n_dims / 2;
    const bool neox = mode == GGML_ROPE_TYPE_NEOX, is_whole = neox ? half % 8 == 0 : d + 8 <= n_dims;
    if (d >= n_dims) {
        return;
    }
    if (!is_whole) {
        float one_by_one[8];  // in memory; x stays in registers
        for (int i = 0; i < 8; i++) {
            one_by_one[i] = lctx_rotated_of(element, d + i, cs, n_dims, mode);
        }
        for (int i = 0; i < 8; i++) {
            x[i] = one_by_one[i];
        }
    } else if (neox) {
        const bool is_first = d < half;
        const float * at = cs + 2 * (is_first ? d : d - half);
        float y[8], low[8], high[8];
        octet(is_first ? d + half : d - half, y);
        lctx_load_8(at, low);
        lctx_load_8(at + 8, high);
        for (int i = 0; i < 8; i++) {
            const float c = i < 4 ? low[2 * i] : high[2 * i - 8], s = i < 4 ? low[2 * i + 1] : high[2 * i - 7];
            x[i] = is_first ? x[i] * c - y[i] * s : y[i] * s + x[i] * c;
        }
    } else {
        float of_pairs[8];
        lctx_load_8(cs + d, of_pairs);
        for (int i = 0; i < 8; i += 2) {
            const float c = of_pairs[i], s = of_pairs[i + 1], first = x[i], second = x[i + 1];
            x[i] = first * c - second * s;
            x[i + 1] = first * s + second * c;
        }
    }
}
