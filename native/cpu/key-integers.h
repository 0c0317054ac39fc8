// Scores of prompts by integers, where the CPU multiplies them faster than floats: keys that are stored in 8 bits or
// fewer as they are, queries rounded for every 32 channels. Sums are exact within 32 channels, and floats beyond. 32
// channels of a column and a key take 32 products in f32, 16 in bf16 (pairs.h), and here 3 instructions for the scales
// and
//   with VNNI, sdot  8 products of four bytes; queries have 8 bits, as in llama.cpp
//   with i8mm        4 products of two keys and two columns, and scales for both at once
//   with AVX2 alone  16 products of two words and 16 sums, which other ports execute in parallel; queries have 16 bits
#pragma once

#include "columns.h"
#include "dot.h"
#include "half.h"
#include "round.h"

#include <type_traits>

#if LCTX_DOT_SIGNED
#define LCTX_HAS_KEY_INTEGERS 1
typedef int8_t lctx_key_integer;
#elif LCTX_HAS_DOT
#define LCTX_HAS_KEY_INTEGERS 1
typedef uint8_t lctx_key_integer;
static inline lctx_vi lctx_vdot_key(lctx_vi sum, uint32_t key, lctx_vi query) {
    return lctx_vdot_bytes(sum, (int32_t)key - lctx_vi{}, query);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define LCTX_HAS_KEY_INTEGERS 1
typedef int16_t lctx_key_integer;
static inline lctx_vi lctx_vdot_key(lctx_vi sum, uint32_t key, lctx_vi query) {
    return sum + (lctx_vi)_mm256_madd_epi16(_mm256_set1_epi32((int)key), (__m256i)query);
}
#else
#define LCTX_HAS_KEY_INTEGERS 0
#endif

constexpr int LCTX_KEY_GROUP = 32;  // channels with one scale

static inline bool lctx_are_integers(const lctx_attend_args & a) {
    const ggml_type type = a.cache.k_pool.type;
    return !a.params.fixed && (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0);
}

// For the columns of a prompt.
static inline bool lctx_in_integers(const lctx_attend_args & a, const lctx_columns & columns) {
    return LCTX_HAS_KEY_INTEGERS && lctx_are_integers(a) && columns.by_vectors() && !columns.few();
}

#if LCTX_HAS_KEY_INTEGERS
constexpr int LCTX_KEY_STEP = 4 / sizeof(lctx_key_integer);  // channels that are multiplied at once
constexpr int LCTX_KEY_BITS = 32 / LCTX_KEY_STEP;
constexpr int LCTX_KEY_ZERO = std::is_signed_v<lctx_key_integer> ? 0 : 128;  // what is added to a key
constexpr int LCTX_QUERY_MOST = (1 << (LCTX_KEY_BITS - 1)) - 1;
constexpr int LCTX_KEY_SCALES = LCTX_HAS_I8MM ? 2 : 1;  // the scale of a key, as often as a vector has it

// Queries as signed integers, in place of the floats of their columns; value = scale * integer.
struct lctx_query_integers {
    int32_t * steps;   // [dim / STEP][n_pad] the channels of a step of a column; see lctx_pair_columns
    float * scales;    // [dim / GROUP][n_pad]
    int32_t * starts;  // [dim / GROUP][n_pad] -ZERO * the sum of the integers, or scales for i8mm
    int n_pad, n_group;

    explicit lctx_query_integers(const lctx_columns & c)
        : steps((int32_t *)c.q),
          scales(c.q + (size_t)c.n_pad * c.dim),  // where rows have waited to be transposed
          starts((int32_t *)scales + c.dim / LCTX_KEY_GROUP * c.n_pad),
          n_pad(c.n_pad),
          n_group(c.dim / LCTX_KEY_GROUP) {}
};

#if LCTX_HAS_I8MM
// Rows 2 i and 2 i + 1 of four columns, as matrices of two columns and eight channels: columns 0 and 1 in row 2 i, 2
// and 3 in the other. Scales lie as the products do, those of columns 2 and 3 in place of starts.
static inline void lctx_pair_columns(const lctx_query_integers & to, int group, int first) {
    constexpr int N_STEP = LCTX_KEY_GROUP / LCTX_KEY_STEP;
    int32_t * steps = to.steps + (size_t)group * N_STEP * to.n_pad + first;
    for (int i = 0; i < N_STEP; i += 2) {
        lctx_vi even, odd;
        memcpy(&even, steps + (size_t)i * to.n_pad, sizeof(even));
        memcpy(&odd, steps + (size_t)(i + 1) * to.n_pad, sizeof(odd));
        const lctx_vi low = lctx_vpick(even, odd, lctx_lower_in_turn{}),
                      high = lctx_vpick(even, odd, lctx_upper_in_turn{});
        memcpy(steps + (size_t)i * to.n_pad, &low, sizeof(low));
        memcpy(steps + (size_t)(i + 1) * to.n_pad, &high, sizeof(high));
    }
    float *low = to.scales + group * to.n_pad + first, *high = (float *)to.starts + group * to.n_pad + first;
    const lctx_vf scale = lctx_vload(low);
    lctx_vstore(low, lctx_vpick(scale, scale, lctx_lower_halves{}));
    lctx_vstore(high, lctx_vpick(scale, scale, lctx_upper_halves{}));
}
#endif

// LCTX_VL columns of one group. The rows of a step become one of integers, which takes the place of rows that were
// read.
static inline void lctx_round_group(const lctx_query_integers & to, const float * q, int group, int first) {
    lctx_vf top{}, zero{};
    const float * rows = q + (size_t)group * LCTX_KEY_GROUP * to.n_pad + first;
    for (int i = 0; i < LCTX_KEY_GROUP; i++) {
        const lctx_vf v = lctx_vload(rows + (size_t)i * to.n_pad);
        top = lctx_vmax(top, lctx_vmax(v, -v));
        zero += v * 0.0f;  // NaN where a number is not finite
    }
    const lctx_vf inverse = top > lctx_vf{} ? lctx_vset((float)LCTX_QUERY_MOST) / top : lctx_vf{};
    lctx_vi total{};
    for (int i = 0; i < LCTX_KEY_GROUP; i += LCTX_KEY_STEP) {
        lctx_vi step{};
        for (int j = 0; j < LCTX_KEY_STEP; j++) {
            const lctx_vf shifted =
                lctx_vload(rows + (size_t)(i + j) * to.n_pad) * inverse + 12582912.0f;  // as in round.h
            const lctx_vi rounded = (lctx_vi)shifted - 0x4b400000;
            total += rounded;
            step |= (rounded & ((1 << LCTX_KEY_BITS) - 1)) << (LCTX_KEY_BITS * j);
        }
        memcpy(to.steps + (size_t)(group * LCTX_KEY_GROUP + i) / LCTX_KEY_STEP * to.n_pad + first, &step, sizeof(step));
    }
    lctx_vstore(to.scales + group * to.n_pad + first, top / (float)LCTX_QUERY_MOST + zero);
#if LCTX_HAS_I8MM
    lctx_pair_columns(to, group, first);
#else
    total *= -LCTX_KEY_ZERO;
    memcpy(to.starts + group * to.n_pad + first, &total, sizeof(total));
#endif
}

static inline void lctx_round_queries(const lctx_columns & columns) {
    const lctx_query_integers to(columns);
    for (int first = 0; first < to.n_pad; first += LCTX_VL) {
        for (int group = 0; group < to.n_group; group++) {
            lctx_round_group(to, columns.q, group, first);
        }
    }
}

// 32 channels of a key, as bytes; returns their scale.
static inline float lctx_key_bytes(const block_q8_0 & b, int8_t * to) {
    memcpy(to, b.qs, LCTX_KEY_GROUP);
    return lctx_from_half(b.d);
}
static inline float lctx_key_bytes(const block_q4_0 & b, int8_t * to) {
    for (int i = 0; i < LCTX_KEY_GROUP / 2; i++) {
        to[i] = (int8_t)((b.qs[i] & 15) - 8);
        to[LCTX_KEY_GROUP / 2 + i] = (int8_t)((b.qs[i] >> 4) - 8);
    }
    return lctx_from_half(b.d);
}
struct lctx_float_group {
    float values[LCTX_KEY_GROUP];
};
static inline float lctx_key_bytes(const lctx_float_group & b, int8_t * to) {
    const lctx_scale scale = lctx_scale_of(b.values, LCTX_KEY_GROUP);
    lctx_round(b.values, LCTX_KEY_GROUP, scale.inverse, to);
    return scale.scale;
}

#if LCTX_HAS_I8MM
// Pairs of keys: integers [n / 2][dim / 8][2][8], scales [n / 2][dim / GROUP][4] as the products lie. The last of an
// odd number is its own neighbor.
template <typename B> static inline void lctx_fill_keys(const lctx_stored & rows, int n, int n_group,
                                                        lctx_key_integer * integers, float * scales) {
    constexpr int STEP = 8;
    for (int i = 0; i < n; i += 2) {
        const B * even = (const B *)(rows.data + i * rows.row_size);
        const B * odd = (const B *)(rows.data + std::min(i + 1, n - 1) * rows.row_size);
        for (int g = 0; g < n_group; g++, integers += 2 * LCTX_KEY_GROUP, scales += LCTX_VL) {
            int8_t bytes[2][LCTX_KEY_GROUP];
            const float scale = lctx_key_bytes(even[g], bytes[0]), next = lctx_key_bytes(odd[g], bytes[1]);
            lctx_vstore(scales, lctx_vf{scale, scale, next, next});
            for (int x = 0; x < 2 * LCTX_KEY_GROUP; x += STEP) {
                memcpy(integers + x, bytes[x / STEP % 2] + x / STEP / 2 * STEP, STEP);
            }
        }
    }
}

// Scores of RM / 2 pairs of keys and RN vectors of columns. An odd number n of keys has no row for the neighbor of the
// last.
template <int RM, int RN> static LCTX_KERNEL void lctx_key_tile(const lctx_key_integer * k, const float * k_scales,
                                                                const lctx_query_integers & q, int first, float * s,
                                                                int n) {
    const int64_t k_row = q.n_group * LCTX_KEY_GROUP * 2, q_row = q.n_pad;
    const int32_t * steps = q.steps + first;
    const float * scales[2] = {q.scales + first,
                               (const float *)q.starts + first};  // of each half of a vector of columns
    lctx_vf sums[RM / 2][RN][2] = {};
    for (int g = 0; g < q.n_group; g++) {
        lctx_vi part[RM / 2][RN][2] = {};
#pragma GCC unroll 4
        for (int x = 0; x < LCTX_KEY_GROUP * 2; x += sizeof(lctx_vi), steps += 2 * q_row) {
            lctx_vi key[RM / 2];
            for (int i = 0; i < RM / 2; i++) {
                memcpy(&key[i], k + i * k_row + g * LCTX_KEY_GROUP * 2 + x, sizeof(lctx_vi));
            }
            for (int j = 0; j < 2 * RN; j++) {
                lctx_vi columns;
                memcpy(&columns, steps + j % 2 * q_row + j / 2 * LCTX_VL, sizeof(columns));
                for (int i = 0; i < RM / 2; i++) {
                    part[i][j / 2][j % 2] = lctx_vmatmul(part[i][j / 2][j % 2], key[i], columns);
                }
            }
        }
        for (int j = 0; j < 2 * RN; j++) {
            const lctx_vf scale = lctx_vload(scales[j % 2] + g * q.n_pad + j / 2 * LCTX_VL);
            for (int i = 0; i < RM / 2; i++) {
                sums[i][j / 2][j % 2] += __builtin_convertvector(part[i][j / 2][j % 2], lctx_vf) *
                                         (scale * lctx_vload(k_scales + (i * q.n_group + g) * LCTX_VL));
            }
        }
    }
    for (int i = 0; i < RM; i += 2) {
        for (int j = 0; j < RN; j++) {
            const lctx_vf * both = sums[i / 2][j];
            float * to = s + i * q.n_pad + first + j * LCTX_VL;
            lctx_vstore(to, lctx_vpick(both[0], both[1], lctx_lower_halves{}));
            if (i + 1 < n) {
                lctx_vstore(to + q.n_pad, lctx_vpick(both[0], both[1], lctx_upper_halves{}));
            }
        }
    }
}
#else
// integers: [n][dim], scales: [n][dim / GROUP]
template <typename B> static inline void lctx_fill_keys(const lctx_stored & rows, int n, int n_group,
                                                        lctx_key_integer * integers, float * scales) {
    for (int i = 0; i < n; i++) {
        const B * groups = (const B *)(rows.data + i * rows.row_size);
        for (int g = 0; g < n_group; g++, integers += LCTX_KEY_GROUP) {
            typedef int8_t bytes_of_group __attribute__((vector_size(LCTX_KEY_GROUP)));
            typedef lctx_key_integer group __attribute__((vector_size(LCTX_KEY_GROUP * sizeof(lctx_key_integer))));
            bytes_of_group bytes;
            *scales++ = lctx_key_bytes(groups[g], (int8_t *)&bytes);
            const group key = __builtin_convertvector(bytes, group) + (lctx_key_integer)LCTX_KEY_ZERO;
            memcpy(integers, &key, sizeof(key));
        }
    }
}

// Scores of RM keys and RN vectors of columns.
template <int RM, int RN> static LCTX_KERNEL void lctx_key_tile(const lctx_key_integer * k, const float * k_scales,
                                                                const lctx_query_integers & q, int first, float * s,
                                                                int) {
    const int64_t k_row = q.n_group * LCTX_KEY_GROUP, q_row = q.n_pad;
    const int32_t * steps = q.steps + first;
    lctx_vf sums[RM][RN] = {};
    for (int g = 0; g < q.n_group; g++) {
        lctx_vi part[RM][RN];
        for (int j = 0; j < RN; j++) {
            memcpy(&part[0][j], q.starts + g * q.n_pad + first + j * LCTX_VL, sizeof(lctx_vi));
            for (int i = 1; i < RM; i++) {
                part[i][j] = part[0][j];
            }
        }
#if LCTX_DOT_SIGNED
        for (int x = 0; x < LCTX_KEY_GROUP; x += LCTX_VL * LCTX_KEY_STEP) {
            lctx_vi key[RM];
            for (int i = 0; i < RM; i++) {
                memcpy(&key[i], k + i * k_row + g * LCTX_KEY_GROUP + x, sizeof(lctx_vi));
            }
            lctx_each_lane(
                [&](auto lane) {
                    for (int j = 0; j < RN; j++) {
                        lctx_vi step;
                        memcpy(&step, steps + j * LCTX_VL, sizeof(step));
                        for (int i = 0; i < RM; i++) {
                            part[i][j] = lctx_vdot_lane<lane>(part[i][j], key[i], step);
                        }
                    }
                    steps += q_row;
                },
                lctx_lanes{});
        }
#else
#pragma GCC unroll 4
        for (int x = 0; x < LCTX_KEY_GROUP; x += LCTX_KEY_STEP, steps += q_row) {
            lctx_vi step[RN];
            for (int j = 0; j < RN; j++) {
                memcpy(&step[j], steps + j * LCTX_VL, sizeof(lctx_vi));
            }
            for (int i = 0; i < RM; i++) {
                uint32_t key;
                memcpy(&key, k + i * k_row + g * LCTX_KEY_GROUP + x, sizeof(key));
                for (int j = 0; j < RN; j++) {
                    part[i][j] = lctx_vdot_key(part[i][j], key, step[j]);
                }
            }
        }
#endif
        for (int j = 0; j < RN; j++) {
            const lctx_vf scale = lctx_vload(q.scales + g * q.n_pad + first + j * LCTX_VL);
            for (int i = 0; i < RM; i++) {
                sums[i][j] +=
                    __builtin_convertvector(part[i][j], lctx_vf) * scale * lctx_vset(k_scales[i * q.n_group + g]);
            }
        }
    }
    for (int i = 0; i < RM; i++) {
        for (int j = 0; j < RN; j++) {
            lctx_vstore(s + i * q.n_pad + first + j * LCTX_VL, sums[i][j]);
        }
    }
}
#endif

// `beside(key, n)` is called after the products of keys [key, key + n).
template <int RN, typename F> static inline void lctx_key_columns(int n, const lctx_key_integer * k,
                                                                  const float * k_scales, const lctx_query_integers & q,
                                                                  int first, float * s, F && beside) {
    constexpr int RM =
        LCTX_VL == 16 ? 6
                      : 4;  // 24 of 32 registers; of 16, sums wait in memory while the integers of a group are added
    constexpr int REST = LCTX_HAS_I8MM ? 2 : 1;
    const auto tile = [&](auto rows, int i) {
        const int group = i * q.n_group, n_row = std::min<int>(rows, n - i);
        lctx_key_tile<rows, RN>(k + group * LCTX_KEY_GROUP, k_scales + group * LCTX_KEY_SCALES, q, first,
                                s + i * q.n_pad, n_row);
        beside(i, n_row);
    };
    int i = 0;
    for (; i + RM <= n; i += RM) {
        tile(std::integral_constant<int, RM>{}, i);
    }
    for (; i < n; i += REST) {
        tile(std::integral_constant<int, REST>{}, i);
    }
}

// s[key][column] of n keys; queries were rounded. `beside(key, n)` is called once for every key, n keys at a time.
//   integers  [n][dim], of an even n, over the floats of keys that were gathered
//   scales    [n][dim / GROUP][KEY_SCALES], of an even n
template <typename F> static LCTX_ALONE void lctx_integer_scores(const lctx_columns & columns, const lctx_stored & rows,
                                                                 int n, lctx_key_integer * integers, float * scales,
                                                                 float * s, F && beside) {
    const lctx_query_integers q(columns);
    switch (rows.type) {
        case GGML_TYPE_Q8_0: lctx_fill_keys<block_q8_0>(rows, n, q.n_group, integers, scales); break;
        case GGML_TYPE_Q4_0: lctx_fill_keys<block_q4_0>(rows, n, q.n_group, integers, scales); break;
        default:             lctx_fill_keys<lctx_float_group>(rows, n, q.n_group, integers, scales); break;
    }
    int first = 0;
    const auto once = [&](int key, int n_key) { first == 0 ? beside(key, n_key) : void(); };
    for (; first + 2 * LCTX_VL <= q.n_pad; first += 2 * LCTX_VL) {
        lctx_key_columns<2>(n, integers, scales, q, first, s, once);
    }
    for (; first < q.n_pad; first += LCTX_VL) {
        lctx_key_columns<1>(n, integers, scales, q, first, s, once);
    }
}
#endif
