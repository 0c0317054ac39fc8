// Stored rows as float vectors, converted in registers: one struct per type, whose load(row, d) gives the elements [d,
// d + LCTX_VL) of a row. d and the length of the row are multiples of LCTX_VL.
#pragma once

#include "vec.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstring>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// LCTX_VL small integers as int32. With a mask, since without one GCC 12 warns of the uninitialized vector that its own
// header passes on.
#if defined(__AVX512F__)
constexpr __mmask16 LCTX_ALL_LANES = 0xffff;

static inline lctx_vi lctx_widen(const int8_t * p) {
    return (lctx_vi)_mm512_maskz_cvtepi8_epi32(LCTX_ALL_LANES, _mm_loadu_si128((const __m128i *)p));
}
static inline lctx_vi lctx_widen(const uint8_t * p) {
    return (lctx_vi)_mm512_maskz_cvtepu8_epi32(LCTX_ALL_LANES, _mm_loadu_si128((const __m128i *)p));
}
static inline lctx_vi lctx_widen(const uint16_t * p) {
    return (lctx_vi)_mm512_maskz_cvtepu16_epi32(LCTX_ALL_LANES, _mm256_loadu_si256((const __m256i *)p));
}
#elif defined(__AVX2__)
static inline lctx_vi lctx_widen(const int8_t * p) {
    return (lctx_vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static inline lctx_vi lctx_widen(const uint8_t * p) {
    return (lctx_vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static inline lctx_vi lctx_widen(const uint16_t * p) {
    return (lctx_vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
#else
template <typename T> static inline lctx_vi lctx_widen(const T * p) {
    typedef T narrow __attribute__((vector_size(LCTX_VL * sizeof(T))));
    narrow v;
    memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, lctx_vi);
}
#endif

#if defined(__AVX512F__)
static inline lctx_vf lctx_from_half(__m256i h) {
    return (lctx_vf)_mm512_maskz_cvtph_ps(LCTX_ALL_LANES, h);
}
#endif

// LCTX_VL half-precision numbers.
static inline lctx_vf lctx_vload_half(const void * p) {
#if defined(__AVX512F__)
    return lctx_from_half(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX__) && defined(__F16C__)
    return (lctx_vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return (lctx_vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
#else
    lctx_vf v;
    for (int i = 0; i < LCTX_VL; i++) {
        v[i] = ggml_fp16_to_fp32(((const ggml_fp16_t *)p)[i]);
    }
    return v;
#endif
}

// One half-precision number in all lanes.
static inline lctx_vf lctx_vset_half(ggml_half h) {
#if defined(__AVX512F__)
    return lctx_from_half(_mm256_set1_epi16((short)h));
#elif defined(__AVX__) && defined(__F16C__)
    return (lctx_vf)_mm256_cvtph_ps(_mm_set1_epi16((short)h));
#elif defined(__ARM_NEON)
    return (lctx_vf)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h)));
#else
    return lctx_vset(ggml_fp16_to_fp32(h));
#endif
}

struct lctx_rows_f32 {
    static lctx_vf load(const char * row, int d) { return lctx_vload((const float *)row + d); }
};

struct lctx_rows_f16 {
    static lctx_vf load(const char * row, int d) { return lctx_vload_half((const ggml_half *)row + d); }
};

struct lctx_rows_bf16 {
    static lctx_vf load(const char * row, int d) {
        const lctx_vi bits = lctx_widen((const uint16_t *)row + d) << 16;
        return (lctx_vf)bits;
    }
};

struct lctx_rows_q8_0 {
    static lctx_vf load(const char * row, int d) {
        const block_q8_0 & b = ((const block_q8_0 *)row)[d / QK8_0];
        return lctx_vset_half(b.d) * __builtin_convertvector(lctx_widen(b.qs + d % QK8_0), lctx_vf);
    }
};

// The low halves of the bytes are the first 16 elements of a block, the high halves the last.
struct lctx_rows_q4_0 {
    static lctx_vf load(const char * row, int d) {
        const block_q4_0 & b = ((const block_q4_0 *)row)[d / QK4_0];
        const lctx_vi q = ((lctx_widen(b.qs + d % (QK4_0 / 2)) >> (d % QK4_0 < QK4_0 / 2 ? 0 : 4)) & 15) - 8;
        return lctx_vset_half(b.d) * __builtin_convertvector(q, lctx_vf);
    }
};

// D vectors from element d on, a multiple of D * LCTX_VL.
template <typename R, int D> static inline void lctx_load_all(R, const char * row, int d, lctx_vf (&to)[D]) {
    for (int j = 0; j < D; j++) {
        to[j] = R::load(row, d + j * LCTX_VL);
    }
}

#if defined(__aarch64__)
// Of quantized rows in vectors of four, 16 elements are widened together and share their scale.
static inline void lctx_widen_16(int8x16_t bytes, lctx_vf scale, lctx_vf * to) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    to[0] = scale * (lctx_vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    to[1] = scale * (lctx_vf)vcvtq_f32_s32(vmovl_high_s16(low));
    to[2] = scale * (lctx_vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    to[3] = scale * (lctx_vf)vcvtq_f32_s32(vmovl_high_s16(high));
}

template <int D>
static inline std::enable_if_t<D % 4 == 0> lctx_load_all(lctx_rows_q8_0, const char * row, int d, lctx_vf (&to)[D]) {
    static_assert(QK8_0 % (D * LCTX_VL) == 0);
    const block_q8_0 & b = ((const block_q8_0 *)row)[d / QK8_0];
    for (int j = 0; j < D; j += 4) {
        lctx_widen_16(vld1q_s8(b.qs + d % QK8_0 + j * LCTX_VL), lctx_vset_half(b.d), to + j);
    }
}

template <int D>
static inline std::enable_if_t<D % 4 == 0> lctx_load_all(lctx_rows_q4_0, const char * row, int d, lctx_vf (&to)[D]) {
    static_assert(QK4_0 % (D * LCTX_VL) == 0);
    const block_q4_0 & b = ((const block_q4_0 *)row)[d / QK4_0];
    const uint8x16_t both = vld1q_u8(b.qs);
    for (int j = 0; j < D; j += 4) {
        const uint8x16_t half =
            d % QK4_0 + j * LCTX_VL < QK4_0 / 2 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
        lctx_widen_16(vsubq_s8(vreinterpretq_s8_u8(half), vdupq_n_s8(8)), lctx_vset_half(b.d), to + j);
    }
}
#endif

// f(reader) for the types that vectors can read; false for the others.
template <typename F> static inline bool lctx_with_rows(ggml_type type, F && f) {
    switch (type) {
        case GGML_TYPE_F32:  f(lctx_rows_f32{}); return true;
        case GGML_TYPE_F16:  f(lctx_rows_f16{}); return true;
        case GGML_TYPE_BF16: f(lctx_rows_bf16{}); return true;
        case GGML_TYPE_Q8_0: f(lctx_rows_q8_0{}); return true;
        case GGML_TYPE_Q4_0: f(lctx_rows_q4_0{}); return true;
        default:             return false;
    }
}
