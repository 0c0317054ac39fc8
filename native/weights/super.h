// Products of rows of K-quants with a few columns, 256 values at a time: scales of groups stay integers, so a block has
// one product of floats. Of Q4_K, Q5_K and Q6_K.
#pragma once

#include "../cpu/round.h"
#include "ahead.h"
#include "panel.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#define LCTX_HAS_SUPER 1
#include <immintrin.h>

// A column of bytes, as such rows meet it.
//   bytes   [n_block][256]: in the order of a block's parts, low nibbles of one before its high ones
//   scales  [n_block]
//   sums    [n_block][16]: of the bytes of the groups that have a scale
struct lctx_super_column {
    int8_t * bytes;
    float * scales;
    int16_t * sums;
};

// Describes the layout of a block: where group g of a column begins in its bytes, and how its parts are loaded. Values
// are d * scale * (byte - ZERO), constants() being the scales then; or d * scale * byte + offset() * constant.
template <class BLOCK> struct lctx_super;

// The factor of a block's constants; 0 where its sums have them already.
template <class W> static inline float lctx_offset_of(const W & block) {
    if constexpr (W::ZERO > 0) {
        return 0.0f;
    } else {
        return block.offset();
    }
}

// The sum of integers, and of others, as floats in the first two lanes.
static inline __m128 lctx_two_sums(__m256i first, __m256i second) {
    const __m256i pairs = _mm256_hadd_epi32(first, second), fours = _mm256_hadd_epi32(pairs, pairs);
    return _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1)));
}

#if defined(__AVX512VNNI__)
#include "super-avx512.h"
#else
#include "super-avx2.h"
#endif

template <class BLOCK>
static inline void lctx_fill_super(const lctx_super_column & to, const float * x, int64_t block) {
    typedef lctx_super<BLOCK> W;
    const float * values = x + block * QK_K;
    const lctx_scale scale = lctx_scale_of(values, QK_K);
    std::fill_n(to.sums + block * 16, 16, (int16_t)0);
    for (int g = 0; g < QK_K / W::GROUP; g++) {
        to.sums[block * 16 + g] =
            (int16_t)lctx_round(values + W::GROUP * g, W::GROUP, scale.inverse, to.bytes + block * QK_K + W::at(g));
    }
    to.scales[block] = scale.scale;
}

#else
#define LCTX_HAS_SUPER 0
#endif
