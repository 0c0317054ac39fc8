// Products of rows of weights with a few columns: a row is read once, and its bytes stay in registers. Of Q4_0, Q4_1, Q8_0 and MXFP4.
#pragma once

#include "ahead.h"
#include "panel.h"
#include "round.h"

#if defined(__AVX512VNNI__)
#define LCTX_HAS_QUADS 1
#include <immintrin.h>

constexpr int LCTX_QUAD = 4;                   // groups of 32 values that are multiplied at once, in a quarter of the lanes each
constexpr int LCTX_QUAD_DIM = 32 * LCTX_QUAD;  // their values

// A column of bytes, as such rows meet it. A last quad that is not full has zeros.
//   bytes   [n_quad][2][LCTX_QUAD][16]: the first halves of the groups, then the second ones
//   scales  [n_quad][LCTX_QUAD][4]: of the groups, once for each lane
//   sums    [n_quad][LCTX_QUAD]: of the groups' values
struct lctx_quad_column {
    int8_t * bytes;
    float * scales;
    float * sums;
};

// Quad number `quad` of a column of k_dim values.
static inline void lctx_fill_quad(const lctx_quad_column & to, const float * x, int64_t k_dim, int64_t quad) {
    for (int b = 0; b < LCTX_QUAD; b++) {
        static constexpr float ZEROS[32] = {};
        const int64_t k = quad * LCTX_QUAD_DIM + 32 * b;
        const float * values = k < k_dim ? x + k : ZEROS;
        const lctx_scale scale = lctx_scale_of(values, 32);
        int8_t * bytes = to.bytes + quad * LCTX_QUAD_DIM + 16 * b;
        const float sum = lctx_round(values, 16, scale.inverse, bytes) + lctx_round(values + 16, 16, scale.inverse, bytes + 16 * LCTX_QUAD);
        to.sums[quad * LCTX_QUAD + b] = scale.scale * sum;
        std::fill_n(to.scales + (quad * LCTX_QUAD + b) * 4, 4, scale.scale);
    }
}

// Four groups in registers: value = scale * byte + min.
struct lctx_quad {
    lctx_bytes<64> low, high;  // the first halves of the groups, the second ones
    lctx_vf scales;            // once for each lane of a group
    __m128 mins;
};

// Four lanes of v, each in a quarter of the lanes.
static inline lctx_vf lctx_four_each(__m512 v, int l0, int l1, int l2, int l3) {
    const __m512i lanes = _mm512_setr_epi32(l0, l0, l0, l0, l1, l1, l1, l1, l2, l2, l2, l2, l3, l3, l3, l3);
    return (lctx_vf)_mm512_maskz_permutexvar_ps(0xffff, lanes, v);  // with a mask, or GCC 12 warns of its own header
}

// Scales of blocks whose bytes have a zero point instead of a min.
static inline void lctx_set_scales(lctx_quad & to, ggml_half d0, ggml_half d1, ggml_half d2, ggml_half d3, float zero) {
    const __m128 d = _mm_cvtph_ps(_mm_setr_epi16((short)d0, (short)d1, (short)d2, (short)d3, 0, 0, 0, 0));
    to.scales = lctx_four_each(_mm512_castps128_ps512(d), 0, 1, 2, 3);
    to.mins = d * -zero;
}

// 16 bytes of each of four blocks.
static inline __m512i lctx_load_four(const void * b0, const void * b1, const void * b2, const void * b3) {
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)b0));
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)b1), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)b2), 2);
    return _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)b3), 3);
}

template <class BLOCK> static inline void lctx_load_nibbles(const BLOCK * b, lctx_quad & to) {
    const auto both = (lctx_bytes<64>)lctx_load_four(b[0].qs, b[1].qs, b[2].qs, b[3].qs);
    to.low = both & 15;
    to.high = both >> 4;
}

static inline lctx_quad lctx_load_quad(const block_q4_0 * row, int64_t i) {
    const block_q4_0 * b = row + i * LCTX_QUAD;
    lctx_quad quad;
    lctx_load_nibbles(b, quad);
    lctx_set_scales(quad, b[0].d, b[1].d, b[2].d, b[3].d, 8.0f);
    return quad;
}

static inline lctx_quad lctx_load_quad(const block_q4_1 * row, int64_t i) {
    const block_q4_1 * b = row + i * LCTX_QUAD;
    lctx_quad quad;
    lctx_load_nibbles(b, quad);
    const __m256 dm = _mm256_cvtph_ps(_mm_setr_epi32((int)b[0].dm, (int)b[1].dm, (int)b[2].dm, (int)b[3].dm));
    quad.scales = lctx_four_each(_mm512_castps256_ps512(dm), 0, 2, 4, 6);
    quad.mins = _mm256_castps256_ps128(_mm256_permutevar8x32_ps(dm, _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7)));
    return quad;
}

// Signed bytes, as bytes with the zero point 128.
static inline lctx_quad lctx_load_quad(const block_q8_0 * row, int64_t i) {
    const block_q8_0 * b = row + i * LCTX_QUAD;
    const __m512i sign = _mm512_set1_epi8(-128);
    lctx_quad quad;
    quad.low = (lctx_bytes<64>)_mm512_xor_si512(lctx_load_four(b[0].qs, b[1].qs, b[2].qs, b[3].qs), sign);
    quad.high = (lctx_bytes<64>)_mm512_xor_si512(lctx_load_four(b[0].qs + 16, b[1].qs + 16, b[2].qs + 16, b[3].qs + 16), sign);
    lctx_set_scales(quad, b[0].d, b[1].d, b[2].d, b[3].d, 128.0f);
    return quad;
}

// 2^(e - 128) for four bytes e in lanes; it is no normal number for the first two.
static inline __m128 lctx_half_powers(__m128i e) {
    const __m128i normal = _mm_sub_epi32(_mm_slli_epi32(e, 23), _mm_set1_epi32(1 << 23));
    const __m128i small = _mm_min_epu32(_mm_sllv_epi32(_mm_set1_epi32(1 << 21), e), _mm_set1_epi32(1 << 22));
    return _mm_castsi128_ps(_mm_max_epi32(normal, small));
}

static inline lctx_quad lctx_load_quad(const block_mxfp4 * row, int64_t i) {
    typedef lctx_weight<GGML_TYPE_MXFP4> W;
    const block_mxfp4 * b = row + i * LCTX_QUAD;
    const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128((const __m128i *)W::BYTES));
    lctx_quad quad;
    lctx_load_nibbles(b, quad);
    quad.low = (lctx_bytes<64>)_mm512_maskz_shuffle_epi8(~0ull, table, (__m512i)quad.low);
    quad.high = (lctx_bytes<64>)_mm512_maskz_shuffle_epi8(~0ull, table, (__m512i)quad.high);
    const __m128 d = lctx_half_powers(_mm_setr_epi32(b[0].e, b[1].e, b[2].e, b[3].e));
    quad.scales = lctx_four_each(_mm512_castps128_ps512(d), 0, 1, 2, 3);
    quad.mins = d * -(float)W::ZERO;
    return quad;
}

// A row of k_dim values with NC columns.
template <class BLOCK, int NC>
static void lctx_multiply_row(const BLOCK * row, int64_t k_dim, const lctx_quad_column * x, float * out, int64_t out_row) {
    constexpr size_t QUAD_BYTES = LCTX_QUAD * sizeof(BLOCK);
    lctx_vf products[NC] = {};
    __m128 mins[NC] = {};
    const auto add = [&](const lctx_quad & quad, int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            const __m512i * bytes = (const __m512i *)(x[c].bytes + i * LCTX_QUAD_DIM);
            const __m512i low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)quad.low, bytes[0]);
            const lctx_vi sum = (lctx_vi)_mm512_dpbusd_epi32(low, (__m512i)quad.high, bytes[1]);
            products[c] += __builtin_convertvector(sum, lctx_vf) * (quad.scales * lctx_vload(x[c].scales + i * 4 * LCTX_QUAD));
            mins[c] += quad.mins * _mm_load_ps(x[c].sums + i * LCTX_QUAD);
        }
    };
    const int64_t n_quad = k_dim / LCTX_QUAD_DIM;
    for (int64_t i = 0; i < n_quad; i++) {
        lctx_read_ahead((const char *)row + i * QUAD_BYTES, QUAD_BYTES);
        add(lctx_load_quad(row, i), i);
    }
    if (k_dim % LCTX_QUAD_DIM != 0) {
        BLOCK last[LCTX_QUAD] = {};
        std::copy_n(row + n_quad * LCTX_QUAD, k_dim % LCTX_QUAD_DIM / 32, last);
        add(lctx_load_quad(last, 0), n_quad);
    }
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        const __m128 m = mins[c];
        out[c * out_row] = lctx_vsum(products[c]) + ((m[0] + m[1]) + (m[2] + m[3]));
    }
}

#else
#define LCTX_HAS_QUADS 0
#endif
