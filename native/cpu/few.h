// Few columns (decode): the stored rows are converted in registers and multiplied with up to four columns at once.
// The time is spent on reading K and V, so nothing is unpacked to memory, and the rows of the next block are prefetched
// at the same time.
#pragma once

#include "kernels.h"
#include "rows.h"

#include <algorithm>
#include <cmath>

constexpr int LCTX_BLOCK = LCTX_PAGE_ROWS;  // most rows that are worked on at a time
constexpr int LCTX_FEW_COLUMNS = 8;         // up to here this beats a product of floats that is padded to vector width
constexpr int LCTX_ACCUMULATORS = LCTX_VL == 8 ? 8 : 16;  // of 32 registers; AVX2 has 16

// Up to LCTX_BLOCK rows that lie in one page.
struct lctx_stored {
    ggml_type type;
    size_t row_size;
    const char * data;
    const char * next;  // rows to prefetch, as many, or nullptr
};

// The columns are taken four, two or one at a time; columns beyond n are zeros, whose results are not read.
static inline int lctx_few_step(int n_left) {
    return n_left > 2 ? 4 : n_left;
}

// n columns and the zeros after them.
static inline int lctx_few_pad(int n) {
    return n % 4 == 3 ? n + 1 : n;
}

// Into the first-level cache.
static inline void lctx_prefetch(const char * p, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch(p + i);
    }
}

// n of the rows that are read next, from number `row` on, into the second-level cache.
static inline void lctx_prefetch_rows(const lctx_stored & rows, int row, int n) {
    const char * p = rows.next ? rows.next + row * rows.row_size : nullptr;
    for (size_t i = 0; p && i < n * rows.row_size; i += 64) {
        __builtin_prefetch(p + i, 0, 2);
    }
    asm volatile("");  // a function that only prefetches has no effect for GCC, which leaves its calls out
}

// The next rows are prefetched during the first columns only.
static inline lctx_stored lctx_prefetched_once(const lctx_stored & rows, int column) {
    return {rows.type, rows.row_size, rows.data, column == 0 ? rows.next : nullptr};
}

// s[column][key] = k_key . q_column for N columns.
template <typename R, int N>
static LCTX_KERNEL void lctx_few_scores_n(const lctx_stored & k, int n, const float * q, int dim, float * s) {
    constexpr int KEYS = LCTX_VL / N;  // keys at a time: N * KEYS sums fill one vector
    // Whole lines that are prefetched before every vector: all at once they would fill the buffers for lines that are
    // under way, and the products would wait.
    const size_t step = GGML_PAD(KEYS * k.row_size * LCTX_VL / dim, 64);
    for (int i = 0; i < n; i += KEYS) {
        const char * row[KEYS];
        for (int x = 0; x < KEYS; x++) {
            row[x] = k.data + std::min(i + x, n - 1) * k.row_size;
        }
        size_t ahead = i * k.row_size;
        const size_t end = k.next ? ahead + KEYS * k.row_size : 0;
        lctx_vf sum[LCTX_VL] = {};
#pragma GCC unroll 2
        for (int d = 0; d < dim; d += LCTX_VL) {
            if (ahead < end) {
                lctx_prefetch(k.next + ahead, step);
                ahead += step;
            }
            lctx_vf key[KEYS];
            for (int x = 0; x < KEYS; x++) {
                key[x] = R::load(row[x], d);
            }
            for (int c = 0; c < N; c++) {
                const lctx_vf qc = lctx_vkeep(lctx_vload(q + c * dim + d));
                for (int x = 0; x < KEYS; x++) {
                    sum[c * KEYS + x] += key[x] * qc;
                }
            }
        }
        const lctx_vf sums = lctx_vsums(sum);
        for (int c = 0; c < N; c++) {
            memcpy(s + c * LCTX_BLOCK + i, (const float *)&sums + c * KEYS, KEYS * sizeof(float));
        }
    }
}

// Compute the scores with sums in the order of a product for many columns (gemm.h): keys in the lanes, one dimension
// after the other.
template <typename R, int N>
static LCTX_KERNEL void lctx_few_scores_turned(const lctx_stored & k, int n, const float * q, int dim, float * s) {
    const size_t step = GGML_PAD(LCTX_VL * k.row_size * LCTX_VL / dim, 64);
    for (int i = 0; i < n; i += LCTX_VL) {
        size_t ahead = i * k.row_size;
        const size_t end = k.next ? ahead + LCTX_VL * k.row_size : 0;
        lctx_vf sum[N] = {};
        for (int d = 0; d < dim; d += LCTX_VL) {
            if (ahead < end) {
                lctx_prefetch(k.next + ahead, step);
                ahead += step;
            }
            lctx_vf keys[LCTX_VL];
            for (int x = 0; x < LCTX_VL; x++) {
                keys[x] = R::load(k.data + std::min(i + x, n - 1) * k.row_size, d);
            }
            lctx_vtranspose(keys);
            for (int x = 0; x < LCTX_VL; x++) {
                for (int c = 0; c < N; c++) {
                    sum[c] += q[c * dim + d + x] * keys[x];
                }
            }
        }
        for (int c = 0; c < N; c++) {
            lctx_vstore(s + c * LCTX_BLOCK + i, sum[c]);
        }
    }
}

// o.at(c0 + column)[d0 ...] += sum over keys of p[column][key] v_key[d0 ...] for N columns and D vectors of dimensions.
template <typename R, int N, int D, typename O>
static LCTX_KERNEL void lctx_few_weigh_n(const lctx_stored & v, int n, const float * p, int d0, const O & o, int c0) {
    lctx_vf sum[N][D];
    for (int c = 0; c < N; c++) {
        for (int j = 0; j < D; j++) {
            sum[c][j] = lctx_vload(o.at(c0 + c) + d0 + j * LCTX_VL);
        }
    }
    for (int i = 0; i < n; i++) {
        const char * row = v.data + i * v.row_size;
        if (v.next && d0 == 0) {
            lctx_prefetch(v.next + i * v.row_size, v.row_size);
        }
        lctx_vf value[D];
        lctx_load_all(R{}, row, d0, value);
        for (int c = 0; c < N; c++) {
            const lctx_vf weight = lctx_vset(p[c * LCTX_BLOCK + i]);
            for (int j = 0; j < D; j++) {
                sum[c][j] += weight * value[j];
            }
        }
    }
    for (int c = 0; c < N; c++) {
        for (int j = 0; j < D; j++) {
            lctx_vstore(o.at(c0 + c) + d0 + j * LCTX_VL, sum[c][j]);
        }
    }
}

template <typename R, int N, typename O>
static inline void lctx_few_weigh_all(const lctx_stored & v, int n, const float * p, int dim, const O & o, int c0) {
    constexpr int D = std::min(8, LCTX_ACCUMULATORS / N);
    int d = 0;
    for (; d + D * LCTX_VL <= dim; d += D * LCTX_VL) {
        lctx_few_weigh_n<R, N, D>(v, n, p, d, o, c0);
    }
    for (; d < dim; d += LCTX_VL) {
        lctx_few_weigh_n<R, N, 1>(v, n, p, d, o, c0);
    }
}

// s[column][key], [n_col rounded up by lctx_few_step][LCTX_BLOCK]: k_key . q_column. The type of k is one of
// lctx_with_rows. q: [n_col rounded up][dim]; scores of keys beyond n are undefined. turned: sums have the order of
// many columns.
static inline void lctx_few_scores(const lctx_stored & k, int n, const float * q, int n_col, int dim, float * s,
                                   bool turned = false) {
    lctx_with_rows(k.type, [&](auto rows) {
        using R = decltype(rows);
        for (int c = 0; c < n_col; c += lctx_few_step(n_col - c)) {
            const lctx_stored kc = lctx_prefetched_once(k, c);
            const float * qc = q + (size_t)c * dim;
            float * sc = s + (size_t)c * LCTX_BLOCK;
            switch (lctx_few_step(n_col - c)) {
                case 1:
                    turned ? lctx_few_scores_turned<R, 1>(kc, n, qc, dim, sc)
                           : lctx_few_scores_n<R, 1>(kc, n, qc, dim, sc);
                    break;
                case 2:
                    turned ? lctx_few_scores_turned<R, 2>(kc, n, qc, dim, sc)
                           : lctx_few_scores_n<R, 2>(kc, n, qc, dim, sc);
                    break;
                default:
                    turned ? lctx_few_scores_turned<R, 4>(kc, n, qc, dim, sc)
                           : lctx_few_scores_n<R, 4>(kc, n, qc, dim, sc);
            }
        }
    });
}

// o.at(column)[dim] += sum over keys of p[column][key] v_key. O: lctx_rows_in_order or lctx_rows_anywhere.
template <typename O>
static inline void lctx_few_weigh(const lctx_stored & v, int n, const float * p, int n_col, int dim, const O & o) {
    lctx_with_rows(v.type, [&](auto rows) {
        using R = decltype(rows);
        for (int c = 0; c < n_col; c += lctx_few_step(n_col - c)) {
            const lctx_stored vc = lctx_prefetched_once(v, c);
            const float * pc = p + (size_t)c * LCTX_BLOCK;
            switch (lctx_few_step(n_col - c)) {
                case 1:  lctx_few_weigh_all<R, 1>(vc, n, pc, dim, o, c); break;
                case 2:  lctx_few_weigh_all<R, 2>(vc, n, pc, dim, o, c); break;
                default: lctx_few_weigh_all<R, 4>(vc, n, pc, dim, o, c);
            }
        }
    });
}

// lctx_softmax_block for scores laid out [column][key]: of one column. Returns the factor by which o must be scaled.
static inline float lctx_few_softmax(float * s, int n, float & m, float & l) {
    const int n_pad = (n + LCTX_VL - 1) / LCTX_VL * LCTX_VL;
    std::fill(s + n, s + n_pad, -INFINITY);
    lctx_vf top = lctx_vset(m);
    for (int i = 0; i < n_pad; i += LCTX_VL) {
        top = lctx_vmax(top, lctx_vload(s + i));
    }
    const float m_new = lctx_vtop(top);
    const float base = m_new == -INFINITY ? 0.0f : m_new;
    lctx_vf sum = lctx_vf{};
    for (int i = 0; i < n_pad; i += LCTX_VL) {
        const lctx_vf p = lctx_vexp(lctx_vload(s + i) - base);
        lctx_vstore(s + i, p);
        sum += p;
    }
    const float factor = m == m_new ? 1.0f : lctx_vexp(lctx_vset(m - base))[0];
    m = m_new;
    l = l * factor + lctx_vsum(sum);
    return factor;
}
