// A chunk of rows for the columns of a prompt that chose it: few rows, columns from anywhere in the tile.
//
// Scores are [column][row]: rows fill the lanes, so keys are transposed once for all columns, and queries stay where they are. The
// result of a column does not depend on which other columns read the chunk.
#pragma once

#include "walk.h"

constexpr int LCTX_SPARSE_ROWS = 16;                           // at a time
constexpr int LCTX_SPARSE_COLUMNS = LCTX_VL == 16 ? 8 : 4;     // at a time: their sums fill half of the registers
constexpr int LCTX_SPARSE_LANES = LCTX_SPARSE_ROWS / LCTX_VL;  // vectors of the scores of a column

// Whether columns of chunks are read so: the queries were turned before, and rows are whole vectors of a page.
static inline bool lctx_is_sparse(const lctx_attend_args & a, const lctx_tile & tile) {
    return lctx_turned::pays(a) && (tile.n_column > LCTX_FEW_COLUMNS || a.params.fixed) && a.params.softcap == 0.0f && !a.cache.held.data &&
           a.head_dim_k % LCTX_VL == 0 && a.head_dim_v % LCTX_VL == 0;
}

struct lctx_sparse_scratch {
    float *rows, *keys, *values;  // [ROWS][head_dim_k], [head_dim_k][ROWS], [ROWS][dim_v]
    float * weights;              // [COLUMNS][ROWS]

    static size_t n_float(int dim_k, int dim_v) { return LCTX_SPARSE_ROWS * (2 * (size_t)dim_k + dim_v + LCTX_SPARSE_COLUMNS); }
    lctx_sparse_scratch(float * p, int dim_k, int dim_v)
        : rows(p),
          keys(rows + LCTX_SPARSE_ROWS * dim_k),
          values(keys + LCTX_SPARSE_ROWS * dim_k),
          weights(values + LCTX_SPARSE_ROWS * dim_v) {}
};

// to[channel][row] of ROWS rows [row][dim].
static inline void lctx_transpose_rows(const float * rows, int dim, float * to) {
    for (int first = 0; first < LCTX_SPARSE_ROWS; first += LCTX_VL) {
        for (int d = 0; d < dim; d += LCTX_VL) {
            lctx_vf v[LCTX_VL];
            for (int i = 0; i < LCTX_VL; i++) {
                v[i] = lctx_vload(rows + (first + i) * dim + d);
            }
            lctx_vtranspose(v);
            for (int i = 0; i < LCTX_VL; i++) {
                lctx_vstore(to + (d + i) * LCTX_SPARSE_ROWS + first, v[i]);
            }
        }
    }
}

// Scores of N columns.
template <int N>
static LCTX_KERNEL void lctx_sparse_scores(const float * const * q, int dim, const float * keys, lctx_vf (&s)[N][LCTX_SPARSE_LANES]) {
    for (int c = 0; c < N; c++) {
        for (int j = 0; j < LCTX_SPARSE_LANES; j++) {
            s[c][j] = lctx_vf{};
        }
    }
#pragma GCC unroll 4
    for (int d = 0; d < dim; d++) {
        lctx_vf k[LCTX_SPARSE_LANES];
        for (int j = 0; j < LCTX_SPARSE_LANES; j++) {
            k[j] = lctx_vload(keys + d * LCTX_SPARSE_ROWS + j * LCTX_VL);
        }
        for (int c = 0; c < N; c++) {
            for (int j = 0; j < LCTX_SPARSE_LANES; j++) {
                s[c][j] += q[c][d] * k[j];
            }
        }
    }
}

// The online softmax of one column: its weights, and its state up to the values.
static inline void lctx_sparse_softmax(lctx_vf (&s)[LCTX_SPARSE_LANES], float & m, float & l, float * o, int dim_v, float * weights) {
    lctx_vf top = s[0];
    for (int j = 1; j < LCTX_SPARSE_LANES; j++) {
        top = lctx_vmax(top, s[j]);
    }
    const float most = std::max(m, lctx_vtop(top));
    if (most > m) {
        const float factor = lctx_vexp(lctx_vset(m - most))[0];
        lctx_rescale(o, factor, dim_v);
        m = most, l *= factor;
    }
    lctx_vf sum = {};
    for (int j = 0; j < LCTX_SPARSE_LANES; j++) {
        const lctx_vf p = lctx_vexp(s[j] - most);
        lctx_vstore(weights + j * LCTX_VL, p);
        sum += p;
    }
    l += lctx_vsum(sum);
}

template <int N> static inline void lctx_sparse_columns(const lctx_attend_args & a, const float * const * q, const int * column,
                                                        const lctx_states & st, const lctx_sparse_scratch & w) {
    lctx_vf s[N][LCTX_SPARSE_LANES];
    float * out[N];
    lctx_sparse_scores<N>(q, a.head_dim_k, w.keys, s);
    for (int c = 0; c < N; c++) {
        out[c] = st.out(column[c]);
        lctx_sparse_softmax(s[c], st.m[column[c]], st.l[column[c]], out[c], st.dim_v, w.weights + c * LCTX_SPARSE_ROWS);
    }
    lctx_gemm(N, st.dim_v, LCTX_SPARSE_ROWS, (const float *)w.weights, LCTX_SPARSE_ROWS, 1, (const float *)w.values, st.dim_v,
              lctx_rows_anywhere{out}, true);
}

// Blocks [first, end) of the chunk of an item, ROWS rows at a time, for its readers.
static LCTX_ALONE void lctx_attend_sparse(const lctx_attend_args & a, const lctx_tile & tile, const lctx_item & item, int first, int end,
                                          const lctx_turned & turned, const lctx_states & st, const lctx_sparse_scratch & w) {
    constexpr int N = LCTX_SPARSE_COLUMNS;
    const int last_cell = item.block_hi(item.first_block() + end - 1);
    for (int cell = item.block_lo(item.first_block() + first); cell < last_cell; cell += LCTX_SPARSE_ROWS) {
        const char *k = lctx_key_row(a.cache, cell, item.head_kv, item.seq), *v = lctx_value_row(a.cache, cell, item.head_kv, item.seq);
        lctx_unpack_rows(a.cache.k_pool.type, k, a.cache.k_pool.row_size, LCTX_SPARSE_ROWS, a.head_dim_k, w.rows, a.head_dim_k);
        lctx_unpack_rows(a.cache.v_pool.type, v, a.cache.v_pool.row_size, LCTX_SPARSE_ROWS, a.head_dim_v, w.values, st.dim_v);
        lctx_transpose_rows(w.rows, a.head_dim_k, w.keys);
        int i = 0;
        const auto some = [&](auto n) {
            const float * q[n];
            int column[n];
            for (int c = 0; c < n; c++) {
                const lctx_reader & reader = item.readers[i + c];
                column[c] = reader.column, q[c] = turned.of(reader, tile);
            }
            lctx_sparse_columns<n>(a, q, column, st, w);
            i += n;
        };
        while (i + N <= item.n) {
            some(std::integral_constant<int, N>{});
        }
        while (i < item.n) {
            some(std::integral_constant<int, 1>{});
        }
    }
}
