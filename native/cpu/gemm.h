// Small matrix products: of floats, and of pairs of bf16 numbers where the CPU has them, at twice the rate.
#pragma once

#include "vec.h"

#if defined(__AVX512BF16__)
#define LCTX_HAS_PAIRS 1
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LCTX_HAS_PAIRS 1
#include <arm_neon.h>
#else
#define LCTX_HAS_PAIRS 0
#endif

static inline lctx_vf lctx_vmad(lctx_vf sum, lctx_vf a, lctx_vf b) {
    return sum + a * b;
}

#if LCTX_HAS_PAIRS
// Two bf16 numbers that follow each other in k, the first in the low half.
struct lctx_pair {
    uint32_t bits;
};

static inline lctx_vi lctx_vload(const lctx_pair * p) {
    lctx_vi v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void lctx_vstore(lctx_pair * p, lctx_vi v) {
    memcpy(p, &v, sizeof(v));
}

static inline lctx_vi lctx_vset(lctx_pair x) {
    return (int32_t)x.bits - lctx_vi{};
}

typedef int16_t lctx_halves __attribute__((vector_size(4 * LCTX_VL)));

// In every lane: sum + both products of a pair.
static inline lctx_vf lctx_vmad(lctx_vf sum, lctx_vi a, lctx_vi b) {
#if defined(__AVX512BF16__)
    return (lctx_vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return (lctx_vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}

// Both rounded, one after the other.
static inline lctx_halves lctx_vround_both(lctx_vf first, lctx_vf second) {
#if defined(__AVX512BF16__)
    return (lctx_halves)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    return (lctx_halves)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second);
#endif
}

template <int... I> static inline lctx_vi lctx_vinterleave(lctx_halves v, std::integer_sequence<int, I...>) {
    return (lctx_vi)lctx_vpick<lctx_halves>(v, v, std::integer_sequence<int, (I % 2 * LCTX_VL + I / 2)...>{});
}

// In every lane a pair of both.
static inline lctx_vi lctx_vpair(lctx_vf first, lctx_vf second) {
    return lctx_vinterleave(lctx_vround_both(first, second), std::make_integer_sequence<int, 2 * LCTX_VL>{});
}

// The lanes as LCTX_VL / 2 pairs.
static inline void lctx_vstore(lctx_pair * p, lctx_vf v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    vst1_bf16((bfloat16_t *)p, vcvt_bf16_f32((float32x4_t)v));
#endif
}
#endif

// These say where the rows of a product go: one after the other, or each to an address of its own.
struct lctx_rows_in_order {
    float * first;
    int64_t step;
    float * at(int i) const { return first + i * step; }
};
struct lctx_rows_anywhere {
    float * const * rows;
    float * at(int i) const { return rows[i]; }
};

// Register tile: rows [row, row + RM) and columns [column, column + RN*VL) of C (+)= A * B.
template <int RM, int RN, typename T, typename C>
static LCTX_KERNEL void lctx_gemm_tile(int k_dim, const T * a, int64_t a_row, int64_t a_col, const T * b, int64_t b_row,
                                       C c, int row, int column, bool add) {
    lctx_vf acc[RM][RN];
    for (int i = 0; i < RM; i++) {
        for (int j = 0; j < RN; j++) {
            acc[i][j] = add ? lctx_vload(c.at(row + i) + column + j * LCTX_VL) : lctx_vf{};
        }
    }
    for (int k = 0; k < k_dim; k++) {
        decltype(lctx_vload(b)) bk[RN];
        for (int j = 0; j < RN; j++) {
            bk[j] = lctx_vload(b + k * b_row + column + j * LCTX_VL);
        }
        for (int i = 0; i < RM; i++) {
            const auto ai = lctx_vset(a[(row + i) * a_row + k * a_col]);
            for (int j = 0; j < RN; j++) {
                acc[i][j] = lctx_vmad(acc[i][j], ai, bk[j]);
            }
        }
    }
    for (int i = 0; i < RM; i++) {
        for (int j = 0; j < RN; j++) {
            lctx_vstore(c.at(row + i) + column + j * LCTX_VL, acc[i][j]);
        }
    }
}

template <int RN, typename T, typename C>
static inline void lctx_gemm_columns(int m, int k_dim, const T * a, int64_t a_row, int64_t a_col, const T * b,
                                     int64_t b_row, C c, int column, bool add) {
    constexpr int RM =
        LCTX_VL == 16 ? 8
                      : 6;  // accumulators: 16 of 32 registers, or 12 of 16; one panel of B stays in the first cache
    int i = 0;
    for (; i + RM <= m; i += RM) {
        lctx_gemm_tile<RM, RN>(k_dim, a, a_row, a_col, b, b_row, c, i, column, add);
    }
    for (; i + 4 <= m; i += 4) {
        lctx_gemm_tile<4, RN>(k_dim, a, a_row, a_col, b, b_row, c, i, column, add);
    }
    for (; i < m; i++) {
        lctx_gemm_tile<1, RN>(k_dim, a, a_row, a_col, b, b_row, c, i, column, add);
    }
}

// C[m][n] (+)= A[m][k_dim] * B[k_dim][n]; n is a multiple of LCTX_VL; element (i, k) of A is a[i*a_row + k*a_col].
template <typename T, typename C> static inline void lctx_gemm(int m, int n, int k_dim, const T * a, int64_t a_row,
                                                               int64_t a_col, const T * b, int64_t b_row, C c,
                                                               bool add) {
    constexpr int RN = 2;
    int j = 0;
    for (; j + RN * LCTX_VL <= n; j += RN * LCTX_VL) {
        lctx_gemm_columns<RN>(m, k_dim, a, a_row, a_col, b, b_row, c, j, add);
    }
    for (; j < n; j += LCTX_VL) {
        lctx_gemm_columns<1>(m, k_dim, a, a_row, a_col, b, b_row, c, j, add);
    }
}

template <typename T> static inline void lctx_gemm(int m, int n, int k_dim, const T * a, int64_t a_row, int64_t a_col,
                                                   const T * b, int64_t b_row, float * c, int64_t c_row, bool add) {
    lctx_gemm(m, n, k_dim, a, a_row, a_col, b, b_row, lctx_rows_in_order{c, c_row}, add);
}
