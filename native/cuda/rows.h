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

// One element of a rotated row: pairs are (2i, 2i + 1), or with NEOX (i, i + n_dims/2); dimensions from n_dims on stay. cs: cos, sin, ...
static __device__ __forceinline__ float lctx_rotated(const float * row, int d, const float * cs, int n_dims, int mode) {
    if (d >= n_dims) {
        return row[d];
    }
    const int half = n_dims / 2;
    const bool neox = mode == GGML_ROPE_TYPE_NEOX;
    const int pair = neox ? d % half : d / 2, first = neox ? pair : 2 * pair, second = neox ? pair + half : first + 1;
    const float c = cs[2 * pair], s = cs[2 * pair + 1];
    return d == first ? row[first] * c - row[second] * s : row[first] * s + row[second] * c;
}
