// Panels: LCTX_VL rows of a quantized weight as unsigned bytes, for products of integers. One struct per type says how
// a block of it becomes bytes.
#pragma once

#include "../cpu/dot.h"
#include "../cpu/half.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#if defined(__SSSE3__)
#include <immintrin.h>
#endif

// N values to a block. GROUP of them share a scale: value = scale * (byte - ZERO), or scale * byte + min where the type
// HAS_MIN. Bytes have BITS bits. With several groups to a block a scale is d() times the integer that unpack() gives, a
// min d_min() times one.
template <ggml_type TYPE> struct lctx_weight;

template <int N_, int GROUP_, int BITS_, int ZERO_, bool HAS_MIN_> struct lctx_weight_shape {
    static constexpr int N = N_, GROUP = GROUP_, BITS = BITS_, ZERO = ZERO_;
    static constexpr bool HAS_MIN = HAS_MIN_;
};

template <int N> struct lctx_bytes_of {
    typedef uint8_t type __attribute__((vector_size(N)));
};
template <int N> using lctx_bytes = typename lctx_bytes_of<N>::type;

// Nibbles of N bytes: the low ones, then the high ones.
template <int N> static inline void lctx_nibbles(const uint8_t * packed, uint8_t * bytes) {
    lctx_bytes<N> both;
    memcpy(&both, packed, N);
    const lctx_bytes<N> low = both & 15, high = both >> 4;
    memcpy(bytes, &low, N);
    memcpy(bytes + N, &high, N);
}

// 16 numbers below 16 become the bytes of a table that they name.
static inline void lctx_look_up(const uint8_t * table, uint8_t * bytes) {
#if defined(__SSSE3__)
    _mm_storeu_si128((__m128i *)bytes,
                     _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)table), _mm_loadu_si128((__m128i *)bytes)));
#else
    for (int i = 0; i < 16; i++) {
        bytes[i] = table[bytes[i]];
    }
#endif
}

// Bit i of a byte, as bit 4 of byte i.
struct lctx_spread_bits {
    uint64_t of[256];
    constexpr lctx_spread_bits() : of() {
        for (int byte = 0; byte < 256; byte++) {
            for (int i = 0; i < 8; i++) {
                of[byte] |= (uint64_t)(byte >> i & 1) << (8 * i + 4);
            }
        }
    }
};

// The fifth bit of byte i of 32 is bit i of a word.
static inline void lctx_fifth_bits(const uint8_t * packed, uint8_t * bytes) {
    static constexpr lctx_spread_bits SPREAD;
    for (int i = 0; i < 4; i++) {
        uint64_t eight;
        memcpy(&eight, bytes + 8 * i, sizeof(eight));
        eight |= SPREAD.of[packed[i]];
        memcpy(bytes + 8 * i, &eight, sizeof(eight));
    }
}

// To 32 bytes, above their nibbles: the bits of `mask` from bit number `first` of each packed byte.
static inline void lctx_add_upper_bits(const uint8_t * packed, int first, uint8_t mask, uint8_t * bytes) {
    lctx_bytes<32> all, to;
    memcpy(&all, packed, sizeof(all));
    memcpy(&to, bytes, sizeof(to));
    to |= (all >> (uint8_t)first & mask) << 4;
    memcpy(bytes, &to, sizeof(to));
}

template <> struct lctx_weight<GGML_TYPE_Q4_0> : lctx_weight_shape<32, 32, 4, 8, false> {
    typedef block_q4_0 block;
    static void unpack(const block & b, uint8_t * bytes, float * scales, float *) {
        lctx_nibbles<16>(b.qs, bytes);
        scales[0] = lctx_from_half(b.d);
    }
};

template <> struct lctx_weight<GGML_TYPE_Q4_1> : lctx_weight_shape<32, 32, 4, 0, true> {
    typedef block_q4_1 block;
    static void unpack(const block & b, uint8_t * bytes, float * scales, float * mins) {
        lctx_nibbles<16>(b.qs, bytes);
        scales[0] = lctx_from_half(b.d);
        mins[0] = lctx_from_half(b.m);
    }
};

template <> struct lctx_weight<GGML_TYPE_Q5_0> : lctx_weight_shape<32, 32, 5, 16, false> {
    typedef block_q5_0 block;
    static void unpack(const block & b, uint8_t * bytes, float * scales, float *) {
        lctx_nibbles<16>(b.qs, bytes);
        lctx_fifth_bits(b.qh, bytes);
        scales[0] = lctx_from_half(b.d);
    }
};

template <> struct lctx_weight<GGML_TYPE_Q5_1> : lctx_weight_shape<32, 32, 5, 0, true> {
    typedef block_q5_1 block;
    static void unpack(const block & b, uint8_t * bytes, float * scales, float * mins) {
        lctx_nibbles<16>(b.qs, bytes);
        lctx_fifth_bits(b.qh, bytes);
        scales[0] = lctx_from_half(b.d);
        mins[0] = lctx_from_half(b.m);
    }
};

// Four bits that name a number, with a scale that is a power of two.
template <> struct lctx_weight<GGML_TYPE_MXFP4> : lctx_weight_shape<32, 32, 5, 12, false> {
    typedef block_mxfp4 block;
    // Twice the numbers, plus ZERO.
    static constexpr uint8_t BYTES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static void unpack(const block & b, uint8_t * bytes, float * scales, float *) {
        lctx_nibbles<16>(b.qs, bytes);
        for (int half = 0; half < 2; half++) {
            lctx_look_up(BYTES, bytes + 16 * half);
        }
        scales[0] = GGML_E8M0_TO_FP32_HALF(b.e);
    }
};

template <> struct lctx_weight<GGML_TYPE_Q8_0> : lctx_weight_shape<32, 32, 8, 128, false> {
    typedef block_q8_0 block;
    static void unpack(const block & b, uint8_t * bytes, float * scales, float *) {
        lctx_bytes<32> all;
        memcpy(&all, b.qs, sizeof(all));
        all ^= 128;
        memcpy(bytes, &all, sizeof(all));
        scales[0] = lctx_from_half(b.d);
    }
};

// Scales and minima of four of the eight groups of Q4_K and Q5_K, a byte each, of six bits. Those of the last four
// groups (half 1) have their upper two bits in the bytes of the first four.
struct lctx_four_scales {
    uint32_t scales, mins;
};

static inline lctx_four_scales lctx_unpack_scales(const uint8_t * packed, int half) {
    uint32_t w[3];
    memcpy(w, packed, sizeof(w));
    if (half == 0) {
        return {w[0] & 0x3f3f3f3f, w[1] & 0x3f3f3f3f};
    }
    return {(w[2] & 0x0f0f0f0f) | (w[0] >> 2 & 0x30303030), (w[2] >> 4 & 0x0f0f0f0f) | (w[1] >> 2 & 0x30303030)};
}

static inline void lctx_scales_and_mins(const uint8_t * packed, float * scales, float * mins) {
    const lctx_four_scales first = lctx_unpack_scales(packed, 0), second = lctx_unpack_scales(packed, 1);
    const uint32_t all[4] = {first.scales, second.scales, first.mins, second.mins};
    for (int g = 0; g < 8; g++) {
        scales[g] = (float)((const uint8_t *)all)[g];
        mins[g] = (float)((const uint8_t *)all)[8 + g];
    }
}

// The values of Q4_K and Q5_K without their fifth bits.
static inline void lctx_four_nibbles(const uint8_t * halves, uint8_t * bytes) {
    for (int i = 0; i < 4; i++) {
        lctx_nibbles<32>(halves + 32 * i, bytes + 64 * i);
    }
}

template <> struct lctx_weight<GGML_TYPE_Q4_K> : lctx_weight_shape<256, 32, 4, 0, true> {
    typedef block_q4_K block;
    static float d(const block & b) { return lctx_from_half(b.d); }
    static float d_min(const block & b) { return -lctx_from_half(b.dmin); }
    static void unpack(const block & b, uint8_t * bytes, float * scales, float * mins) {
        lctx_scales_and_mins(b.scales, scales, mins);
        lctx_four_nibbles(b.qs, bytes);
    }
};

template <> struct lctx_weight<GGML_TYPE_Q5_K> : lctx_weight_shape<256, 32, 5, 0, true> {
    typedef block_q5_K block;
    static float d(const block & b) { return lctx_from_half(b.d); }
    static float d_min(const block & b) { return -lctx_from_half(b.dmin); }
    static void unpack(const block & b, uint8_t * bytes, float * scales, float * mins) {
        lctx_scales_and_mins(b.scales, scales, mins);
        lctx_four_nibbles(b.qs, bytes);
        for (int g = 0; g < 8; g++) {
            lctx_add_upper_bits(b.qh, g, 1, bytes + 32 * g);
        }
    }
};

template <> struct lctx_weight<GGML_TYPE_Q6_K> : lctx_weight_shape<256, 16, 6, 32, false> {
    typedef block_q6_K block;
    static float d(const block & b) { return lctx_from_half(b.d); }
    static void unpack(const block & b, uint8_t * bytes, float * scales, float *) {
        for (int g = 0; g < 16; g++) {
            scales[g] = b.scales[g];
        }
        for (int half = 0; half < 2; half++) {
            const uint8_t *low = b.ql + 64 * half, *high = b.qh + 32 * half;
            lctx_nibbles<64>(low, bytes + 128 * half);
            for (int quarter = 0; quarter < 4; quarter++) {
                lctx_add_upper_bits(high, 2 * quarter, 3, bytes + 128 * half + 32 * quarter);
            }
        }
    }
};

// Says whether the CPU sums four products of bytes of eight bits in one step.
constexpr bool LCTX_FULL_BYTES = LCTX_HAS_DOT;

// Says whether sums of groups are multiplied with integer scales, and the sum of a block is an integer: so there is one
// product of floats for it, the same however its integers were added.
template <class W> constexpr bool lctx_int_scales = W::N > W::GROUP;

// Blocks of 32 values whose products with a few columns have a quad of lanes each (quads.h). So a panel adds up every
// n-th block, and then these sums: the order is the same.
constexpr int LCTX_QUADS = LCTX_VL / 4;  // groups of 32 values that are multiplied at once, in a quad of lanes each
template <class W> constexpr int lctx_stride =
    LCTX_FULL_BYTES && W::N == 32 && (W::BITS == 4 || W::ZERO == 12) ? LCTX_QUADS : 1;

// Rows of a weight that are multiplied together, for k_dim values each.
//   bytes       [k_dim / 4][LCTX_VL][4]
//   scales      [k_dim / GROUP][LCTX_VL]; [k_dim / N][LCTX_VL] with int_scales
//   mins        [k_dim / GROUP][LCTX_VL], where the type HAS_MIN; integers with int_scales
//   int_scales  [k_dim / GROUP][LCTX_VL]: the integer scales of groups, where lctx_int_scales. Without LCTX_FULL_BYTES
//   twice, as 16 bits:
//               sums of pairs are multiplied with them, which is a step less
//   min_scales  [k_dim / N][LCTX_VL]: of those mins
struct lctx_panel {
    uint8_t * bytes;
    float * scales;
    float * mins;
    int32_t * int_scales;
    float * min_scales;
};

constexpr int LCTX_STEP = 256;  // values of a row that become bytes at a time

// f(i, column i) for the first n_wanted columns of a matrix; N is a multiple of LCTX_VL.
template <int N, typename F>
static inline void lctx_each_transposed(const float (&from)[LCTX_VL][N], int64_t n_wanted, F && f) {
    for (int i0 = 0; i0 < N && i0 < n_wanted; i0 += LCTX_VL) {
        lctx_vf columns[LCTX_VL];
        for (int r = 0; r < LCTX_VL; r++) {
            columns[r] = lctx_vload(from[r] + i0);
        }
        lctx_vtranspose(columns);
        for (int i = 0; i < LCTX_VL && i0 + i < n_wanted; i++) {
            f(i0 + i, columns[i]);
        }
    }
}

// LCTX_STEP values of rows on their way into a panel.
template <class W> struct lctx_step {
    static constexpr int N_GROUP = LCTX_STEP / W::GROUP, N_PADDED = (N_GROUP + LCTX_VL - 1) / LCTX_VL * LCTX_VL;
    alignas(64) float bytes[LCTX_VL][LCTX_STEP / 4];  // four to a lane
    alignas(64) float scales[LCTX_VL][N_PADDED], mins[LCTX_VL][N_PADDED], d[LCTX_VL], d_min[LCTX_VL];

    // The n values of row number r that begin with a block.
    void unpack(int r, const typename W::block * blocks, int64_t n) {
        for (int64_t k = 0; k < n; k += W::N, blocks++) {
            const int64_t g = k / W::GROUP;
            W::unpack(*blocks, (uint8_t *)bytes[r] + k, scales[r] + g, mins[r] + g);
            if constexpr (lctx_int_scales<W>) {
                d[r] = W::d(*blocks);
            }
            if constexpr (lctx_int_scales<W> && W::HAS_MIN) {
                d_min[r] = W::d_min(*blocks);
            }
        }
    }
    // n values of all rows, from value k0 on.
    void put(const lctx_panel & panel, int64_t k0, int64_t n) const {
        const int64_t n_group = n / W::GROUP, first = k0 / W::GROUP * LCTX_VL;
        lctx_each_transposed(bytes, n / 4, [&](int64_t i, lctx_vf four) {
            lctx_vstore((float *)(panel.bytes + (k0 + 4 * i) * LCTX_VL), four);
        });
        lctx_each_transposed(scales, n_group, [&](int64_t i, lctx_vf of_group) {
            if constexpr (lctx_int_scales<W>) {
                const lctx_vi scale = __builtin_convertvector(of_group, lctx_vi),
                              as = LCTX_FULL_BYTES ? scale : (scale & 0xffff) * 0x10001;
                memcpy(panel.int_scales + first + i * LCTX_VL, &as, sizeof(as));
            } else {
                lctx_vstore(panel.scales + first + i * LCTX_VL, of_group);
            }
        });
        if constexpr (W::HAS_MIN) {
            lctx_each_transposed(mins, n_group,
                                 [&](int64_t i, lctx_vf min) { lctx_vstore(panel.mins + first + i * LCTX_VL, min); });
        }
        if constexpr (lctx_int_scales<W>) {
            lctx_vstore(panel.scales + k0 / W::N * LCTX_VL, lctx_vload(d));
        }
        if constexpr (lctx_int_scales<W> && W::HAS_MIN) {
            lctx_vstore(panel.min_scales + k0 / W::N * LCTX_VL, lctx_vload(d_min));
        }
    }
};

// Fill a panel with n_rows <= LCTX_VL rows; lanes after them repeat the last one.
template <class W>
static void lctx_fill_panel(const lctx_panel & panel, const char * rows, size_t row_size, int n_rows, int64_t k_dim) {
    constexpr size_t STEP_BYTES = LCTX_STEP / W::N * sizeof(typename W::block);
    lctx_step<W> step = {};
    for (int64_t k0 = 0; k0 < k_dim; k0 += LCTX_STEP) {
        const int64_t n = std::min<int64_t>(LCTX_STEP, k_dim - k0);
        for (int r = 0; r < LCTX_VL; r++) {
            const char * at = rows + std::min(r, n_rows - 1) * row_size + k0 / W::N * sizeof(typename W::block);
            for (size_t byte = 0; byte < STEP_BYTES; byte += 64) {  // the next panel's, into the second-level cache
                __builtin_prefetch(at + LCTX_VL * row_size + byte, 0, 2);
            }
            step.unpack(r, (const typename W::block *)at, n);
        }
        step.put(panel, k0, n);
    }
}
