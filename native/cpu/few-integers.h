// Scores of few columns by integers, where one instruction multiplies four signed bytes with four others (sdot): keys
// in q8_0 and q4_0 as they are stored, queries rounded for every 32 channels as in key-integers.h. For 32 channels of a
// column and a key, floats take 8 products and the conversions of the key; here it is 2 products, a conversion and the
// scale. With i8mm, two keys and two columns take 4 products and one of each of the others; a single column has no
// other.
#pragma once

#include "key-integers.h"

static inline bool lctx_few_in_integers(const lctx_attend_args & a, const lctx_columns & columns) {
    return LCTX_DOT_SIGNED && lctx_are_integers(a) && columns.few();
}

#if LCTX_DOT_SIGNED
// The queries of few columns as bytes, after their floats; value = scale * byte. In pairs, for i8mm:
//   bytes   [n rounded up / 2][dim / 8][2][8]
//   scales  [n rounded up / 2][dim / GROUP][4], as the products of two keys and two columns lie
struct lctx_few_integers {
    int8_t * bytes;  // [n rounded up by lctx_few_pad][dim]
    float * scales;  // [n rounded up][dim / GROUP]
    int n, dim;

    explicit lctx_few_integers(const lctx_columns & c)
        : bytes((int8_t *)(c.q + (size_t)lctx_few_pad(c.n) * c.dim)),
          scales((float *)(bytes + (size_t)n_row(c.n) * c.dim)),
          n(c.n),
          dim(c.dim) {}
    static int n_row(int n) { return LCTX_HAS_I8MM && n > 1 ? lctx_round_up(n, 2) : lctx_few_pad(n); }
    bool in_pairs() const { return LCTX_HAS_I8MM && n > 1; }
};

#if LCTX_HAS_I8MM
// A last column without a neighbor has zeros beside it, whose scores are not read.
static inline void lctx_round_pairs(const lctx_columns & columns, const lctx_few_integers & to) {
    constexpr int STEP = 8;
    const int n_group = to.dim / LCTX_KEY_GROUP;
    for (int i = 0; i < lctx_round_up(to.n, 2) * n_group; i++) {
        const int column = i / n_group, group = i % n_group, at = column / 2 * n_group + group;
        int8_t bytes[LCTX_KEY_GROUP] = {};
        lctx_scale scale = {};
        if (column < to.n) {
            const float * values = columns.q + i * LCTX_KEY_GROUP;
            scale = lctx_scale_of(values, LCTX_KEY_GROUP);
            lctx_round(values, LCTX_KEY_GROUP, scale.inverse, bytes);
        }
        for (int x = 0; x < LCTX_KEY_GROUP; x += STEP) {
            memcpy(to.bytes + at * 2 * LCTX_KEY_GROUP + 2 * x + column % 2 * STEP, bytes + x, STEP);
        }
        to.scales[at * LCTX_VL + column % 2] = to.scales[at * LCTX_VL + 2 + column % 2] = scale.scale;
    }
}
#endif

static inline void lctx_round_few(const lctx_columns & columns) {
    const lctx_few_integers to(columns);
#if LCTX_HAS_I8MM
    if (to.in_pairs()) {
        return lctx_round_pairs(columns, to);
    }
#endif
    for (int i = 0; i < lctx_few_pad(to.n) * to.dim / LCTX_KEY_GROUP; i++) {
        const float * values = columns.q + i * LCTX_KEY_GROUP;
        const lctx_scale scale = lctx_scale_of(values, LCTX_KEY_GROUP);
        lctx_round(values, LCTX_KEY_GROUP, scale.inverse, to.bytes + i * LCTX_KEY_GROUP);
        to.scales[i] = scale.scale;
    }
}

// Channels [0, 16) and [16, 32) of a group of a key.
struct lctx_key_halves {
    int8x16_t low, high;
};
static inline lctx_key_halves lctx_halves_of(const block_q8_0 & b) {
    return {vld1q_s8(b.qs), vld1q_s8(b.qs + LCTX_KEY_GROUP / 2)};
}
static inline lctx_key_halves lctx_halves_of(const block_q4_0 & b) {
    const uint8x16_t both = vld1q_u8(b.qs);
    const int8x16_t zero = vdupq_n_s8(8);
    return {vsubq_s8(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), zero),
            vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), zero)};
}

// Groups whose scales are gathered before their products, which would wait for them.
constexpr int LCTX_SCALE_GROUPS = 4;

// The rows of LCTX_VL keys from number i on; after the last key it comes again. The same rows of the next block are
// fetched meanwhile, a part for each group.
template <typename B> struct lctx_key_rows {
    static constexpr size_t STEP = GGML_PAD(LCTX_VL * sizeof(B), 64);
    const B * row[LCTX_VL];
    const char * next;
    size_t ahead, end;

    lctx_key_rows(const lctx_stored & k, int i, int n)
        : next(k.next), ahead(i * k.row_size), end(k.next ? ahead + LCTX_VL * k.row_size : 0) {
        for (int x = 0; x < LCTX_VL; x++) {
            row[x] = (const B *)(k.data + std::min(i + x, n - 1) * k.row_size);
        }
    }
    void prefetch() {
        if (ahead < end) {
            lctx_prefetch(next + ahead, STEP);
            ahead += STEP;
        }
    }
};

// s[column][key] = k_key . q_column for N columns from `column` on.
template <typename B, int N> static LCTX_KERNEL void lctx_few_integer_scores_n(const lctx_stored & k, int n,
                                                                               const lctx_few_integers & q, int column,
                                                                               float * s) {
    const int n_group = q.dim / LCTX_KEY_GROUP;
    for (int i = 0; i < n; i += LCTX_VL) {
        lctx_key_rows<B> keys(k, i, n);
        lctx_vf sum[N][LCTX_VL] = {};
        for (int first = 0; first < n_group; first += LCTX_SCALE_GROUPS) {
            const int last = std::min(first + LCTX_SCALE_GROUPS, n_group);
            lctx_vf scales[LCTX_SCALE_GROUPS];
            for (int g = first; g < last; g++) {
                for (int x = 0; x < LCTX_VL; x++) {
                    scales[g - first][x] = lctx_from_half(keys.row[x][g].d);
                }
            }
            for (int g = first; g < last; g++) {
                keys.prefetch();
                lctx_key_halves key[LCTX_VL];
                for (int x = 0; x < LCTX_VL; x++) {
                    key[x] = lctx_halves_of(keys.row[x][g]);
                }
                for (int c = 0; c < N; c++) {
                    const int8_t * bytes = q.bytes + (size_t)(column + c) * q.dim + g * LCTX_KEY_GROUP;
                    const int8x16_t low = vld1q_s8(bytes), high = vld1q_s8(bytes + LCTX_KEY_GROUP / 2);
                    const lctx_vf both = scales[g - first] * q.scales[(column + c) * n_group + g];
                    for (int x = 0; x < LCTX_VL; x++) {
                        // sums start at the bits of 1.5 * 2^23, so that their bits are those of floats
                        const int32x4_t start = vdupq_n_s32(0x4b400000);
                        const int32x4_t part = vdotq_s32(vdotq_s32(start, key[x].low, low), key[x].high, high);
                        sum[c][x] += ((lctx_vf)part - 12582912.0f) * both[x];
                    }
                }
            }
        }
        for (int c = 0; c < N; c++) {
            lctx_vstore(s + c * LCTX_BLOCK + i, lctx_vsums(sum[c]));
        }
    }
}

#if LCTX_HAS_I8MM
// The same for N columns from `column` on, which are in pairs.
template <typename B, int N> static LCTX_KERNEL void lctx_few_pair_scores_n(const lctx_stored & k, int n,
                                                                            const lctx_few_integers & q, int column,
                                                                            float * s) {
    const int n_group = q.dim / LCTX_KEY_GROUP;
    for (int i = 0; i < n; i += LCTX_VL) {
        lctx_key_rows<B> keys(k, i, n);
        lctx_vf sum[N / 2][2] = {};
        for (int g = 0; g < n_group; g++) {
            keys.prefetch();
            lctx_vf scales;
            for (int x = 0; x < LCTX_VL; x++) {
                scales[x] = lctx_from_half(keys.row[x][g].d);
            }
            const lctx_vf of_keys[2] = {lctx_vpick(scales, scales, std::integer_sequence<int, 0, 0, 1, 1>{}),
                                        lctx_vpick(scales, scales, std::integer_sequence<int, 2, 2, 3, 3>{})};
            lctx_vi key[2][4];
            for (int p = 0; p < 2; p++) {
                const lctx_key_halves even = lctx_halves_of(keys.row[2 * p][g]),
                                      odd = lctx_halves_of(keys.row[2 * p + 1][g]);
                key[p][0] = lctx_vpick((lctx_vi)even.low, (lctx_vi)odd.low, lctx_lower_halves{});
                key[p][1] = lctx_vpick((lctx_vi)even.low, (lctx_vi)odd.low, lctx_upper_halves{});
                key[p][2] = lctx_vpick((lctx_vi)even.high, (lctx_vi)odd.high, lctx_lower_halves{});
                key[p][3] = lctx_vpick((lctx_vi)even.high, (lctx_vi)odd.high, lctx_upper_halves{});
            }
            for (int c = 0; c < N / 2; c++) {
                const int at = (column / 2 + c) * n_group + g;
                const lctx_vf of_columns = lctx_vload(q.scales + at * LCTX_VL);
                lctx_vi part[2];
                std::fill_n(part, 2, lctx_vi{} + 0x4b400000);  // as in lctx_few_integer_scores_n
                for (int x = 0; x < 4; x++) {
                    lctx_vi bytes;
                    memcpy(&bytes, q.bytes + at * 2 * LCTX_KEY_GROUP + x * sizeof(bytes), sizeof(bytes));
                    for (int p = 0; p < 2; p++) {
                        part[p] = lctx_vmatmul(part[p], key[p][x], bytes);
                    }
                }
                for (int p = 0; p < 2; p++) {
                    sum[c][p] += ((lctx_vf)part[p] - 12582912.0f) * (of_keys[p] * of_columns);
                }
            }
        }
        for (int c = 0; c < N / 2; c++) {
            float * to = s + 2 * c * LCTX_BLOCK + i;
            lctx_vstore(to, lctx_vpick(sum[c][0], sum[c][1], std::integer_sequence<int, 0, 2, 4, 6>{}));
            lctx_vstore(to + LCTX_BLOCK, lctx_vpick(sum[c][0], sum[c][1], std::integer_sequence<int, 1, 3, 5, 7>{}));
        }
    }
}

// Four or two columns at a time.
template <typename B>
static inline void lctx_few_pair_scores(const lctx_stored & k, int n, const lctx_few_integers & q, float * s) {
    for (int c = 0; c < q.n; c += 4) {
        const lctx_stored kc = lctx_prefetched_once(k, c);
        float * sc = s + (size_t)c * LCTX_BLOCK;
        q.n - c > 2 ? lctx_few_pair_scores_n<B, 4>(kc, n, q, c, sc) : lctx_few_pair_scores_n<B, 2>(kc, n, q, c, sc);
    }
}
#endif

// One or two columns at a time: sums of four keys for more of them do not fit in registers.
template <typename B>
static inline void lctx_few_integer_scores(const lctx_stored & k, int n, const lctx_few_integers & q, float * s) {
#if LCTX_HAS_I8MM
    if (q.in_pairs()) {
        return lctx_few_pair_scores<B>(k, n, q, s);
    }
#endif
    for (int c = 0; c < q.n; c += 2) {
        const lctx_stored kc = lctx_prefetched_once(k, c);
        float * sc = s + (size_t)c * LCTX_BLOCK;
        q.n - c > 1 ? lctx_few_integer_scores_n<B, 2>(kc, n, q, c, sc)
                    : lctx_few_integer_scores_n<B, 1>(kc, n, q, c, sc);
    }
}

// s[column][key], as lctx_few_scores has them; queries were rounded. False for keys of other types, which were
// gathered.
static inline bool lctx_few_integer_scores(const lctx_columns & columns, const lctx_stored & k, int n, float * s) {
    const lctx_few_integers q(columns);
    switch (k.type) {
        case GGML_TYPE_Q8_0: lctx_few_integer_scores<block_q8_0>(k, n, q, s); return true;
        case GGML_TYPE_Q4_0: lctx_few_integer_scores<block_q4_0>(k, n, q, s); return true;
        default:             return false;
    }
}
#else
static inline void lctx_round_few(const lctx_columns &) {}

static inline bool lctx_few_integer_scores(const lctx_columns &, const lctx_stored &, int, float *) {
    return false;
}
#endif
