// One block of cells for the columns of *attend*: scores, online softmax, o += p v.
#pragma once

#include "few-integers.h"
#include "pairs.h"

// Softmax states of columns; o is not divided by l yet.
struct lctx_states {
    float *m, *l, *o;             // [n_pad], [n_pad], [n_pad][dim_v]
    int dim_v;                    // padded to vector width
    float ** anywhere = nullptr;  // where the rows of o are instead

    static size_t n_float(int n_pad, int dim_v) { return (size_t)n_pad * (2 + dim_v); }
    lctx_states(float * base, int n_pad, int dim_v) : m(base), l(m + n_pad), o(l + n_pad), dim_v(dim_v) {}
    // Of states whose rows are elsewhere.
    lctx_states(float * base, float ** rows, int n_pad, int dim_v)
        : m(base), l(m + n_pad), o(nullptr), dim_v(dim_v), anywhere(rows) {}
    float * out(int column) const { return anywhere ? anywhere[column] : o + (size_t)column * dim_v; }
    template <typename F> auto with_rows(F && f) const {
        return anywhere ? f(lctx_rows_anywhere{anywhere}) : f(lctx_rows_in_order{o, dim_v});
    }
    void clear(int n) const {
        std::fill_n(m, n, -INFINITY);
        std::fill_n(l, n, 0.0f);
        std::fill_n(o, (size_t)n * dim_v, 0.0f);
    }
    void merge(int column, const lctx_states & partial) const {
        lctx_softmax_merge(m[column], l[column], out(column), partial.m[column], partial.l[column], partial.out(column),
                           dim_v);
    }
};

// Scratch of a thread for one block.
struct lctx_block_scratch {
    float * s;        // [BLOCK][n_pad]
    float * v;        // [BLOCK][dim_v], or two scales for each group of a key
    float * factor;   // [n_pad]
    float * queries;  // lctx_columns
    float * k;        // [BLOCK][head_dim_k]
    float * rotated;  // [head_dim_k]

    static int n_value(int dim_k, int dim_v) { return std::max(dim_v, 2 * dim_k / 32); }
    static size_t n_float(int n_pad, int dim_k, int dim_v) {
        return (size_t)LCTX_BLOCK * (std::max(n_pad, LCTX_FEW_COLUMNS) + n_value(dim_k, dim_v) + dim_k) + n_pad +
               lctx_columns::n_float(n_pad, dim_k) + dim_k;
    }
    lctx_block_scratch(float * p, int n_pad, int dim_k, int dim_v) {
        s = p, p += (size_t)LCTX_BLOCK * std::max(n_pad, LCTX_FEW_COLUMNS);
        v = p, p += (size_t)LCTX_BLOCK * n_value(dim_k, dim_v);
        queries = p, p += lctx_columns::n_float(n_pad, dim_k);
        k = p, p += (size_t)LCTX_BLOCK * dim_k;
        factor = p, p += n_pad;
        rotated = p;
    }
};

// n cells of one page, of one head of a sequence.
struct lctx_block {
    int32_t cell, n, head, seq;
    bool near;     // keys from the near ring
    int32_t next;  // cell that is read after these, -1: none
};

// Return whether n columns take less time as rows than as a matrix, whose keys are unpacked and whose columns are
// padded and transposed. Measured in docs/research/kernels.md. Floats: 5 columns of fixed time for a matrix, and 0.6
// (AVX-512) or 0.8 for each of its columns.
static inline bool lctx_as_rows(const lctx_attend_args & a, int n, bool is_chunk) {
    const bool k_rounded = lctx_has_8_bits(a.cache.k_pool.type), v_rounded = lctx_has_8_bits(a.cache.v_pool.type);
    if (a.params.fixed || k_rounded != v_rounded || a.head_dim_v % LCTX_VL != 0) {
        return n <= LCTX_FEW_COLUMNS;
    }
    if (k_rounded) {
        return n <= (LCTX_HAS_PAIRS && !is_chunk ? 4 : LCTX_FEW_COLUMNS);
    }
    return 5 * n < 25 + (LCTX_VL == 16 ? 3 : 4) * lctx_round_up(n, LCTX_VL);
}

// The rows of the next block, for a product that reads these; nullptr where there are none.
static inline void lctx_set_next(const lctx_attend_args & a, const lctx_block & b, lctx_stored & k, lctx_stored & v) {
    if (b.next >= 0) {
        v.next = lctx_value_row(a.cache, b.next, b.head, b.seq);
        k.next = b.near ? nullptr : lctx_key_row(a.cache, b.next, b.head, b.seq);
    }
}

template <typename Mask> static inline void lctx_attend_few(const lctx_attend_args & a, const lctx_columns & columns,
                                                            const lctx_stored & k, const lctx_stored & v, int n,
                                                            const lctx_states & st, const lctx_block_scratch & w,
                                                            Mask && mask) {
    if (!lctx_few_in_integers(a, columns) || !lctx_few_integer_scores(columns, k, n, w.s)) {
        lctx_few_scores(lctx_readable(k, n, a.head_dim_k, w.k), n, columns.q, columns.n, a.head_dim_k, w.s,
                        columns.fixed);
    }
    lctx_softcap(w.s, (size_t)columns.n * LCTX_BLOCK, a.params.softcap);
    mask(w.s, 1, LCTX_BLOCK);
    for (int c = 0; c < columns.n; c++) {
        const float factor = lctx_few_softmax(w.s + (size_t)c * LCTX_BLOCK, n, st.m[c], st.l[c]);
        if (factor != 1.0f) {
            lctx_rescale(st.out(c), factor, st.dim_v);
        }
    }
    const lctx_stored readable = lctx_readable(v, n, a.head_dim_v, w.v);
    st.with_rows([&](auto rows) { lctx_few_weigh(readable, n, w.s, columns.n, a.head_dim_v, rows); });
}

// The queries in the form in which their scores are computed.
static inline void lctx_round_for_scores(const lctx_attend_args & a, const lctx_columns & columns) {
    if (lctx_few_in_integers(a, columns)) {
        return lctx_round_few(columns);
    }
#if LCTX_HAS_KEY_INTEGERS
    if (lctx_in_integers(a, columns)) {
        return lctx_round_queries(columns);
    }
#endif
#if LCTX_HAS_PAIRS
    if (lctx_in_pairs(a, columns)) {
        lctx_pair_rows(columns.q, a.head_dim_k, columns.n_pad);
    }
#endif
}

// s = k q, [key][column]. The next rows are prefetched at the same time.
static inline void lctx_block_scores(const lctx_attend_args & a, const lctx_columns & columns, const lctx_stored & k,
                                     const lctx_stored & v, int n, const lctx_block_scratch & w) {
    const auto prefetch = [&](int row, int n_row) {
        lctx_prefetch_rows(k, row, n_row);
        lctx_prefetch_rows(v, row, n_row);
    };
#if LCTX_HAS_KEY_INTEGERS
    if (lctx_in_integers(a, columns)) {
        return lctx_integer_scores(columns, k, n, (lctx_key_integer *)w.k, w.v, w.s, prefetch);
    }
#endif
    const auto by_steps = [&](auto && product) {
        constexpr int STEP = LCTX_VL == 16 ? 8 : 12;  // rows of a few register tiles
        for (int i = 0; i < n; i += STEP) {
            const int m = std::min(STEP, n - i);
            product(i, m);
            prefetch(i, m);
        }
    };
    const int n_pad = columns.n_pad;
    int64_t step;
#if LCTX_HAS_PAIRS
    if (lctx_in_pairs(a, columns)) {
        const lctx_pair *keys = lctx_pair_keys(k, n, a.head_dim_k, w.k, &step), *q = (const lctx_pair *)columns.q;
        return by_steps([&](int i, int m) {
            lctx_gemm(m, n_pad, a.head_dim_k / 2, keys + i * step, step, 1, q, n_pad, w.s + i * n_pad, n_pad, false);
        });
    }
#endif
    const float * keys = lctx_unpack(k, n, a.head_dim_k, w.k, &step, a.head_dim_k);
    by_steps([&](int i, int m) { lctx_scores(columns, keys + i * step, step, m, w.s + i * n_pad, false); });
}

// o += p v
static inline void lctx_block_weigh(const lctx_attend_args & a, const lctx_columns & columns, const lctx_stored & rows,
                                    int n, const lctx_states & st, const lctx_block_scratch & w) {
#if LCTX_HAS_PAIRS
    if (lctx_in_pairs(a, columns)) {
        const lctx_pair *p = lctx_pair_rows(w.s, n, columns.n_pad), *v = lctx_pair_values(rows, n, a.head_dim_v, w.v);
        return st.with_rows([&](auto to) {
            lctx_gemm(columns.n, st.dim_v, (n + 1) / 2, p, 1, columns.n_pad, v, a.head_dim_v, to, true);
        });
    }
#endif
    int64_t step;
    const float * v = lctx_unpack(rows, n, a.head_dim_v, w.v, &step, st.dim_v);
    st.with_rows(
        [&](auto to) { lctx_gemm(columns.n, st.dim_v, n, (const float *)w.s, 1, columns.n_pad, v, step, to, true); });
}

// Rows of K and V for the columns. mask(s, step from row to row, step from column to column) takes away the scores of
// what a column does not read.
template <typename Mask> static inline void lctx_attend_rows(const lctx_attend_args & a, const lctx_columns & columns,
                                                             const lctx_stored & k, const lctx_stored & v, int n,
                                                             const lctx_states & st, const lctx_block_scratch & w,
                                                             Mask && mask) {
    if (columns.few() && a.head_dim_v % LCTX_VL == 0) {
        return lctx_attend_few(a, columns, k, v, n, st, w, mask);
    }
    lctx_block_scores(a, columns, k, v, n, w);
    lctx_softcap(w.s, (size_t)n * columns.n_pad, a.params.softcap);
    mask(w.s, columns.n_pad, 1);
    if (lctx_softmax_block(w.s, n, columns.n_pad, st.m, st.l, w.factor)) {
        for (int c = 0; c < columns.n; c++) {
            lctx_rescale(st.out(c), w.factor[c], st.dim_v);
        }
    }
    lctx_block_weigh(a, columns, v, n, st, w);
}

template <typename Mask> static inline void lctx_attend_block(const lctx_attend_args & a, const lctx_columns & columns,
                                                              const lctx_cells & cells, const lctx_block & b,
                                                              const lctx_states & st, const lctx_block_scratch & w,
                                                              Mask && mask) {
    lctx_stored k = lctx_stored_keys(a.cache, cells, b.near, b.cell, b.n, b.head, b.seq, a.head_dim_k, w.k);
    lctx_stored v = lctx_stored_values(a.cache, b.cell, b.head, b.seq);
    lctx_set_next(a, b, k, v);
    lctx_attend_rows(a, columns, k, v, b.n, st, w, mask);
}
