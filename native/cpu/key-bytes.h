// Scores of prompts by bytes, where the CPU multiplies bytes in one step (VNNI) and has no products of bf16 (pairs.h): keys that are
// stored in 8 bits or fewer as they are, queries rounded to 8 bits for every 32 channels, as llama.cpp rounds them. Sums are exact within
// 32 channels, and floats beyond. 32 channels of a column and a key take 8 products and 3 instructions, and 32 products in f32.
#pragma once

#include "columns.h"
#include "round.h"

#if defined(__AVX512VNNI__) && !defined(__AVX512BF16__)
#define LCTX_HAS_KEY_BYTES 1
static inline lctx_vi lctx_vdot_key(lctx_vi sum, uint32_t key, lctx_vi query) {
    return (lctx_vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32((int)key), (__m512i)query);
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define LCTX_HAS_KEY_BYTES 1
static inline lctx_vi lctx_vdot_key(lctx_vi sum, uint32_t key, lctx_vi query) {
    return (lctx_vi)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32((int)key), (__m256i)query);
}
#else
#define LCTX_HAS_KEY_BYTES 0
#endif

constexpr int LCTX_KEY_GROUP = 32;  // channels with one scale

// For the columns of a prompt.
static inline bool lctx_in_bytes(const lctx_attend_args & a, const lctx_columns & columns) {
    const ggml_type type = a.cache.k_pool.type;
    return LCTX_HAS_KEY_BYTES && columns.by_vectors() && !columns.few() && (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0);
}

#if LCTX_HAS_KEY_BYTES
// Queries as signed bytes, in place of the floats of their columns; value = scale * byte. Keys are unsigned, byte - 128 each.
struct lctx_query_bytes {
    int32_t * bytes;   // [dim / 4][n_pad] four channels of a column
    float * scales;    // [dim / GROUP][n_pad]
    int32_t * starts;  // [dim / GROUP][n_pad] -128 * the sum of the bytes
    int n_pad, n_group;

    explicit lctx_query_bytes(const lctx_columns & c)
        : bytes((int32_t *)c.q),
          scales(c.q + (size_t)c.n_pad * c.dim),  // where rows have waited to be transposed
          starts((int32_t *)scales + c.dim / LCTX_KEY_GROUP * c.n_pad),
          n_pad(c.n_pad),
          n_group(c.dim / LCTX_KEY_GROUP) {}
};

// LCTX_VL columns of one group. Four rows of floats become one of bytes, which takes the place of rows that were read.
static inline void lctx_round_group(const lctx_query_bytes & to, const float * q, int group, int first) {
    lctx_vf top{}, zero{};
    const float * rows = q + (size_t)group * LCTX_KEY_GROUP * to.n_pad + first;
    for (int i = 0; i < LCTX_KEY_GROUP; i++) {
        const lctx_vf v = lctx_vload(rows + (size_t)i * to.n_pad);
        top = lctx_vmax(top, lctx_vmax(v, -v));
        zero += v * 0.0f;  // NaN where a number is not finite
    }
    const lctx_vf inverse = top > lctx_vf{} ? lctx_vset(127.0f) / top : lctx_vf{};
    lctx_vi total{};
    for (int i = 0; i < LCTX_KEY_GROUP; i += 4) {
        lctx_vi four{};
        for (int j = 0; j < 4; j++) {
            const lctx_vf shifted = lctx_vload(rows + (size_t)(i + j) * to.n_pad) * inverse + 12582912.0f;  // as in round.h
            const lctx_vi rounded = (lctx_vi)shifted - 0x4b400000;
            total += rounded;
            four |= (rounded & 0xff) << (8 * j);
        }
        memcpy(to.bytes + (size_t)(group * LCTX_KEY_GROUP + i) / 4 * to.n_pad + first, &four, sizeof(four));
    }
    lctx_vstore(to.scales + group * to.n_pad + first, top / 127.0f + zero);
    total *= -128;
    memcpy(to.starts + group * to.n_pad + first, &total, sizeof(total));
}

static inline void lctx_round_queries(const lctx_columns & columns) {
    const lctx_query_bytes to(columns);
    for (int first = 0; first < to.n_pad; first += LCTX_VL) {
        for (int group = 0; group < to.n_group; group++) {
            lctx_round_group(to, columns.q, group, first);
        }
    }
}

// 32 channels of a key; returns their scale.
static inline float lctx_key_bytes(const block_q8_0 & b, uint8_t * to) {
    for (int i = 0; i < LCTX_KEY_GROUP; i++) {
        to[i] = (uint8_t)(b.qs[i] ^ 0x80);
    }
    return ggml_fp16_to_fp32(b.d);
}
static inline float lctx_key_bytes(const block_q4_0 & b, uint8_t * to) {
    for (int i = 0; i < LCTX_KEY_GROUP / 2; i++) {
        to[i] = (uint8_t)((b.qs[i] & 15) + 120);
        to[LCTX_KEY_GROUP / 2 + i] = (uint8_t)((b.qs[i] >> 4) + 120);
    }
    return ggml_fp16_to_fp32(b.d);
}
struct lctx_float_group {
    float values[LCTX_KEY_GROUP];
};
static inline float lctx_key_bytes(const lctx_float_group & b, uint8_t * to) {
    const lctx_scale scale = lctx_scale_of(b.values, LCTX_KEY_GROUP);
    lctx_round(b.values, LCTX_KEY_GROUP, scale.inverse, (int8_t *)to);
    for (int i = 0; i < LCTX_KEY_GROUP; i++) {
        to[i] ^= 0x80;
    }
    return scale.scale;
}

// bytes: [n][dim], scales: [n][dim / GROUP]
template <typename B>
static inline void lctx_fill_key_bytes(const lctx_stored & rows, int n, int n_group, uint8_t * bytes, float * scales) {
    for (int i = 0; i < n; i++) {
        const B * groups = (const B *)(rows.data + i * rows.row_size);
        for (int g = 0; g < n_group; g++, bytes += LCTX_KEY_GROUP) {
            *scales++ = lctx_key_bytes(groups[g], bytes);
        }
    }
}

// Scores of RM keys and RN vectors of columns.
template <int RM, int RN>
static LCTX_KERNEL void lctx_byte_tile(const uint8_t * k, const float * k_scales, const lctx_query_bytes & q, int first, float * s) {
    lctx_vf sums[RM][RN] = {};
    for (int g = 0; g < q.n_group; g++) {
        lctx_vi part[RM][RN];
        for (int j = 0; j < RN; j++) {
            memcpy(&part[0][j], q.starts + g * q.n_pad + first + j * LCTX_VL, sizeof(lctx_vi));
            for (int i = 1; i < RM; i++) {
                part[i][j] = part[0][j];
            }
        }
        for (int x = g * LCTX_KEY_GROUP; x < (g + 1) * LCTX_KEY_GROUP; x += 4) {
            lctx_vi four[RN];
            for (int j = 0; j < RN; j++) {
                memcpy(&four[j], q.bytes + (size_t)x / 4 * q.n_pad + first + j * LCTX_VL, sizeof(lctx_vi));
            }
            for (int i = 0; i < RM; i++) {
                uint32_t key;
                memcpy(&key, k + i * q.n_group * LCTX_KEY_GROUP + x, sizeof(key));
                for (int j = 0; j < RN; j++) {
                    part[i][j] = lctx_vdot_key(part[i][j], key, four[j]);
                }
            }
        }
        for (int j = 0; j < RN; j++) {
            const lctx_vf scale = lctx_vload(q.scales + g * q.n_pad + first + j * LCTX_VL);
            for (int i = 0; i < RM; i++) {
                sums[i][j] += __builtin_convertvector(part[i][j], lctx_vf) * scale * lctx_vset(k_scales[i * q.n_group + g]);
            }
        }
    }
    for (int i = 0; i < RM; i++) {
        for (int j = 0; j < RN; j++) {
            lctx_vstore(s + i * q.n_pad + first + j * LCTX_VL, sums[i][j]);
        }
    }
}

template <int RN>
static inline void lctx_byte_columns(int n, const uint8_t * k, const float * k_scales, const lctx_query_bytes & q, int first, float * s) {
    constexpr int RM = LCTX_VL == 16 ? 4 : 2;  // 16 accumulators of 32 registers, or 8 of 16
    int i = 0;
    for (; i + RM <= n; i += RM) {
        lctx_byte_tile<RM, RN>(k + i * q.n_group * LCTX_KEY_GROUP, k_scales + i * q.n_group, q, first, s + i * q.n_pad);
    }
    for (; i < n; i++) {
        lctx_byte_tile<1, RN>(k + i * q.n_group * LCTX_KEY_GROUP, k_scales + i * q.n_group, q, first, s + i * q.n_pad);
    }
}

// s[key][column] of n keys; queries were rounded. bytes: n * dim of them, over the floats of keys that were gathered; scales: n * dim / 32.
static LCTX_ALONE void lctx_byte_scores(const lctx_columns & columns, const lctx_stored & rows, int n, uint8_t * bytes, float * scales,
                                        float * s) {
    const lctx_query_bytes q(columns);
    switch (rows.type) {
        case GGML_TYPE_Q8_0: lctx_fill_key_bytes<block_q8_0>(rows, n, q.n_group, bytes, scales); break;
        case GGML_TYPE_Q4_0: lctx_fill_key_bytes<block_q4_0>(rows, n, q.n_group, bytes, scales); break;
        default:             lctx_fill_key_bytes<lctx_float_group>(rows, n, q.n_group, bytes, scales); break;
    }
    int first = 0;
    for (; first + 2 * LCTX_VL <= q.n_pad; first += 2 * LCTX_VL) {
        lctx_byte_columns<2>(n, bytes, scales, q, first, s);
    }
    for (; first < q.n_pad; first += LCTX_VL) {
        lctx_byte_columns<1>(n, bytes, scales, q, first, s);
    }
}
#endif
