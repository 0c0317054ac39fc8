// Rows of K and V in every type, 8 elements at a time. Rows lie at even addresses; those of blocks of 32 begin with the
// scale.
#pragma once

#include "../ops/nonlinear.h"
#include "device.h"
#include "ggml.h"

#include <cstring>

// The two bytes at an even address.
static __device__ __forceinline__ uint32_t lctx_word(const char * at) {
    return *(const uint16_t *)at;
}

// Read the N words at an even address, in loads of 4 bytes. The other bytes that are read lie in the same page, which
// begins at a multiple of 4.
template <int N> static __device__ __forceinline__ void lctx_words(const char * at, uint32_t (&x)[N]) {
    const int half = (int)((uintptr_t)at & 2);  // whether the address is between two words
    const uint32_t *from = (const uint32_t *)(at - half), choice = half ? 0x5432 : 0x3210;
    uint32_t low = from[0];
    lctx_unrolled<N>([&](int i) {
        const uint32_t high = from[i + 1 < N || half ? i + 1 : i];
        x[i] = lctx_permute(low, high, choice);
        low = high;
    });
}

// Return the 8 bytes at an even address.
static __device__ __forceinline__ uint2 lctx_words(const char * at) {
    uint32_t x[2];
    lctx_words(at, x);
    return {x[0], x[1]};
}

static __device__ __forceinline__ uint4 lctx_pack_8(const float (&x)[8]) {
    return {lctx_pack_limited(x[0], x[1]), lctx_pack_limited(x[2], x[3]), lctx_pack_limited(x[4], x[5]),
            lctx_pack_limited(x[6], x[7])};
}

// Element types: elements per block, bytes of a block, and elements [first, first + 8) of a block, first a multiple of
// 8: load(block, first, x) as floats, halves(block, first) as f16 numbers. (ggml: quants.c)
template <typename T, typename Bits> struct lctx_cuda_plain {
    static constexpr int BLOCK = 8, SIZE = 8 * sizeof(Bits);
    static __device__ __forceinline__ void load(const char * block, int, float (&x)[8]) {
        for (int i = 0; i < 8; i++) {
            x[i] = T::value(((const Bits *)block)[i]);
        }
    }
    static __device__ __forceinline__ uint4 halves(const char * block, int first) {
        float x[8];
        load(block, first, x);
        return lctx_pack_8(x);
    }
};

struct lctx_cuda_f32 : lctx_cuda_plain<lctx_cuda_f32, float> {
    static __device__ __forceinline__ float value(float x) { return x; }
};

struct lctx_cuda_bf16 : lctx_cuda_plain<lctx_cuda_bf16, uint16_t> {
    static __device__ __forceinline__ float value(uint16_t x) { return lctx_from_bf16(x); }
};

struct lctx_cuda_f16 : lctx_cuda_plain<lctx_cuda_f16, uint16_t> {
    static __device__ __forceinline__ float value(uint16_t x) { return lctx_from_half(x); }
    static __device__ __forceinline__ uint4 halves(const char * block, int) { return *(const uint4 *)block; }
};

// Blocks of 32: T::levels(block, first) gives 8 levels as bytes; an element is d * (level - MIDDLE), or d * level + m
// with MIN.
template <typename T> struct lctx_cuda_levels {
    // Levels without their middle as f16 numbers, which is exact: 0x6400 | level is the number 1024 + level.
    static __device__ __forceinline__ uint4 centered(const uint2 & levels) {
        constexpr uint32_t HIGH = 0x64646464, ZERO = 0x64006400 + T::MIDDLE * 0x10001;
        return {lctx_sub_2(lctx_permute(levels.x, HIGH, 0x4140), ZERO),
                lctx_sub_2(lctx_permute(levels.x, HIGH, 0x4342), ZERO),
                lctx_sub_2(lctx_permute(levels.y, HIGH, 0x4140), ZERO),
                lctx_sub_2(lctx_permute(levels.y, HIGH, 0x4342), ZERO)};
    }
    static __device__ __forceinline__ void load(const char * block, int first, float (&x)[8]) {
        const float d = lctx_from_half((uint16_t)lctx_word(block)),
                    m = T::MIN ? lctx_from_half((uint16_t)lctx_word(block + 2)) : 0.0f;
        const uint2 levels = T::levels(block, first);
        for (int i = 0; i < 8; i++) {
            x[i] = d * (float)((int)((i < 4 ? levels.x : levels.y) >> 8 * (i % 4) & 0xff) - T::MIDDLE) + m;
        }
    }
    // f(first, elements [first, first + 8) as f16 numbers) for all of a block, which is read once.
    template <typename F> static __device__ __forceinline__ void each_halves(const char * block, F && f) {
        uint2 levels[4];
        T::all_levels(block, levels);
        const uint2 scales = scales_of(block);
        lctx_unrolled<4>([&](int i) { f(8 * i, scaled(levels[i], scales)); });
    }
    static __device__ __forceinline__ uint4 halves(const char * block, int first) {
        const uint2 scales = scales_of(block);
        return scaled(T::levels(block, first), scales);
    }
    // Of a block: the factor and, with MIN, what is added, each twice as f16 numbers.
    static __device__ __forceinline__ uint2 scales_of(const char * block) {
        return {lctx_word(block) * 0x10001, T::MIN ? lctx_word(block + 2) * 0x10001 : 0};
    }
    // Rounded once, as the product of floats would be: d and a level have 19 bits together.
    static __device__ __forceinline__ uint4 scaled(const uint2 & levels, const uint2 & scales) {
        const uint32_t d = scales.x, m = scales.y;
        const uint4 x = centered(levels);
        if constexpr (T::MIN) {
            return {lctx_fma_2(x.x, d, m), lctx_fma_2(x.y, d, m), lctx_fma_2(x.z, d, m), lctx_fma_2(x.w, d, m)};
        } else {
            return {lctx_mul_2(x.x, d), lctx_mul_2(x.y, d), lctx_mul_2(x.z, d), lctx_mul_2(x.w, d)};
        }
    }
};

struct lctx_cuda_q8_0 : lctx_cuda_levels<lctx_cuda_q8_0> {
    static constexpr int BLOCK = 32, SIZE = 34, MIDDLE = 128;
    static constexpr bool MIN = false;
    static __device__ __forceinline__ uint2 levels(const char * block, int first) {
        const uint2 x = lctx_words(block + 2 + first);
        return {x.x ^ 0x80808080, x.y ^ 0x80808080};
    }
    static __device__ __forceinline__ void all_levels(const char * block, uint2 (&levels)[4]) {
        uint32_t x[8];
        lctx_words(block + 2, x);
        lctx_unrolled<4>([&](int i) { levels[i] = {x[2 * i] ^ 0x80808080, x[2 * i + 1] ^ 0x80808080}; });
    }
};

// 4 bits and, with HIGH, a fifth of each. Elements 0 to 15 are the low nibbles.
template <bool HIGH, bool MIN_> struct lctx_cuda_nibbles : lctx_cuda_levels<lctx_cuda_nibbles<HIGH, MIN_>> {
    static constexpr bool MIN = MIN_;
    static constexpr int BLOCK = 32, AT_HIGH = MIN ? 4 : 2, AT_LOW = AT_HIGH + (HIGH ? 4 : 0), SIZE = AT_LOW + 16;
    static constexpr int MIDDLE = MIN ? 0 : HIGH ? 16 : 8;
    static __device__ __forceinline__ uint2 levels(const char * block, int first) {
        const uint2 x = lctx_words(block + AT_LOW + first % 16);
        const int shift = first < 16 ? 0 : 4;
        uint2 levels = {x.x >> shift & 0x0f0f0f0f, x.y >> shift & 0x0f0f0f0f};
        if constexpr (HIGH) {
            const uint32_t high = *(const uint8_t *)(block + AT_HIGH + first / 8);
            levels.x |= fifth(high & 15);
            levels.y |= fifth(high >> 4);
        }
        return levels;
    }
    static __device__ __forceinline__ void all_levels(const char * block, uint2 (&levels)[4]) {
        uint32_t x[4], high[1] = {};
        lctx_words(block + AT_LOW, x);
        if constexpr (HIGH) {
            lctx_words(block + AT_HIGH, high);
        }
        lctx_unrolled<4>([&](int i) {
            const int at = i % 2 * 2, shift = i / 2 * 4, bit = 8 * i;
            levels[i] = {(x[at] >> shift & 0x0f0f0f0f) | fifth(high[0] >> bit & 15),
                         (x[at + 1] >> shift & 0x0f0f0f0f) | fifth(high[0] >> bit >> 4 & 15)};
        });
    }
    // Four bits, each as the fifth of a byte.
    static __device__ __forceinline__ uint32_t fifth(uint32_t four) { return four * 0x02040810 & 0x10101010; }
};
using lctx_cuda_q4_0 = lctx_cuda_nibbles<false, false>;
using lctx_cuda_q4_1 = lctx_cuda_nibbles<false, true>;
using lctx_cuda_q5_0 = lctx_cuda_nibbles<true, false>;
using lctx_cuda_q5_1 = lctx_cuda_nibbles<true, true>;

// Levels as in q4_0, which name values of a table.
struct lctx_cuda_iq4_nl : lctx_cuda_levels<lctx_cuda_iq4_nl> {
    using nibbles = lctx_cuda_q4_0;
    static constexpr int BLOCK = nibbles::BLOCK, SIZE = nibbles::SIZE, AT_LOW = nibbles::AT_LOW;
    static constexpr int MIDDLE = LCTX_IQ4_MIDDLE;
    static constexpr bool MIN = false;
    static __device__ __forceinline__ uint2 levels(const char * block, int first) {
        return values(nibbles::levels(block, first));
    }
    static __device__ __forceinline__ void all_levels(const char * block, uint2 (&levels)[4]) {
        nibbles::all_levels(block, levels);
        lctx_unrolled<4>([&](int i) { levels[i] = values(levels[i]); });
    }
    static __device__ __forceinline__ uint2 values(const uint2 & levels) {
        return {values(levels.x), values(levels.y)};
    }
    // The values of four levels, each above MIDDLE. A permutation selects among eight bytes, so two select by the low
    // three bits of each level, and a third one by the fourth bit.
    static __device__ __forceinline__ uint32_t values(uint32_t levels) {
        constexpr uint32_t T0 = lctx_iq4_bytes(0), T1 = lctx_iq4_bytes(4), T2 = lctx_iq4_bytes(8),
                           T3 = lctx_iq4_bytes(12);
        const uint32_t four = lctx_permute(levels | levels >> 4, 0, 0x4420), low = four & 0x7777;
        return lctx_permute(lctx_permute(T0, T1, low), lctx_permute(T2, T3, low), 0x3210 | (four & 0x8888) >> 1);
    }
};

// Elements [i, i + 8) of a row, i a multiple of 8.
template <typename T> static __device__ __forceinline__ void lctx_load_8(const char * row, int i, float (&x)[8]) {
    T::load(row + (size_t)(i / T::BLOCK) * T::SIZE, i % T::BLOCK, x);
}

// Load them as f16 numbers.
template <typename T> static __device__ __forceinline__ uint4 lctx_load_halves(const char * row, int i) {
    return T::halves(row + (size_t)(i / T::BLOCK) * T::SIZE, i % T::BLOCK);
}

// Load them where the type is known at run time only.
static __device__ inline void lctx_load_8(ggml_type type, const char * row, int i, float (&x)[8]) {
    switch (type) {
        case GGML_TYPE_F32:  return lctx_load_8<lctx_cuda_f32>(row, i, x);
        case GGML_TYPE_F16:  return lctx_load_8<lctx_cuda_f16>(row, i, x);
        case GGML_TYPE_BF16: return lctx_load_8<lctx_cuda_bf16>(row, i, x);
        case GGML_TYPE_Q8_0: return lctx_load_8<lctx_cuda_q8_0>(row, i, x);
        case GGML_TYPE_Q4_0: return lctx_load_8<lctx_cuda_q4_0>(row, i, x);
        case GGML_TYPE_Q4_1: return lctx_load_8<lctx_cuda_q4_1>(row, i, x);
        case GGML_TYPE_Q5_0: return lctx_load_8<lctx_cuda_q5_0>(row, i, x);
        case GGML_TYPE_Q5_1: return lctx_load_8<lctx_cuda_q5_1>(row, i, x);
        default:             return lctx_load_8<lctx_cuda_iq4_nl>(row, i, x);
    }
}

// Load floats from memory, at once where they are aligned.
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

// To a 16-byte aligned address.
static __device__ __forceinline__ void lctx_store_8(float * at, const float (&x)[8]) {
    *(float4 *)at = {x[0], x[1], x[2], x[3]};
    *(float4 *)(at + 4) = {x[4], x[5], x[6], x[7]};
}

// One element of a rotated row: pairs are (2i, 2i + 1), or with NEOX (i, i + n_dims/2); dimensions from n_dims on stay.
// cs: cos, sin, ... element(d) gives one that is not rotated.
template <typename E>
static __device__ __forceinline__ float lctx_rotated_of(E && element, int d, const float * cs, int n_dims, int mode) {
    if (d >= n_dims) {
        return element(d);
    }
    const int half = n_dims / 2;
    const bool neox = mode == GGML_ROPE_TYPE_NEOX;
    const int pair = !neox      ? d / 2
                     : d < half ? d
                                : d - half,
              first = neox ? pair : 2 * pair, second = neox ? pair + half : first + 1;
    const float c = cs[2 * pair], s = cs[2 * pair + 1];
    return d == first ? element(first) * c - element(second) * s : element(first) * s + element(second) * c;
}

static __device__ __forceinline__ float lctx_rotated(const float * row, int d, const float * cs, int n_dims, int mode) {
    return lctx_rotated_of([&](int e) { return row[e]; }, d, cs, n_dims, mode);
}
