// Scores of few columns by integers, where one instruction multiplies four signed bytes with four others (sdot): keys
// in q8_0 and q4_0 as they are stored, queries rounded for every 32 channels as in key-integers.h. For 32 channels of a
// column and a key, floats take 8 products and the conversions of the key; here it is 2 products, a conversion and the
// scale.
#pragma once

#include "key-integers.h"

static inline bool lctx_few_in_integers(const lctx_attend_args & a, const lctx_columns & columns) {
    return LCTX_DOT_SIGNED && lctx_are_integers(a) && columns.few();
}

#if LCTX_DOT_SIGNED
// The queries of few columns as bytes, after their floats; value = scale * byte.
struct lctx_few_integers {
    int8_t * bytes;  // [n rounded up by lctx_few_pad][dim]
    float * scales;  // [n rounded up][dim / GROUP]
    int n, dim;

    explicit lctx_few_integers(const lctx_columns & c)
        : bytes((int8_t *)(c.q + (size_t)lctx_few_pad(c.n) * c.dim)),
          scales((float *)(bytes + (size_t)lctx_few_pad(c.n) * c.dim)),
          n(c.n),
          dim(c.dim) {}
};

static inline void lctx_round_few(const lctx_columns & columns) {
    const lctx_few_integers to(columns);
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

// s[column][key] = k_key . q_column for N columns from `column` on.
template <typename B, int N> static LCTX_KERNEL void lctx_few_integer_scores_n(const lctx_stored & k, int n,
                                                                               const lctx_few_integers & q, int column,
                                                                               float * s) {
    const int n_group = q.dim / LCTX_KEY_GROUP;
    const size_t step = GGML_PAD(LCTX_VL * sizeof(B), 64);
    for (int i = 0; i < n; i += LCTX_VL) {
        const B * row[LCTX_VL];
        for (int x = 0; x < LCTX_VL; x++) {
            row[x] = (const B *)(k.data + std::min(i + x, n - 1) * k.row_size);
        }
        size_t ahead = i * k.row_size;
        const size_t end = k.next ? ahead + LCTX_VL * k.row_size : 0;
        lctx_vf sum[N][LCTX_VL] = {};
        for (int first = 0; first < n_group; first += LCTX_SCALE_GROUPS) {
            const int last = std::min(first + LCTX_SCALE_GROUPS, n_group);
            lctx_vf scales[LCTX_SCALE_GROUPS];
            for (int g = first; g < last; g++) {
                for (int x = 0; x < LCTX_VL; x++) {
                    scales[g - first][x] = lctx_from_half(row[x][g].d);
                }
            }
            for (int g = first; g < last; g++) {
                if (ahead < end) {
                    lctx_prefetch(k.next + ahead, step);
                    ahead += step;
                }
                lctx_key_halves key[LCTX_VL];
                for (int x = 0; x < LCTX_VL; x++) {
                    key[x] = lctx_halves_of(row[x][g]);
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

// One or two columns at a time: sums of four keys for more of them do not fit in registers.
template <typename B>
static inline void lctx_few_integer_scores(const lctx_stored & k, int n, const lctx_few_integers & q, float * s) {
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
