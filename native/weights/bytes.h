// Products of a panel (panel.h) with a tile of columns of bytes.
#pragma once

#include "../cpu/round.h"
#include "panel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define LCTX_HAS_BYTES 1
#else
#define LCTX_HAS_BYTES 0
#endif

#if LCTX_HAS_BYTES

typedef int16_t lctx_vs __attribute__((vector_size(LCTX_VL * 4)));

// Sums of two products of bytes, and of two products of 16 bits.
#if defined(__AVX512BW__)
static inline lctx_vs lctx_vpairs(lctx_vi weights, int32_t four) {
    return (lctx_vs)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(four));
}
static inline lctx_vi lctx_vmadd(lctx_vs a, lctx_vs b) {
    return (lctx_vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#else
static inline lctx_vs lctx_vpairs(lctx_vi weights, int32_t four) {
    return (lctx_vs)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four));
}
static inline lctx_vi lctx_vmadd(lctx_vs a, lctx_vs b) {
    return (lctx_vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#endif

// sum + the products of four bytes of each lane of weights with four bytes. With dpbusd all products of bytes are
// exact; without it a pair of them must fit in 16 bits, so weights have seven bits at most.
static inline lctx_vi lctx_vdot(lctx_vi sum, lctx_vi weights, int32_t four) {
#if LCTX_HAS_DOT
    return lctx_vdot_bytes(sum, weights, four - lctx_vi{});
#else
    sum += lctx_vmadd(lctx_vpairs(weights, four), 1 - lctx_vs{});
    __asm__("" : "+v"(sum));  // or GCC puts off the additions and spills what they wait for
    return sum;
#endif
}

static inline lctx_vi lctx_viset(int32_t x) {
    return x - lctx_vi{};
}

constexpr int LCTX_TILE = 8;  // columns that are multiplied together: their sums stay in registers

// LCTX_TILE columns of k_dim bytes, as a panel of W meets them.
//   bytes   [k_dim / 32][LCTX_TILE][32]
//   scales  [k_dim / N][LCTX_TILE]
//   starts  [k_dim / GROUP][LCTX_TILE]: -ZERO times the sum of the bytes of a group; NULL where the type HAS_MIN. For
//   scales of 16 bits
//           half of it, twice, as 16 bits
//   sums    the same, where the type HAS_MIN: the sum, with the column's scale where there is one for each group
struct lctx_column_bytes {
    int8_t * bytes;
    float * scales;
    int32_t * starts;
    float * sums;
};

// Says where the values of a tile's columns are, and where their products go: the first n of them.
struct lctx_tile_ends {
    const float * x[LCTX_TILE];
    float * out[LCTX_TILE];
    int n;
};

constexpr int LCTX_HALF_TILE = LCTX_TILE / 2;  // what is multiplied when there are no more columns

// Bytes of the columns of a tile, values [k0, k0 + N): symmetric, by the largest value. Columns from ends.n to n_column
// become zeros. A value that is not finite makes its scale NaN.
template <class W>
static void lctx_fill_columns(const lctx_column_bytes & to, const lctx_tile_ends & ends, int n_column, int64_t k0) {
    for (int c = 0; c < n_column; c++) {
        static constexpr float ZEROS[W::N] = {};
        const float * values = c < ends.n ? ends.x[c] + k0 : ZEROS;
        const lctx_scale scale = lctx_scale_of(values, W::N);
        for (int g = 0; g < W::N / W::GROUP; g++) {
            int8_t * bytes = to.bytes + ((k0 + g * W::GROUP) / 32 * LCTX_TILE + c) * 32 + g * W::GROUP % 32;
            const float sum = lctx_round(values + g * W::GROUP, W::GROUP, scale.inverse, bytes);
            const int64_t at = (k0 / W::GROUP + g) * LCTX_TILE + c;
            if (W::HAS_MIN) {
                to.sums[at] = W::N == W::GROUP ? scale.scale * sum : sum;
            } else {
                const int32_t start = -W::ZERO * (int32_t)sum;
                to.starts[at] = lctx_int_scales<W> && !LCTX_FULL_BYTES ? (start / 2 & 0xffff) * 0x10001 : start;
            }
        }
        to.scales[k0 / W::N * LCTX_TILE + c] = scale.scale;
    }
}

// The products of the bytes of group number `group` with NC columns, beginning with their starts.
template <class W, int NC>
static inline __attribute__((always_inline)) void lctx_dot_group(const lctx_panel & p, const lctx_column_bytes & x,
                                                                 int64_t group, lctx_vi * sums) {
    const int8_t * columns = x.bytes + group * W::GROUP / 32 * LCTX_TILE * 32 + group * W::GROUP % 32;
    const uint8_t * bytes = p.bytes + group * W::GROUP * LCTX_VL;
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        sums[c] = W::HAS_MIN ? lctx_vi{} : lctx_viset(x.starts[group * LCTX_TILE + c]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < W::GROUP / 4; i++) {
        lctx_vi weights;
        memcpy(&weights, bytes + i * sizeof(weights), sizeof(weights));
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            int32_t four;
            memcpy(&four, columns + c * 32 + 4 * i, sizeof(four));
            sums[c] = lctx_vdot(sums[c], weights, four);
        }
    }
}

// Add group number `group` to NC columns: scale * (bytes . column - ZERO * sum), or scale * (bytes . column) + min *
// sum.
template <class W, int NC>
static inline __attribute__((always_inline)) void lctx_multiply_group(const lctx_panel & p, const lctx_column_bytes & x,
                                                                      int64_t group, lctx_vf * to) {
    const int64_t first = group * LCTX_TILE;
    const lctx_vf scales = lctx_vload(p.scales + group * LCTX_VL);
    lctx_vf mins{};
    if (W::HAS_MIN) {
        mins = lctx_vload(p.mins + group * LCTX_VL);
    }
    lctx_vi sums[NC];
    lctx_dot_group<W, NC>(p, x, group, sums);
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        to[c] += __builtin_convertvector(sums[c], lctx_vf) * (scales * lctx_vset(x.scales[first + c]));
        if (W::HAS_MIN) {
            to[c] += mins * lctx_vset(x.sums[first + c]);
        }
    }
}

// Add group number `group` to NC columns with integer scales: int_scale * (bytes . column - ZERO * sum) to sums.
// Without LCTX_FULL_BYTES pairs are added while they fit in 16 bits.
template <class W, int NC>
static inline __attribute__((always_inline)) void lctx_add_group(const lctx_panel & p, const lctx_column_bytes & x,
                                                                 int64_t group, lctx_vi * sums) {
#if LCTX_HAS_DOT
    lctx_vi scales, dots[NC];
    memcpy(&scales, p.int_scales + group * LCTX_VL, sizeof(scales));
    lctx_dot_group<W, NC>(p, x, group, dots);
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        sums[c] += dots[c] * scales;
    }
#else
    constexpr int N_PAIRS = std::min(32767 / (2 * 127 * ((1 << W::BITS) - 1)), W::GROUP / 4);
    const int8_t * columns = x.bytes + group * W::GROUP / 32 * LCTX_TILE * 32 + group * W::GROUP % 32;
    const uint8_t * bytes = p.bytes + group * W::GROUP * LCTX_VL;
    const auto load = [](const void * from, auto & to) { memcpy(&to, from, sizeof(to)); };
    lctx_vs scales;
    load(p.int_scales + group * LCTX_VL, scales);
#pragma GCC unroll 8
    for (int i0 = 0; i0 < W::GROUP / 4; i0 += N_PAIRS) {
        lctx_vs pairs[NC];
#pragma GCC unroll 8
        for (int i = i0; i < i0 + N_PAIRS; i++) {
            lctx_vi weights;
            load(bytes + i * sizeof(weights), weights);
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) {
                int32_t four;
                load(columns + c * 32 + 4 * i, four);
                pairs[c] = i == i0 ? lctx_vpairs(weights, four) : pairs[c] + lctx_vpairs(weights, four);
                __asm__("" : "+v"(pairs[c]));  // as in lctx_vdot
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            sums[c] += lctx_vmadd(pairs[c], scales);
        }
    }
    if constexpr (!W::HAS_MIN) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            sums[c] += lctx_vmadd((lctx_vs)lctx_viset(x.starts[group * LCTX_TILE + c]), scales);
        }
    }
#endif
}

// Add block b to NC columns with integer scales: a product of floats, and one for its mins, whose sum is exact.
template <class W, int NC>
static inline __attribute__((always_inline)) void lctx_add_block(const lctx_panel & p, const lctx_column_bytes & x,
                                                                 int64_t b, lctx_vf * products, lctx_vf * offsets) {
    constexpr int N_GROUP = W::N / W::GROUP;
    lctx_vi sums[NC] = {};
    lctx_vf mins[NC] = {};
    for (int g = 0; g < N_GROUP; g++) {
        const int64_t group = b * N_GROUP + g;
        lctx_add_group<W, NC>(p, x, group, sums);
        if constexpr (W::HAS_MIN) {
#pragma GCC unroll 8
            for (int c = 0; c < NC; c++) {
                mins[c] += lctx_vload(p.mins + group * LCTX_VL) * lctx_vset(x.sums[group * LCTX_TILE + c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        const lctx_vf scale = lctx_vset(x.scales[b * LCTX_TILE + c]);
        products[c] += __builtin_convertvector(sums[c], lctx_vf) * (lctx_vload(p.scales + b * LCTX_VL) * scale);
        if constexpr (W::HAS_MIN) {
            offsets[c] += mins[c] * (lctx_vload(p.min_scales + b * LCTX_VL) * scale);
        }
    }
}

// The first NC columns of a tile with a panel of n_rows rows, from row number `row` on.
template <class W, int NC> static void lctx_multiply_tile(const lctx_panel & p, const lctx_column_bytes & x,
                                                          int64_t k_dim, int n_rows, const lctx_tile_ends & ends,
                                                          int64_t row) {
    lctx_vf sums[NC] = {}, offsets[NC] = {};
    for (int first = 0; first < lctx_stride<W>; first++) {
        lctx_vf some[NC] = {};
        for (int64_t b = first; b < k_dim / W::N; b += lctx_stride<W>) {
            if constexpr (lctx_int_scales<W>) {
                lctx_add_block<W, NC>(p, x, b, some, offsets);
            } else {
                lctx_multiply_group<W, NC>(p, x, b, some);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            sums[c] += some[c];
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        if (c < ends.n) {
            const lctx_vf column = lctx_int_scales<W> && W::HAS_MIN ? sums[c] + offsets[c] : sums[c];
            memcpy(ends.out[c] + row, &column, n_rows * sizeof(float));
        }
    }
}

#endif
