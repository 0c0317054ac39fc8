// Products of four rows of Q8_0 with a few columns of a tile (bytes.h): rows are read as they lie. Sums are made in the
// order of a panel, so a column has the same bits however many columns there are.
#pragma once

#include "ahead.h"
#include "bytes.h"

constexpr int LCTX_STRAIGHT_ROWS = 4;  // that are read together

#if LCTX_HAS_DOT && !LCTX_DOT_SIGNED  // not on ARM
#define LCTX_HAS_STRAIGHT 1

static inline __m256i lctx_dot(__m256i weights, __m256i column) {
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), weights, column);
#else
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), weights, column);
#endif
}

constexpr int LCTX_STRAIGHT_COLUMNS = 3;  // with more, panels are the faster way

// rows: of n_block blocks each, the first of them number `row`; n_rows of them are wanted.
template <int NC> static void lctx_multiply_four(const block_q8_0 * const (&rows)[LCTX_STRAIGHT_ROWS], int64_t n_block,
                                                 const lctx_column_bytes & x, int n_rows, const lctx_tile_ends & ends,
                                                 int64_t row) {
    const int64_t four = LCTX_STRAIGHT_ROWS * n_block,
                  n_ahead = (LCTX_AHEAD / sizeof(block_q8_0) + four - 1) / four * four;
    __m128 sums[NC] = {};
    for (int64_t b = 0; b < n_block; b++) {
        __m256i bytes[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __builtin_prefetch(rows[r] + b + n_ahead, 0, 2);  // of other four rows, into the second-level cache
            bytes[r] = _mm256_loadu_si256((const __m256i *)rows[r][b].qs) ^ _mm256_set1_epi8(-128);
        }
        const auto half = [&](int r) { return (short)rows[r][b].d; };
        const __m128 scales = _mm_cvtph_ps(_mm_setr_epi16(half(0), half(1), half(2), half(3), 0, 0, 0, 0));
#pragma GCC unroll 4
        for (int c = 0; c < NC; c++) {
            const __m256i column = _mm256_load_si256((const __m256i *)(x.bytes + (b * LCTX_TILE + c) * 32));
            const auto product = [&](int r) { return lctx_dot(bytes[r], column); };
            const __m256i halves =
                _mm256_hadd_epi32(_mm256_hadd_epi32(product(0), product(1)), _mm256_hadd_epi32(product(2), product(3)));
            const __m128i of_rows =
                _mm_add_epi32(_mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)),
                              _mm_set1_epi32(x.starts[b * LCTX_TILE + c]));
            sums[c] += _mm_cvtepi32_ps(of_rows) * (scales * _mm_set1_ps(x.scales[b * LCTX_TILE + c]));
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < NC; c++) {
        const __m128 column = sums[c];
        memcpy(ends.out[c] + row, &column, n_rows * sizeof(float));
    }
}

#else
#define LCTX_HAS_STRAIGHT 0
#endif
