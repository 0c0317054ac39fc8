// How *select* scores chunks: products of summaries with what is made of a query.
//
// minmax: sum over channels of max(q, 0) * maximum + min(q, 0) * minimum, an upper bound of the best key's. moments: the log of the
// chunk's expected mass, were its keys normally distributed: scale * q . mean + scale^2/2 * q^2 . variance. Both have twice the width of
// a query. outlier: the same for all keys but the one that is farthest from the mean, and this one by itself:
// log(exp(scale * q . outlier) + (l - 1) exp(score of the others' moments)).
#pragma once

#include "../ops/args.h"
#include "columns.h"
#include "few.h"
#include "rank.h"

static inline int lctx_heads_per_choice(const lctx_select_args & a) {
    return a.n_head / a.n_choice;
}

// How many choices compare their queries with the same summaries: they are made together.
static inline int lctx_choices_per_tile(const lctx_select_args & a) {
    return a.n_choice > a.n_summary ? a.n_choice / a.n_summary : 1;
}

// Columns of scores that one choice takes: with mass one per head, whose shares are added up afterwards.
static inline int lctx_columns_per_choice(const lctx_select_args & a) {
    return a.chunks.mass > 0.0f ? lctx_heads_per_choice(a) : 1;
}

// Where the score of a chunk and a column lies: chunk * of_chunk + column * of_column.
struct lctx_score_steps {
    int of_chunk, of_column;
};

// Few columns one after the other, so that a choice reads its own scores alone; more of them side by side, as products give them.
static inline lctx_score_steps lctx_steps_of(const lctx_select_args & a, int n_column) {
    if (n_column <= LCTX_FEW_COLUMNS && a.head_dim % LCTX_VL == 0 && a.chunks.mass == 0.0f) {
        return {1, lctx_round_up(a.n_chunk_max, LCTX_VL)};
    }
    return {lctx_round_up(n_column, LCTX_VL), 1};
}

// Room for the scores of so many columns.
static inline size_t lctx_n_score(const lctx_select_args & a, int n_column) {
    const lctx_score_steps step = lctx_steps_of(a, n_column);
    return step.of_chunk == 1 ? (size_t)n_column * step.of_column : (size_t)a.n_chunk_max * step.of_chunk;
}

struct lctx_select_scratch {
    float * s;         // lctx_n_score of at most MAX_COLUMNS
    float * turned;    // [LCTX_VL][lctx_n_key(n_chunk_max)] scores of columns that stood side by side
    uint32_t * keys;   // [lctx_n_key(n_chunk_max)]
    float * queries;   // lctx_columns
    float * narrow;    // lctx_columns of what meets outliers
    float * wide;      // [query_dim]
    float * k;         // [BLOCK][query_dim] summaries
    float * few;       // [FEW_COLUMNS][BLOCK] scores of few columns
    float * parts;     // [2][BLOCK][MAX_COLUMNS] scores of the others and of outliers
    int32_t * best;    // [n_chunk] the best candidates, ascending
    int32_t * order;   // [n_chunk] and the best first
    int32_t * chosen;  // [n_chunk]
    char * taken;      // [n_chunk_max]

    static int n_chunk_max(const lctx_select_args & a) { return a.n_chunk_max + 1; }
    static size_t size(const lctx_select_args & a) {
        const int query_dim = a.chunks.query_dim(a.head_dim);
        const size_t n = (size_t)n_chunk_max(a) * LCTX_MAX_COLUMNS + (1 + LCTX_VL) * lctx_n_key(n_chunk_max(a)) +
                         lctx_columns::n_float(LCTX_MAX_COLUMNS, query_dim) + lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim) +
                         (size_t)query_dim * (LCTX_BLOCK + 1) + (LCTX_FEW_COLUMNS + 2 * LCTX_MAX_COLUMNS) * LCTX_BLOCK +
                         (size_t)a.chunks.n_chunk * 3;
        return GGML_PAD(n * sizeof(float) + n_chunk_max(a), LCTX_CACHE_LINE);
    }
    lctx_select_scratch(char * base, const lctx_select_args & a) {
        const int query_dim = a.chunks.query_dim(a.head_dim);
        float * p = (float *)base;
        s = p, p += (size_t)n_chunk_max(a) * LCTX_MAX_COLUMNS;
        turned = p, p += (size_t)LCTX_VL * lctx_n_key(n_chunk_max(a));
        keys = (uint32_t *)p, p += lctx_n_key(n_chunk_max(a));
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, query_dim);
        narrow = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim);
        wide = p, p += query_dim;
        k = p, p += (size_t)query_dim * LCTX_BLOCK;
        few = p, p += LCTX_FEW_COLUMNS * LCTX_BLOCK;
        parts = p, p += 2 * LCTX_BLOCK * LCTX_MAX_COLUMNS;
        best = (int32_t *)p, p += a.chunks.n_chunk;
        order = (int32_t *)p, p += a.chunks.n_chunk;
        chosen = (int32_t *)p, p += a.chunks.n_chunk;
        taken = (char *)p;
    }
};

// Tokens [first, first + n_token) of one sequence, and the choices [choice, choice + n_choice) that are made for each of them. Column i is
// token i / n_choice and choice i % n_choice.
struct lctx_select_tile {
    int32_t first, n_token;
    int choice, n_choice;

    int n_column() const { return n_token * n_choice; }
    int32_t token_of(int column) const { return first + column / n_choice; }
    int choice_of(int column) const { return choice + column % n_choice; }
};

static inline int32_t lctx_own_chunk(const lctx_select_args & a, int32_t token) {
    return a.rows[token].row / a.chunks.chunk_size;
}

static inline const float * lctx_query_of(const lctx_select_args & a, int32_t token, int head) {
    return (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
}

// What a query makes of itself to meet two values of every channel at once; scores of several heads with the same summary add up.
static inline void lctx_add_query(const lctx_select_args & a, const float * q, float * wide) {
    const int dim = a.head_dim;
    const bool minmax = a.chunks.representation == LCTX_REPRESENT_MINMAX;
    for (int d = 0; d < dim; d++) {
        wide[d] += minmax ? std::max(q[d], 0.0f) : a.scale * q[d];
        wide[dim + d] += minmax ? std::min(q[d], 0.0f) : q[d] * q[d];
    }
}

// The queries of some columns, as they meet summaries; narrow: and outliers.
struct lctx_query_columns {
    lctx_columns columns, narrow;
    lctx_score_steps step;
    const lctx_select_args & a;
    const lctx_select_scratch & w;

    lctx_query_columns(const lctx_select_args & a, int n, const lctx_select_scratch & w)
        : columns(w.queries, n, a.chunks.query_dim(a.head_dim)), narrow(w.narrow, n, a.head_dim), step(lctx_steps_of(a, n)), a(a), w(w) {}
    void clear() const {
        columns.clear();
        if (a.chunks.has_outlier()) {
            narrow.clear();
        }
    }
    // Column c: heads [head, head + n) of a token; n is 1 by attention and with outliers.
    void set(int c, int32_t token, int head, int n) const {
        if (a.chunks.by_attention()) {
            return columns.set(c, lctx_query_of(a, token, head), 1.0f);
        }
        std::fill_n(w.wide, 2 * a.head_dim, 0.0f);
        for (int h = head; h < head + n; h++) {
            lctx_add_query(a, lctx_query_of(a, token, h), w.wide);
        }
        columns.set(c, w.wide, 1.0f);
        if (a.chunks.has_outlier()) {
            narrow.set(c, lctx_query_of(a, token, head), a.scale);
        }
    }
};

// n summaries, or parts of them; next: what is read after them, or NULL.
struct lctx_summary_block {
    ggml_type type;
    const char *first, *next;
    size_t stride;
    int n;
};

// s (+)= few, [column][chunk]
static inline void lctx_put_few(const lctx_columns & columns, const lctx_score_steps & step, int n, const float * few, float * s,
                                bool add) {
    for (int c = 0; c < columns.n && step.of_chunk == 1; c++) {
        float * to = s + (size_t)c * step.of_column;
        for (int x = 0; x < n; x += LCTX_VL) {  // of a whole vector: a column ends with one
            lctx_vstore(to + x, (add ? lctx_vload(to + x) : lctx_vf{}) + lctx_vload(few + c * LCTX_BLOCK + x));
        }
    }
    for (int x = 0; x < n && step.of_chunk != 1; x++) {
        for (int c = 0; c < columns.n_pad; c++) {
            float & to = s[(size_t)x * columns.n_pad + c];
            to = (add ? to : 0.0f) + (c < columns.n ? few[c * LCTX_BLOCK + x] : 0.0f);
        }
    }
}

// few[column][chunk] = summary . query
static inline void lctx_few_products(const lctx_columns & columns, const lctx_summary_block & b, float * few,
                                     const lctx_select_scratch & w) {
    const lctx_stored rows = {b.type, b.stride, b.first, b.next};
    lctx_few_scores(lctx_readable(rows, b.n, columns.dim, w.k), b.n, columns.q, columns.n, columns.dim, few);
}

// s (+)= summary . query
static inline void lctx_multiply(const lctx_columns & columns, const lctx_score_steps & step, const lctx_summary_block & b, float * s,
                                 bool add, const lctx_select_scratch & w) {
    if (!columns.few()) {
        lctx_unpack_rows(b.type, b.first, b.stride, b.n, columns.dim, w.k, columns.dim);
        return lctx_scores(columns, w.k, columns.dim, b.n, s, add);
    }
    lctx_few_products(columns, b, w.few, w);
    lctx_put_few(columns, step, b.n, w.few, s, add);
}

// others = log(n_other * exp(others) + exp(outlier)), n values, a multiple of LCTX_VL.
static inline void lctx_add_outliers(float * others, const float * outlier, int n, int n_other) {
    const lctx_vf log_n = lctx_vset(logf(n_other));
    for (int i = 0; i < n; i += LCTX_VL) {
        lctx_vstore(others + i, lctx_vlog_sum(lctx_vload(others + i) + log_n, lctx_vload(outlier + i)));
    }
}

// s (+)= log(n_other * exp(others . query) + exp(outlier . query))
static inline void lctx_multiply_both(const lctx_query_columns & q, const lctx_summary_block & b, float * s, bool add) {
    const lctx_columns & columns = q.columns;
    const lctx_summary_block outliers = {b.type, b.first + ggml_row_size(b.type, columns.dim), nullptr, b.stride, b.n};
    float *others = q.w.parts, *outlier = q.w.parts + LCTX_BLOCK * LCTX_MAX_COLUMNS;
    if (columns.few() && q.narrow.few()) {  // twice a width may be whole vectors where the width is not
        lctx_few_products(columns, b, others, q.w);
        lctx_few_products(q.narrow, outliers, outlier, q.w);
        for (int c = 0; c < columns.n; c++) {
            lctx_add_outliers(others + c * LCTX_BLOCK, outlier + c * LCTX_BLOCK, lctx_round_up(b.n, LCTX_VL), q.a.chunks.n_other());
        }
        return lctx_put_few(columns, q.step, b.n, others, s, add);
    }
    const int n = b.n * columns.n_pad;
    const lctx_score_steps step = {columns.n_pad, 1};
    lctx_multiply(columns, step, b, others, false, q.w);
    lctx_multiply(q.narrow, step, outliers, outlier, false, q.w);
    lctx_add_outliers(others, outlier, n, q.a.chunks.n_other());
    for (int i = 0; i < n; i += LCTX_VL) {
        lctx_vstore(s + i, add ? lctx_vload(s + i) + lctx_vload(others + i) : lctx_vload(others + i));
    }
}

// Chunks [first, end); next: the first one that this thread scores after them, or -1.
struct lctx_chunk_range {
    int first, end, next;
};

// s (+)= scores of some chunks
static inline void lctx_score_chunks(const lctx_query_columns & q, const char * summaries, const lctx_chunk_range & r, bool add,
                                     float * s) {
    const size_t stride = q.a.summary_stride;
    for (int i = r.first; i < r.end; i += LCTX_BLOCK) {
        const int n = std::min(LCTX_BLOCK, r.end - i);
        const char * first = summaries + i * stride;
        const int next = i + n < r.end ? i + n : r.next;
        const lctx_summary_block b = {q.a.summary_type, first, next >= 0 ? summaries + next * stride : nullptr, stride, n};
        float * to = s + (size_t)i * q.step.of_chunk;
        if (q.a.chunks.has_outlier()) {
            lctx_multiply_both(q, b, to, add);
        } else {
            lctx_multiply(q.columns, q.step, b, to, add, q.w);
        }
    }
}

static inline const char * lctx_summaries_of(const lctx_select_args & a, const lctx_select_tile & t, int head) {
    const int32_t seq = a.rows[t.first].seq;
    return a.summaries + head / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
}

// s, summed over the heads that choose together.
static inline void lctx_score_choices(const lctx_select_args & a, const lctx_select_tile & t, const lctx_chunk_range & r, float * s,
                                      const lctx_select_scratch & w) {
    const lctx_query_columns q(a, t.n_column(), w);
    const bool adds_before = !a.chunks.by_attention() && !a.chunks.has_outlier();  // heads with one summary: their queries add up
    const int n_head = lctx_heads_per_choice(a), n_together = adds_before ? n_head : 1;
    for (int head = 0; head < n_head; head += n_together) {
        q.clear();
        for (int c = 0; c < q.columns.n; c++) {
            q.set(c, t.token_of(c), t.choice_of(c) * n_head + head, n_together);
        }
        lctx_score_chunks(q, lctx_summaries_of(a, t, t.choice * n_head + head), r, head > 0, s);
    }
}

// s[chunk][column of every head]: with mass, whose shares are added up afterwards.
static inline void lctx_score_heads(const lctx_select_args & a, const lctx_select_tile & t, const lctx_chunk_range & r, float * s,
                                    const lctx_select_scratch & w) {
    const int n_head = lctx_heads_per_choice(a);
    const lctx_query_columns q(a, t.n_column() * n_head, w);
    q.clear();
    for (int c = 0; c < q.columns.n; c++) {
        q.set(c, t.token_of(c / n_head), t.choice_of(c / n_head) * n_head + c % n_head, 1);
    }
    lctx_score_chunks(q, lctx_summaries_of(a, t, t.choice * n_head), r, false, s);
}

static inline void lctx_score(const lctx_select_args & a, const lctx_select_tile & t, const lctx_chunk_range & r, float * s,
                              const lctx_select_scratch & w) {
    (a.chunks.mass > 0.0f ? lctx_score_heads : lctx_score_choices)(a, t, r, s, w);
}

// For each column the share of each chunk in the attention to chunks before `end` of the column: a softmax down the chunks.
static inline void lctx_to_shares(float * s, int n_chunk, int n_pad, const int32_t * end) {
    for (int c = 0; c < n_pad; c += LCTX_VL) {
        lctx_vi v_end;
        memcpy(&v_end, end + c, sizeof(v_end));
        const auto masked = [&](int i) {  // NaN, a chunk without rows, has no share either
            const lctx_vf x = lctx_vload(s + (size_t)i * n_pad + c);
            return ((i < v_end) & (x == x)) ? x : lctx_vset(-INFINITY);
        };
        lctx_vf most = lctx_vset(-INFINITY), sum = {};
        for (int i = 0; i < n_chunk; i++) {
            most = lctx_vmax(most, masked(i));
        }
        most = most > lctx_vset(-INFINITY) ? most : lctx_vset(0.0f);
        for (int i = 0; i < n_chunk; i++) {
            sum += lctx_vexp(masked(i) - most);
        }
        for (int i = 0; i < n_chunk; i++) {
            const lctx_vf x = lctx_vload(s + (size_t)i * n_pad + c);
            lctx_vstore(s + (size_t)i * n_pad + c, x == x ? lctx_vexp(masked(i) - most) / sum : x);
        }
    }
}

// s[chunk][column]: the mean over the heads that choose together of the share they give a chunk, in place of the scores of every head.
static inline void lctx_to_choices(const lctx_select_args & a, const lctx_select_tile & t, int n_chunk, float * s) {
    const int n_head = lctx_heads_per_choice(a), n_column = t.n_column() * n_head;
    const int n_all = lctx_round_up(n_column, LCTX_VL), n_pad = lctx_round_up(t.n_column(), LCTX_VL);
    int32_t end[LCTX_MAX_COLUMNS] = {};
    for (int c = 0; c < n_column; c++) {
        end[c] = lctx_own_chunk(a, t.token_of(c / n_head));
    }
    lctx_to_shares(s, n_chunk, n_all, end);
    for (int i = 0; i < n_chunk; i++) {  // rows become shorter: none is written before it was read
        float row[LCTX_MAX_COLUMNS] = {};
        for (int c = 0; c < n_column; c++) {
            row[c / n_head] += s[(size_t)i * n_all + c] / (float)n_head;
        }
        memcpy(s + (size_t)i * n_pad, row, n_pad * sizeof(float));
    }
}
