// Shared by the kernels with which *select* scores chunks at the angles of their base: columns of queries, and what
// they are compared with.
//
// ../ops/summaries.h says what a score is.
#pragma once

#include "../ops/ranges.h"
#include "columns.h"
#include "few.h"
#include "index.h"
#include "rank.h"

// Tokens [first, first + n_token) of one sequence, and one list of keys or summaries. A column is a token and one of
// the heads from head0 on; with step > 1 it is one of every step tokens, another one for each head of the KV head.
struct lctx_select_tile {
    int32_t first, n_token;
    int list, head0, n_head;
    int step = 1, before = 0;  // heads of the KV head before head0

    int n_column() const { return n_token / step * n_head; }
    int32_t token(int column) const {
        const int skew = (before + column % n_head) % step;
        return first + (step - skew) % step + column / n_head * step;
    }
    int head(int column) const { return head0 + column % n_head; }
};

// Return the chunks that any token of the tile scores at the angle of a slot.
static inline lctx_chunk_range lctx_scored(const lctx_select_args & a, const lctx_select_tile & t, int slot) {
    lctx_chunk_range all;
    for (int32_t i = 0; i < t.n_token; i++) {
        all = all.with({a, t.first + i, slot});
    }
    return all;
}

// Says where the score of a chunk and a column lies. Few columns stand one after the other, so that a choice reads its
// own scores alone; more of them stand side by side, as products give them.
struct lctx_score_steps {
    int64_t of_chunk, of_column;

    lctx_score_steps(const lctx_select_args & a, int n_column) {
        const bool few = n_column <= LCTX_FEW_COLUMNS && (a.chunks.by_keys() || a.head_dim % LCTX_VL == 0);
        of_chunk = few ? 1 : lctx_round_up(n_column, LCTX_VL);
        of_column = few ? room(a) : 1;
    }
    bool few() const { return of_chunk == 1; }
    // Room for the chunks of a column, and for what a vector writes after the last.
    static int64_t room(const lctx_select_args & a) { return lctx_round_up(a.n_chunk_max, LCTX_VL) + LCTX_VL; }
    // Floats for the scores of n_column columns.
    static size_t n_float(const lctx_select_args & a, int n_column) {
        return (size_t)room(a) * (n_column <= LCTX_FEW_COLUMNS ? LCTX_FEW_COLUMNS : lctx_round_up(n_column, LCTX_VL));
    }
};

struct lctx_select_scratch {
    static constexpr int GROUP = lctx_index_shape::GROUP;

    float * s;         // lctx_score_steps::n_float of MAX_COLUMNS
    float * turned;    // [LCTX_VL][lctx_n_key(n_chunk_max)] scores of columns that stood side by side
    float * sum;       // [lctx_n_key(n_chunk_max)] of heads that choose together
    uint32_t * keys;   // [lctx_n_key(n_chunk_max)]
    float * queries;   // lctx_columns of up to query_dim; or bytes of queries: [n_channel][MAX_COLUMNS] with their
                       // starts and scales
    float * narrow;    // lctx_columns of what meets outliers
    float * wide;      // [query_dim]
    float * rotated;   // [head_dim]
    float * k;         // [BLOCK][query_dim] summaries; or words of a group
    float * few;       // [FEW_COLUMNS][BLOCK] scores of few columns
    float * many;      // [2][BLOCK][MAX_COLUMNS] scores of the others and of outliers; or of the rows of a group
    int32_t * chosen;  // [n_free or n_shared]

    static int n_chunk_max(const lctx_select_args & a) { return a.n_chunk_max + 1; }
    static size_t n_queries(const lctx_select_args & a) {
        const size_t bytes = a.chunks.by_keys() ? (size_t)(a.index.n_channel() / 4 + 2) * LCTX_MAX_COLUMNS * 2 : 0;
        return std::max(bytes, lctx_columns::n_float(LCTX_MAX_COLUMNS, LCTX_MOST_SUM * a.head_dim));
    }
    static size_t n_keys(const lctx_select_args & a) {
        return std::max<size_t>((size_t)LCTX_MOST_SUM * a.head_dim * LCTX_BLOCK,
                                a.chunks.by_keys() ? GROUP * a.index.n_channel() / 4 : 0);
    }
    static size_t size(const lctx_select_args & a) {
        const size_t n = lctx_score_steps::n_float(a, LCTX_MAX_COLUMNS) +
                         (2 + LCTX_VL) * (size_t)lctx_n_key(n_chunk_max(a)) + n_queries(a) +
                         lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim) +
                         (size_t)(LCTX_MOST_SUM + 1) * a.head_dim + n_keys(a) +
                         (LCTX_FEW_COLUMNS + 2 * LCTX_MAX_COLUMNS) * LCTX_BLOCK +
                         (size_t)std::max(a.chunks.n_free, a.chunks.n_shared);
        return GGML_PAD(n * sizeof(float), LCTX_CACHE_LINE);
    }
    lctx_select_scratch(char * base, const lctx_select_args & a) {
        float * p = (float *)base;
        s = p, p += lctx_score_steps::n_float(a, LCTX_MAX_COLUMNS);
        turned = p, p += (size_t)LCTX_VL * lctx_n_key(n_chunk_max(a));
        sum = p, p += lctx_n_key(n_chunk_max(a));
        keys = (uint32_t *)p, p += lctx_n_key(n_chunk_max(a));
        queries = p, p += n_queries(a);
        narrow = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim);
        wide = p, p += LCTX_MOST_SUM * a.head_dim;
        rotated = p, p += a.head_dim;
        k = p, p += n_keys(a);
        few = p, p += LCTX_FEW_COLUMNS * LCTX_BLOCK;
        many = p, p += 2 * LCTX_BLOCK * LCTX_MAX_COLUMNS;
        chosen = (int32_t *)p;
    }
};

// ---- queries ----

// The query of a column, seen from the angle of a segment; by attention as the model made it (the authors' code). to:
// [head_dim].
static inline void lctx_column_query(const lctx_select_args & a, const lctx_select_tile & t, int column, int segment,
                                     float * to) {
    const int32_t token = t.token(column);
    const float * q = (const float *)(a.q + t.head(column) * a.q_head_stride + token * a.q_token_stride);
    if (a.chunks.by_attention()) {
        memcpy(to, q, a.head_dim * sizeof(float));
    } else {
        const float * cs = a.angles + (size_t)a.segs[(size_t)token * a.chunks.n_given() + segment].angle * a.n_dims;
        lctx_rotate_row(q, to, a.head_dim, cs, a.n_dims, a.rope_mode);
    }
}

// A query as it meets all vectors of a summary but an outlier.
static inline void lctx_wide_query(const lctx_select_args & a, const float * q, float * wide) {
    const int dim = a.head_dim, n_sum = a.chunks.summary().n_sum();
    for (int vector = 0; vector < n_sum; vector++) {
        for (int d = 0; d < dim; d++) {
            wide[vector * dim + d] = lctx_meet(a.chunks.representation, vector, q[d], a.scale);
        }
    }
}

// ---- summaries ----

// The queries of the columns, as they meet summaries; narrow: and outliers.
struct lctx_query_columns {
    lctx_columns columns, narrow;
    lctx_score_steps step;
    const lctx_select_args & a;
    const lctx_select_scratch & w;

    lctx_query_columns(const lctx_select_args & a, const lctx_select_tile & t, int slot, const lctx_select_scratch & w)
        : columns(w.queries, t.n_column(), a.chunks.query_dim(a.head_dim)),
          narrow(w.narrow, t.n_column(), a.head_dim),
          step(a, t.n_column()),
          a(a),
          w(w) {
        columns.clear();
        if (a.chunks.summary().has_outlier) {
            narrow.clear();
        }
        for (int c = 0; c < columns.n; c++) {
            set(t, c, slot);
        }
    }

  private:
    void set(const lctx_select_tile & t, int c, int slot) const {
        lctx_column_query(a, t, c, a.chunks.n_run + slot, w.rotated);
        lctx_wide_query(a, w.rotated, w.wide);
        columns.set(c, w.wide, 1.0f);
        if (a.chunks.summary().has_outlier) {
            narrow.set(c, w.rotated, a.scale);
        }
    }
};

// n summaries, or vectors of them; next: what is read after them, or NULL.
struct lctx_summary_block {
    ggml_type type;
    const char *first, *next;
    size_t stride;
    int n;
};

// few[column][chunk] = summary . query
static inline void lctx_few_products(const lctx_columns & columns, const lctx_summary_block & b, float * few,
                                     const lctx_select_scratch & w) {
    const lctx_stored rows = {b.type, b.stride, b.first, b.next};
    lctx_few_scores(lctx_readable(rows, b.n, columns.dim, w.k), b.n, columns.q, columns.n, columns.dim, few);
}

// s = summary . query, [chunk][column]
static inline void lctx_many_products(const lctx_columns & columns, const lctx_summary_block & b, float * s,
                                      const lctx_select_scratch & w) {
    lctx_unpack_rows(b.type, b.first, b.stride, b.n, columns.dim, w.k, columns.dim);
    lctx_scores(columns, w.k, columns.dim, b.n, s, false);
}

// others = log(n_other * exp(others) + exp(outlier)), n values, a multiple of LCTX_VL.
static inline void lctx_add_outliers(float * others, const float * outlier, int n, float n_other) {
    const lctx_vf log_n = lctx_vset(logf(n_other));
    for (int i = 0; i < n; i += LCTX_VL) {
        lctx_vstore(others + i, lctx_vlog_sum(lctx_vload(others + i) + log_n, lctx_vload(outlier + i)));
    }
}

// Scores of a block of summaries: rows [column][BLOCK] where there are few columns, else [chunk][n_pad]; in w.many.
static inline const float * lctx_summary_scores(const lctx_query_columns & q, const lctx_summary_block & b) {
    const lctx_columns & columns = q.columns;
    float *others = q.w.many, *outlier = q.w.many + LCTX_BLOCK * LCTX_MAX_COLUMNS;
    const bool few = q.step.few();
    const auto product = [&](const lctx_columns & c, const lctx_summary_block & block, float * to) {
        few ? lctx_few_products(c, block, to, q.w) : lctx_many_products(c, block, to, q.w);
    };
    product(columns, b, others);
    if (q.a.chunks.summary().has_outlier) {
        product(q.narrow, {b.type, b.first + ggml_row_size(b.type, columns.dim), nullptr, b.stride, b.n}, outlier);
        for (int c = 0; few && c < columns.n; c++) {
            lctx_add_outliers(others + c * LCTX_BLOCK, outlier + c * LCTX_BLOCK, lctx_round_up(b.n, LCTX_VL),
                              q.a.chunks.n_other());
        }
        if (!few) {
            lctx_add_outliers(others, outlier, b.n * columns.n_pad, q.a.chunks.n_other());
        }
    }
    return others;
}

// f(first chunk, n, scores) for the chunks of r.
template <typename F> static inline void lctx_each_summary_block(const lctx_select_args & a, const lctx_select_tile & t,
                                                                 int slot, const lctx_chunk_range & r,
                                                                 const lctx_select_scratch & w, F && f) {
    const lctx_query_columns q(a, t, slot, w);
    const char * summaries = a.summaries + t.list * a.summary_head_stride + a.rows[t.first].seq * a.summary_seq_stride;
    const auto at = [&](int chunk) { return summaries + chunk * a.summary_stride; };
    for (int i = r.first; i < r.end; i += LCTX_BLOCK) {
        const int n = std::min(LCTX_BLOCK, r.end - i), after = i + n;
        f(i, n,
          lctx_summary_scores(q, {a.summary_type, at(i), after < r.end ? at(after) : nullptr, a.summary_stride, n}));
    }
}
