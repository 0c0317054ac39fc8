// Products of rows of weights with a few columns: a row is read once, and its bytes stay in registers. Of Q4_0, Q4_1,
// Q8_0 and MXFP4.
#pragma once

#include "../cpu/dot.h"
#include "../cpu/half.h"
#include "../cpu/round.h"
#include "ahead.h"
#include "panel.h"

#if LCTX_HAS_DOT && !LCTX_DOT_SIGNED  // not on ARM
#define LCTX_HAS_QUADS 1

constexpr int LCTX_QUADS_DIM = 32 * LCTX_QUADS;  // their values

// Gives the bytes of a block their meaning: value = scale * (byte - ZERO), or scale * byte + min.
template <class BLOCK> constexpr int lctx_zero_of = 0;
template <> constexpr int lctx_zero_of<block_q4_0> = 8;
template <> constexpr int lctx_zero_of<block_q8_0> = 128;
template <> constexpr int lctx_zero_of<block_mxfp4> = lctx_weight<GGML_TYPE_MXFP4>::ZERO;

// A column of bytes in the order that such rows need: n_piece pieces of LCTX_QUADS_DIM values. A last piece that is not
// full has zeros. In `starts`, the first lane of a group has the value for the whole group, the others 0.
//   bytes   [n_piece][2][LCTX_QUADS][16]: the first halves of the groups, then the second ones
//   scales  [n_piece][LCTX_QUADS][4]: of the groups, once for each lane
//   starts  [n_piece][LCTX_QUADS][4]: -ZERO * the sum of the bytes; with a min: the sum of the values, a float
struct lctx_quad_column {
    int8_t * bytes;
    float * scales;
    int32_t * starts;
};

// Piece number `piece` of a column of k_dim values, for rows of BLOCKs.
template <class BLOCK>
static inline void lctx_fill_quads(const lctx_quad_column & to, const float * x, int64_t k_dim, int64_t piece) {
    for (int b = 0; b < LCTX_QUADS; b++) {
        static constexpr float ZEROS[32] = {};
        const int64_t k = piece * LCTX_QUADS_DIM + 32 * b, lane = (piece * LCTX_QUADS + b) * 4;
        const float * values = k < k_dim ? x + k : ZEROS;
        const lctx_scale scale = lctx_scale_of(values, 32);
        int8_t * bytes = to.bytes + piece * LCTX_QUADS_DIM + 16 * b;
        const float sum = lctx_round(values, 16, scale.inverse, bytes) +
                          lctx_round(values + 16, 16, scale.inverse, bytes + 16 * LCTX_QUADS);
        std::fill_n(to.starts + lane, 4, 0);
        if constexpr (lctx_zero_of<BLOCK> == 0) {
            const float of_values = scale.scale * sum;
            memcpy(to.starts + lane, &of_values, sizeof(of_values));
        } else if (scale.scale == scale.scale) {  // or the product is NaN anyway
            to.starts[lane] = -lctx_zero_of<BLOCK> * (int32_t)sum;
        }
        std::fill_n(to.scales + lane, 4, scale.scale);
    }
}

typedef lctx_bytes<4 * LCTX_VL> lctx_quad_bytes;

// Some groups in registers, scales and minima once for each lane of a group.
struct lctx_quads {
    lctx_quad_bytes low, high;  // the first halves of the groups, the second ones
    lctx_vf scales, mins;
};

// These differ in the width of a vector: 16 bytes of each group, a number of each group for all its lanes, bytes of a
// table by their index.
#if defined(__AVX512F__)
static inline lctx_quad_bytes lctx_load_quads(const void * first, size_t step) {
    const auto load = [&](int b) { return _mm_loadu_si128((const __m128i *)((const char *)first + b * step)); };
    __m512i four = _mm512_castsi128_si512(load(0));
    four = _mm512_inserti32x4(four, load(1), 1);
    four = _mm512_inserti32x4(four, load(2), 2);
    return (lctx_quad_bytes)_mm512_inserti32x4(four, load(3), 3);
}
static inline lctx_vf lctx_four_each(__m128 of_groups) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return (lctx_vf)_mm512_maskz_permutexvar_ps(0xffff, lanes,
                                                _mm512_castps128_ps512(of_groups));  // with a mask, or GCC 12 warns
}
static inline lctx_quad_bytes lctx_look_up_quads(__m128i table, lctx_quad_bytes index) {
    return (lctx_quad_bytes)_mm512_maskz_shuffle_epi8(~0ull, _mm512_maskz_broadcast_i32x4(0xffff, table),
                                                      (__m512i)index);
}
#else
static inline lctx_quad_bytes lctx_load_quads(const void * first, size_t step) {
    const auto load = [&](int b) { return _mm_loadu_si128((const __m128i *)((const char *)first + b * step)); };
    return (lctx_quad_bytes)_mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(1), 1);
}
static inline lctx_vf lctx_four_each(__m128 of_groups) {
    return (lctx_vf)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(of_groups),
                                             _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}
static inline lctx_quad_bytes lctx_look_up_quads(__m128i table, lctx_quad_bytes index) {
    return (lctx_quad_bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)index);
}
#endif

// f(block) of the blocks as lanes; lanes that are left have 0.
template <typename BLOCK, typename F> static inline __m128i lctx_of_blocks(const BLOCK * b, F && f) {
    const auto of = [&](int i) { return i < LCTX_QUADS ? f(b[i]) : 0; };
    return _mm_setr_epi32(of(0), of(1), of(2), of(3));
}

template <class BLOCK> static inline lctx_vf lctx_scales_of(const BLOCK * b) {
    const __m128i halves = lctx_of_blocks(b, [](const BLOCK & block) { return (int)block.d; });
    return lctx_four_each(_mm_cvtph_ps(_mm_packus_epi32(halves, halves)));
}

template <class BLOCK> static inline void lctx_load_nibbles(const BLOCK * b, lctx_quads & to) {
    const lctx_quad_bytes both = lctx_load_quads(b->qs, sizeof(BLOCK));
    to.low = both & 15;
    to.high = both >> 4;
}

static inline lctx_quads lctx_load(const block_q4_0 * b) {
    lctx_quads quads;
    lctx_load_nibbles(b, quads);
    quads.scales = lctx_scales_of(b);
    return quads;
}

static inline lctx_quads lctx_load(const block_q4_1 * b) {
    lctx_quads quads;
    lctx_load_nibbles(b, quads);
    const __m256 dm = _mm256_cvtph_ps(lctx_of_blocks(b, [](const block_q4_1 & block) { return (int)block.dm; }));
    const __m256 apart = _mm256_permutevar8x32_ps(dm, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    quads.scales = lctx_four_each(_mm256_castps256_ps128(apart));
    quads.mins = lctx_four_each(_mm256_extractf128_ps(apart, 1));
    return quads;
}

// Signed bytes, as bytes with the zero point 128.
static inline lctx_quads lctx_load(const block_q8_0 * b) {
    lctx_quads quads;
    quads.low = lctx_load_quads(b->qs, sizeof(*b)) ^ 0x80;
    quads.high = lctx_load_quads(b->qs + 16, sizeof(*b)) ^ 0x80;
    quads.scales = lctx_scales_of(b);
    return quads;
}

// 2^(e - 128) for every byte e, as bits; the first two are subnormal.
struct lctx_half_powers {
    int32_t of[256];
    constexpr lctx_half_powers() : of() {
        for (int e = 0; e < 256; e++) {
            of[e] = e < 2 ? 1 << (21 + e) : (e - 1) << 23;
        }
    }
};

static inline lctx_quads lctx_load(const block_mxfp4 * b) {
    static constexpr lctx_half_powers POWERS;
    const __m128i table = _mm_loadu_si128((const __m128i *)lctx_weight<GGML_TYPE_MXFP4>::BYTES);
    lctx_quads quads;
    lctx_load_nibbles(b, quads);
    quads.low = lctx_look_up_quads(table, quads.low);
    quads.high = lctx_look_up_quads(table, quads.high);
    quads.scales = lctx_four_each(
        _mm_castsi128_ps(lctx_of_blocks(b, [](const block_mxfp4 & block) { return POWERS.of[block.e]; })));
    return quads;
}

// A row of k_dim values with NC columns. EXACT: a group has one product of floats, as in a panel (bytes.h), in all
// lanes of its quad; else each lane has.
template <class BLOCK, int NC, bool EXACT> static void lctx_multiply_row(const BLOCK * row, int64_t k_dim,
                                                                         const lctx_quad_column * x, float * out,
                                                                         int64_t out_row) {
    constexpr bool HAS_MIN = lctx_zero_of<BLOCK> == 0;
    lctx_vf products[NC] = {};
    const auto add = [&](const lctx_quads & quads, int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            const lctx_vi * bytes = (const lctx_vi *)(x[c].bytes + i * LCTX_QUADS_DIM);
            lctx_vi starts;
            memcpy(&starts, x[c].starts + i * LCTX_VL, sizeof(starts));
            const lctx_vi low = lctx_vdot_bytes(HAS_MIN ? lctx_vi{} : starts, (lctx_vi)quads.low, bytes[0]);
            lctx_vi sum = lctx_vdot_bytes(low, (lctx_vi)quads.high, bytes[1]);
            if constexpr (EXACT) {
                sum += (lctx_vi)lctx_vswap<1>((lctx_vf)sum, lctx_lanes{});
                sum += (lctx_vi)lctx_vswap<2>((lctx_vf)sum, lctx_lanes{});
            }
            products[c] +=
                __builtin_convertvector(sum, lctx_vf) * (quads.scales * lctx_vload(x[c].scales + i * LCTX_VL));
            if constexpr (HAS_MIN) {
                products[c] += quads.mins * (lctx_vf)starts;
            }
        }
    };
    const int64_t n_piece = k_dim / LCTX_QUADS_DIM;
    for (int64_t i = 0; i < n_piece; i++) {
        lctx_read_ahead(row + i * LCTX_QUADS, LCTX_QUADS * sizeof(BLOCK));
        add(lctx_load(row + i * LCTX_QUADS), i);
    }
    if (k_dim % LCTX_QUADS_DIM != 0) {
        BLOCK last[LCTX_QUADS] = {};
        std::copy_n(row + n_piece * LCTX_QUADS, k_dim % LCTX_QUADS_DIM / 32, last);
        add(lctx_load(last), n_piece);
    }
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        if constexpr (EXACT) {
            float sum = products[c][0];
            for (int quad = 1; quad < LCTX_QUADS; quad++) {
                sum += products[c][4 * quad];
            }
            out[c * out_row] = sum;
        } else {
            out[c * out_row] = lctx_vsum(products[c]);
        }
    }
}

#else
#define LCTX_HAS_QUADS 0
#endif
