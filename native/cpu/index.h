// The index of keys (../ops/index.h): rows of it, and the products of *select*.
//
// A query becomes signed bytes with one scale. A product is exact in integers: codes become unsigned bytes, level +
// most(), and what that adds is most() times the sum of the query's bytes.
#pragma once

#include "../ops/cache.h"
#include "../ops/index.h"
#include "columns.h"
#include "dot.h"
#include "half.h"
#include "round.h"

// ---- rows ----

// Levels of n channels by one threshold; returns the scale of least error for them. key, level: n_pad floats, zeros
// after the channels.
static inline float lctx_index_pass(const float * key, int32_t n, int32_t n_pad, float border, float small, float large,
                                    float * level) {
    lctx_vf product{}, square{};
    for (int32_t d = 0; d < n_pad; d += LCTX_VL) {
        const lctx_vf x = lctx_vload(key + d), size = lctx_vmax(x, -x) > border ? lctx_vset(large) : lctx_vset(small);
        const lctx_vf l = x < 0.0f ? -size : size;
        lctx_vstore(level + d, l);
        product += x * l, square += l * l;
    }
    return lctx_vsum(product) / (lctx_vsum(square) - (float)(n_pad - n) * small * small);
}

// Levels of a key, as floats: with one bit its signs, with two thresholds where a normal distribution has them, then
// where the scale of least error puts them. Returns that scale. key, level: n_pad floats, zeros from head_dim on.
static inline float lctx_index_levels(const lctx_index_shape & shape, const float * key, int32_t n_pad, float * level) {
    constexpr float BORDER = 0.9816f, MIDDLE = 6.5f;  // of the deviation (Max 1960); between the levels
    if (shape.bits == 1) {
        return lctx_index_pass(key, shape.head_dim, n_pad, 0.0f, 1.0f, 1.0f, level);
    }
    const float border = BORDER * sqrtf(lctx_dot(key, key, n_pad) / (float)shape.head_dim);
    const float scale = lctx_index_pass(key, shape.head_dim, n_pad, border, 3.0f, 10.0f, level);
    return lctx_index_pass(key, shape.head_dim, n_pad, MIDDLE * scale, 3.0f, 10.0f, level);
}

// Write a transformed key as row `lane` of a group. key: n_pad floats, zeros from head_dim on; level: n_pad floats,
// code: n_pad bytes, and n_channel at least.
static inline void lctx_index_put(const lctx_index_shape & shape, const float * key, int32_t n_pad, int32_t lane,
                                  char * group, float * level, uint8_t * code) {
    const ggml_fp16_t scale = lctx_to_half(lctx_index_levels(shape, key, n_pad, level), 0);
    memcpy(group + shape.scale_at(lane), &scale, sizeof(scale));
    const float least = shape.bits == 1 ? 0.0f : -10.0f;
    for (int32_t d = 0; d < n_pad; d += LCTX_VL) {
        const lctx_vf l = lctx_vload(level + d);
        const lctx_vi c =
            shape.bits == 1 ? -(lctx_vi)(l > least) : -(lctx_vi)(l > least) - (lctx_vi)(l > 0.0f) - (lctx_vi)(l > 3.0f);
        const lctx_vb bytes = __builtin_convertvector(c, lctx_vb);
        memcpy(code + d, &bytes, sizeof(bytes));
    }
    std::fill(code + shape.head_dim, code + std::max(n_pad, shape.n_channel()), (uint8_t)0);
    const int32_t n_code = shape.n_code();
    for (int32_t part = 1; part < 8 / shape.bits; part++) {
        for (int32_t i = 0; i < n_code; i++) {
            code[i] |= (uint8_t)(code[part * n_code + i] << part * shape.bits);
        }
    }
    for (int32_t at = 0; at < n_code; at += shape.WORD) {
        memcpy(group + shape.word_at(at / shape.WORD, lane), code + at, shape.WORD);
    }
}

// Row `from` of a group over row `to` of another.
static inline void lctx_index_move(const lctx_index_shape & shape, const char * from_group, int32_t from,
                                   char * to_group, int32_t to) {
    memcpy(to_group + shape.scale_at(to), from_group + shape.scale_at(from), shape.SCALE);
    for (int32_t word = 0; word < shape.n_code() / shape.WORD; word++) {
        memcpy(to_group + shape.word_at(word, to), from_group + shape.word_at(word, from), shape.WORD);
    }
}

// ---- products ----

// A query for products with rows of the index: bytes [n_channel] in the order of its own channels, 0 from head_dim on.
struct lctx_index_query {
    float scale;    // of a product, the attention's included
    int32_t start;  // added to a product of codes
};

// q: a rotated query, transformed as keys are, [head_dim]; bytes: [n_channel]. A query that is not finite makes every
// score NaN.
static inline lctx_index_query lctx_index_round(const lctx_index_shape & shape, const float * q, float attention_scale,
                                                int8_t * bytes) {
    const int32_t dim = shape.head_dim, whole = dim / LCTX_VL * LCTX_VL;
    lctx_scale scale = lctx_scale_of(q, whole);
    float most = scale.inverse > 0.0f ? 127.0f / scale.inverse : 0.0f, zero = scale.scale * 0.0f;
    for (int32_t d = whole; d < dim; d++) {
        most = std::max(most, fabsf(q[d])), zero += q[d] * 0.0f;
    }
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    auto sum = (int32_t)lctx_round(q, whole, inverse, bytes);
    for (int32_t d = whole; d < shape.n_channel(); d++) {
        bytes[d] = d < dim ? (int8_t)lrintf(q[d] * inverse) : 0;
        sum += bytes[d];
    }
    return {attention_scale * most / 127.0f + zero, -shape.most() * sum};
}

// level + most() of four codes in every lane.
template <int BITS> static inline lctx_vi lctx_index_levels_of(lctx_vi codes) {
    if constexpr (BITS == 1) {
        return codes + codes;
    }
#if defined(__AVX512BW__)
    const __m512i table = _mm512_set1_epi32(0x140d0700);
    return (lctx_vi)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__)
    const __m256i table = _mm256_set1_epi32(0x140d0700);
    return (lctx_vi)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
    return (lctx_vi)vqtbl1q_u8((uint8x16_t)(lctx_vi{} + 0x140d0700), (uint8x16_t)codes);
#else
    return codes * 7 - ((codes >> 1) & 0x01010101);  // no byte carries: 0, 7, 13, 20
#endif
}

// sum + products of four small unsigned bytes (20 at most) with four signed ones, exactly.
static inline lctx_vi lctx_vdot_small(lctx_vi sum, lctx_vi small, lctx_vi bytes) {
#if LCTX_HAS_DOT
    return lctx_vdot_bytes(sum, small, bytes);
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)small, (__m512i)bytes);
    return sum + (lctx_vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)small, (__m256i)bytes);
    return sum + (lctx_vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int shift = 0; shift < 32; shift += 8) {
        sum += ((small >> shift) & 255) * ((bytes << (24 - shift)) >> 24);
    }
    return sum;
#endif
}

// Add products of bytes in 16 bits, as many at a time as fit: 4 * 2 * 20 * 127 < 2^15. It halves the multiplications.
#if !LCTX_HAS_DOT && defined(__AVX2__) && !defined(__AVX512F__)
#define LCTX_HAS_SHORT_SUMS 1
constexpr int LCTX_SHORT_SUMS = 4;

static inline lctx_vi lctx_vshort_products(lctx_vi small, lctx_vi bytes) {
    return (lctx_vi)_mm256_maddubs_epi16((__m256i)small, (__m256i)bytes);
}
static inline lctx_vi lctx_vadd_shorts(lctx_vi a, lctx_vi b) {
    return (lctx_vi)_mm256_add_epi16((__m256i)a, (__m256i)b);
}
static inline lctx_vi lctx_vadd_pairs(lctx_vi sum, lctx_vi shorts) {
    return sum + (lctx_vi)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
}
#else
#define LCTX_HAS_SHORT_SUMS 0
#endif

static inline lctx_vi lctx_vload_words(const void * p) {
    lctx_vi v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline lctx_vi lctx_vset_word(const int8_t * p) {
    int32_t word;
    memcpy(&word, p, sizeof(word));
    return word - lctx_vi{};
}

// Scores of the 16 rows of a group for N queries: s[query][row], rows of s `step` apart. bytes: [N][n_channel].
template <int BITS, int N>
static LCTX_KERNEL void lctx_index_scores_n(const lctx_index_shape & shape, const char * group, const int8_t * bytes,
                                            const lctx_index_query * query, float * s, int64_t step) {
    constexpr int PER_BYTE = 8 / BITS;
    constexpr int32_t MASK = BITS == 1 ? 0x01010101 : 0x03030303;
    constexpr int RM = LCTX_VL == 4 ? 4 : 1;  // vectors of rows that share the broadcast of a query's bytes
    const int32_t n_code = shape.n_code(), n_channel = shape.n_channel();
    for (int lane = 0; lane < lctx_index_shape::GROUP; lane += RM * LCTX_VL) {
        lctx_vi sum[N][RM];
        for (int c = 0; c < N; c++) {
            std::fill_n(sum[c], RM, query[c].start - lctx_vi{});
        }
        for (int32_t at = 0; at < n_code; at += lctx_index_shape::WORD) {
            lctx_vi codes[RM];
            for (int i = 0; i < RM; i++) {
                codes[i] = lctx_vload_words(group + shape.word_at(at / lctx_index_shape::WORD, lane + i * LCTX_VL));
            }
            for (int part = 0; part < PER_BYTE; part++) {
                lctx_vi levels[RM];
                for (int i = 0; i < RM; i++, codes[i - 1] >>= BITS) {
                    levels[i] = lctx_index_levels_of<BITS>(codes[i] & MASK);
                }
                for (int c = 0; c < N; c++) {
                    const lctx_vi word = lctx_vset_word(bytes + (size_t)c * n_channel + part * n_code + at);
                    for (int i = 0; i < RM; i++) {
                        sum[c][i] = lctx_vdot_small(sum[c][i], levels[i], word);
                    }
                }
            }
        }
        for (int i = 0; i < RM; i++) {
            const lctx_vf scale = lctx_vload_half(group + shape.scale_at(lane + i * LCTX_VL));
            for (int c = 0; c < N; c++) {
                lctx_vstore(s + c * step + lane + i * LCTX_VL,
                            __builtin_convertvector(sum[c][i], lctx_vf) * scale * query[c].scale);
            }
        }
    }
}

template <int BITS> static inline void lctx_index_few(const lctx_index_shape & shape, const char * group,
                                                      const int8_t * bytes, const lctx_index_query * query, int n,
                                                      float * s, int64_t step) {
    for (int c = 0; c < n; c += lctx_few_step(n - c)) {
        const int8_t * b = bytes + (size_t)c * shape.n_channel();
        switch (lctx_few_step(n - c)) {
            case 1:  lctx_index_scores_n<BITS, 1>(shape, group, b, query + c, s + c * step, step); break;
            case 2:  lctx_index_scores_n<BITS, 2>(shape, group, b, query + c, s + c * step, step); break;
            default: lctx_index_scores_n<BITS, 4>(shape, group, b, query + c, s + c * step, step);
        }
    }
}

// Where a word of a row of many lies, of n rows. For i8mm, words of neighboring parts of the codes follow each other,
// so that a vector has eight channels of two rows.
static inline size_t lctx_index_word(const lctx_index_shape & shape, int32_t word, int row, int n) {
#if LCTX_HAS_I8MM
    const int32_t n_word = shape.n_code() / lctx_index_shape::WORD, part = word / n_word;
    return ((size_t)(part / 2 * n_word + word % n_word) * n + row) * 2 + part % 2;
#else
    (void)shape;
    return (size_t)word * n + row;
#endif
}

// The levels of a group as unsigned bytes: n_channel / 4 words of each row, at lctx_index_word.
template <int BITS>
static inline void lctx_index_unpack(const lctx_index_shape & shape, const char * group, int32_t * words) {
    constexpr int PER_BYTE = 8 / BITS, GROUP = lctx_index_shape::GROUP;
    constexpr int32_t MASK = BITS == 1 ? 0x01010101 : 0x03030303;
    const int32_t n_word = shape.n_code() / lctx_index_shape::WORD;
    for (int lane = 0; lane < GROUP; lane += LCTX_VL) {
        for (int32_t at = 0; at < n_word; at++) {
            lctx_vi codes = lctx_vload_words(group + shape.word_at(at, lane));
#if LCTX_HAS_I8MM
            for (int part = 0; part < PER_BYTE; part += 2, codes >>= 2 * BITS) {
                const lctx_vi even = lctx_index_levels_of<BITS>(codes & MASK);
                const lctx_vi odd = lctx_index_levels_of<BITS>((codes >> BITS) & MASK);
                const lctx_vi pairs[2] = {lctx_vpick(even, odd, lctx_lower_in_turn{}),
                                          lctx_vpick(even, odd, lctx_upper_in_turn{})};
                memcpy(words + lctx_index_word(shape, part * n_word + at, lane, GROUP), pairs, sizeof(pairs));
            }
#else
            for (int part = 0; part < PER_BYTE; part++, codes >>= BITS) {
                const lctx_vi levels = lctx_index_levels_of<BITS>(codes & MASK);
                memcpy(words + lctx_index_word(shape, part * n_word + at, lane, GROUP), &levels, sizeof(levels));
            }
#endif
        }
    }
}

// Many queries, side by side: bytes as words at lctx_index_word of n_pad rows, starts and scales [n_pad].
struct lctx_index_columns {
    const int32_t * words;
    const int32_t * starts;
    const float * scales;
    int n_pad;  // a multiple of LCTX_VL
};

// s[row][column] of RM rows from `row` on and RN vectors of columns from `first` on. keys: lctx_index_unpack.
#if LCTX_HAS_I8MM
template <int RM, int RN> static LCTX_KERNEL void lctx_index_tile(const int32_t * keys, int32_t n_word, int row,
                                                                  const float * key_scales,
                                                                  const lctx_index_columns & q, int first, float * s) {
    lctx_vi sum[RM / 2][RN][2];
    for (int j = 0; j < RN; j++) {
        const lctx_vi start = lctx_vload_words(q.starts + first + j * LCTX_VL);
        for (int i = 0; i < RM / 2; i++) {
            sum[i][j][0] = lctx_vpick(start, start, lctx_lower_halves{});
            sum[i][j][1] = lctx_vpick(start, start, lctx_upper_halves{});
        }
    }
    const int32_t * columns = q.words + 2 * first;
    keys += 2 * row;
    for (int32_t at = 0; at < n_word; at += 2, keys += 2 * lctx_index_shape::GROUP, columns += 2 * q.n_pad) {
        lctx_vi key[RM / 2];
        for (int i = 0; i < RM / 2; i++) {
            key[i] = lctx_vload_words(keys + i * LCTX_VL);
        }
        for (int j = 0; j < 2 * RN; j++) {
            const lctx_vi column = lctx_vload_words(columns + j * LCTX_VL);
            for (int i = 0; i < RM / 2; i++) {
                sum[i][j / 2][j % 2] = lctx_vmatmul(sum[i][j / 2][j % 2], key[i], column);
            }
        }
    }
    for (int j = 0; j < RN; j++) {
        const lctx_vf scale = lctx_vload(q.scales + first + j * LCTX_VL);
        for (int i = 0; i < RM; i++) {
            const lctx_vi * both = sum[i / 2][j];
            const lctx_vi own = i % 2 ? lctx_vpick(both[0], both[1], lctx_upper_halves{})
                                      : lctx_vpick(both[0], both[1], lctx_lower_halves{});
            lctx_vstore(s + (size_t)(row + i) * q.n_pad + first + j * LCTX_VL,
                        __builtin_convertvector(own, lctx_vf) * scale * key_scales[row + i]);
        }
    }
}
#else
template <int RM, int RN> static LCTX_KERNEL void lctx_index_tile(const int32_t * keys, int32_t n_word, int row,
                                                                  const float * key_scales,
                                                                  const lctx_index_columns & q, int first, float * s) {
    constexpr int GROUP = lctx_index_shape::GROUP;
    lctx_vi sum[RM][RN];
    for (int j = 0; j < RN; j++) {
        sum[0][j] = lctx_vload_words(q.starts + first + j * LCTX_VL);
        for (int i = 1; i < RM; i++) {
            sum[i][j] = sum[0][j];
        }
    }
#if LCTX_HAS_SHORT_SUMS
    for (int32_t at = 0; at < n_word; at += LCTX_SHORT_SUMS) {
        lctx_vi part[RM][RN] = {};
        for (int32_t word = at; word < at + LCTX_SHORT_SUMS; word++) {
            for (int i = 0; i < RM; i++) {
                const lctx_vi key = keys[word * GROUP + row + i] - lctx_vi{};
                for (int j = 0; j < RN; j++) {
                    const lctx_vi column = lctx_vload_words(q.words + (size_t)word * q.n_pad + first + j * LCTX_VL);
                    part[i][j] = lctx_vadd_shorts(part[i][j], lctx_vshort_products(key, column));
                }
            }
        }
        for (int i = 0; i < RM; i++) {
            for (int j = 0; j < RN; j++) {
                sum[i][j] = lctx_vadd_pairs(sum[i][j], part[i][j]);
            }
        }
    }
#else
    for (int32_t at = 0; at < n_word; at++) {
        lctx_vi column[RN];
        for (int j = 0; j < RN; j++) {
            column[j] = lctx_vload_words(q.words + (size_t)at * q.n_pad + first + j * LCTX_VL);
        }
#if LCTX_DOT_SIGNED
        static_assert(RM == LCTX_VL);
        const lctx_vi rows = lctx_vload_words(keys + at * GROUP + row);
        lctx_each_lane(
            [&](auto lane) {
                for (int j = 0; j < RN; j++) {
                    sum[lane][j] = lctx_vdot_lane<lane>(sum[lane][j], rows, column[j]);
                }
            },
            lctx_lanes{});
#else
        for (int i = 0; i < RM; i++) {
            const lctx_vi key = keys[at * GROUP + row + i] - lctx_vi{};
            for (int j = 0; j < RN; j++) {
                sum[i][j] = lctx_vdot_small(sum[i][j], key, column[j]);
            }
        }
#endif
    }
#endif
    for (int j = 0; j < RN; j++) {
        const lctx_vf scale = lctx_vload(q.scales + first + j * LCTX_VL);
        for (int i = 0; i < RM; i++) {
            lctx_vstore(s + (size_t)(row + i) * q.n_pad + first + j * LCTX_VL,
                        __builtin_convertvector(sum[i][j], lctx_vf) * scale * key_scales[row + i]);
        }
    }
}
#endif

// s[row][column], [16][n_pad]; keys: room for 16 * n_channel / 4 words.
template <int BITS> static inline void lctx_index_many(const lctx_index_shape & shape, const char * group,
                                                       const lctx_index_columns & q, int32_t * keys, float * s) {
    constexpr int GROUP = lctx_index_shape::GROUP, RM = LCTX_VL == 16 || LCTX_HAS_I8MM ? 8
                                                        : LCTX_HAS_SHORT_SUMS          ? 2
                                                                                       : 4;
    const int32_t n_word = shape.n_channel() / lctx_index_shape::WORD;
    float scales[GROUP];
    lctx_index_unpack<BITS>(shape, group, keys);
    for (int i = 0; i < GROUP; i += LCTX_VL) {
        lctx_vstore(scales + i, lctx_vload_half(group + shape.scale_at(i)));
    }
    int first = 0;
    for (; first + 2 * LCTX_VL <= q.n_pad; first += 2 * LCTX_VL) {
        for (int row = 0; row < GROUP; row += RM) {
            lctx_index_tile<RM, 2>(keys, n_word, row, scales, q, first, s);
        }
    }
    for (; first < q.n_pad; first += LCTX_VL) {
        for (int row = 0; row < GROUP; row += RM) {
            lctx_index_tile<RM, 1>(keys, n_word, row, scales, q, first, s);
        }
    }
}

// 2^x to about 2e-4 relative, 0 far below: enough to rank chunks, at a third of what lctx_vexp costs.
// 2^x = 2^n * 2^f with n = round(x), 2^f as a polynomial.
static inline lctx_vf lctx_vexp2(lctx_vf x) {
    constexpr float LEAST = -120.0f;
    const lctx_vf clamped = lctx_vmax(x, lctx_vset(LEAST));
#if defined(__AVX512F__)
    const lctx_vf n = (lctx_vf)_mm512_maskz_roundscale_ps(LCTX_ALL_LANES, (__m512)clamped, 8), f = clamped - n;
#else
    const lctx_vf shifted = clamped + 12582912.0f, n = shifted - 12582912.0f, f = clamped - n;  // as in lctx_vexp
#endif
    const lctx_vf p = ((f * 0.0558011f + 0.2401397f) * f + 0.6931472f) * f + 1.0f;
#if defined(__AVX512F__)
    return (lctx_vf)_mm512_maskz_scalef_ps(LCTX_ALL_LANES, (__m512)p, (__m512)n);
#else
    lctx_vi bits, exponent;
    memcpy(&bits, &p, sizeof(bits));
    memcpy(&exponent, &shifted, sizeof(exponent));
    bits += exponent << 23;
    lctx_vf y;
    memcpy(&y, &bits, sizeof(y));
    return y;
#endif
}

// log2(x) for x >= 1, to about 1e-6: mantissa in [sqrt(1/2), sqrt(2)), then 2 atanh of what it differs from 1 by.
static inline lctx_vf lctx_vlog2(lctx_vf x) {
    lctx_vi bits;
    memcpy(&bits, &x, sizeof(bits));
    const lctx_vi shifted = bits - 0x3f3504f3, exponent = shifted >> 23;
    const lctx_vi mantissa_bits = bits - (exponent << 23);
    lctx_vf m;
    memcpy(&m, &mantissa_bits, sizeof(m));
    const lctx_vf z = (m - 1.0f) / (m + 1.0f), zz = z * z;
    lctx_vf p = lctx_vset(1.0f / 9.0f);
    p = p * zz + 1.0f / 7.0f;
    p = p * zz + 1.0f / 5.0f;
    p = p * zz + 1.0f / 3.0f;
    p = p * zz + 1.0f;
    return __builtin_convertvector(exponent, lctx_vf) + 2.88539008f * z * p;
}

// Says where the rows of one head of a sequence lie in the index.
struct lctx_index_rows {
    const lctx_cache_args & cache;
    int32_t head, seq;

    char * group(int32_t index) const {
        return lctx_pool_at(cache.index, lctx_pool_row(cache.table, index * lctx_index_shape::GROUP, head, seq));
    }
};
