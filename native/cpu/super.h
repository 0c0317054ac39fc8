// Products of rows of Q4_K with a few columns, 256 values at a time: scales of groups stay integers, so a block has one product of floats.
#pragma once

#include "panel.h"
#include "round.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>

constexpr int64_t LCTX_SUPER_AHEAD = 4096;  // bytes that are fetched early, into the second-level cache

// A column of bytes, as such rows meet it.
//   bytes   [n_block][4][64]: groups 0 and 2, 1 and 3, 4 and 6, 5 and 7
//   scales  [n_block]
//   sums    [n_block][8]: of the groups' bytes
struct lctx_super_column {
    int8_t * bytes;
    float * scales;
    int16_t * sums;
};

static inline void lctx_fill_super(const lctx_super_column & to, const float * x, int64_t block) {
    const float * values = x + block * QK_K;
    const lctx_scale scale = lctx_scale_of(values, QK_K);
    for (int g = 0; g < 8; g++) {
        int8_t * bytes = to.bytes + block * QK_K + (g / 4 * 2 + g % 2) * 64 + g % 4 / 2 * 32;
        to.sums[block * 8 + g] = (int16_t)lctx_round(values + 32 * g, 32, scale.inverse, bytes);
    }
    to.scales[block] = scale.scale;
}

// Which byte of the scales is in a byte of the lanes of 16 bits that multiply the sums of a half; 128: none, it is 0. Sums of groups 0
// and 1 are in the first two quarters of a register, those of groups 2 and 3 in the others.
struct lctx_super_lanes {
    uint8_t of[2][64];
    constexpr lctx_super_lanes() : of() {
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 64; i++) {
                of[half][i] = (uint8_t)(i % 2 ? 128 : 4 * half + i / 32 * 2 + i % 16 / 8);
            }
        }
    }
};

// A row of n_block blocks with NC columns.
template <int NC>
static void lctx_multiply_super(const block_q4_K * row, int64_t n_block, const lctx_super_column * x, float * out, int64_t out_row) {
    lctx_vf products[NC] = {};
    __m128 mins[NC] = {};
    static constexpr lctx_super_lanes LANES;
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t b = 0; b < n_block; b++) {
        const block_q4_K & w = row[b];
        for (size_t byte = 0; byte < sizeof(w); byte += 64) {
            __builtin_prefetch((const char *)&w + LCTX_SUPER_AHEAD + byte, 0, 2);
        }
        const lctx_four_scales first = lctx_unpack_scales(w.scales, 0), second = lctx_unpack_scales(w.scales, 1);
        const __m128i both = _mm_setr_epi32((int)first.scales, (int)second.scales, (int)first.mins, (int)second.mins);
        const __m512i scales = _mm512_maskz_broadcast_i32x4(0xffff, both);
        const __m128i min = _mm_cvtepu8_epi16(_mm_srli_si128(both, 8));
        const float d = lctx_from_half(w.d), d_min = lctx_from_half(w.dmin);
        __m512i sums[NC];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i q = _mm512_loadu_si512(w.qs + 64 * half);
            const __m512i low = _mm512_and_si512(q, nibble), high = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, q, 4), nibble);
            const __m512i lanes = _mm512_maskz_shuffle_epi8(~0ull, scales, _mm512_loadu_si512(LANES.of[half]));
#pragma GCC unroll 4
            for (int c = 0; c < NC; c++) {
                const __m512i * bytes = (const __m512i *)(x[c].bytes + b * QK_K) + 2 * half;
                const __m512i zero = _mm512_setzero_si512();
                const __m512i pairs =
                    _mm512_maskz_packs_epi32(~0u, _mm512_dpbusd_epi32(zero, low, bytes[0]), _mm512_dpbusd_epi32(zero, high, bytes[1]));
                sums[c] = _mm512_dpwssd_epi32(half ? sums[c] : zero, pairs, lanes);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < NC; c++) {
            const float scale = x[c].scales[b];
            products[c] += __builtin_convertvector((lctx_vi)sums[c], lctx_vf) * lctx_vset(d * scale);
            const __m128i min_sums = _mm_madd_epi16(min, _mm_load_si128((const __m128i *)(x[c].sums + b * 8)));
            mins[c] += _mm_cvtepi32_ps(min_sums) * _mm_set1_ps(d_min * scale);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < NC; c++) {
        const __m128 m = mins[c];
        out[c * out_row] = lctx_vsum(products[c]) - ((m[0] + m[1]) + (m[2] + m[3]));
    }
}

#endif
