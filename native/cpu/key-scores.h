// Scores of chunks by their keys in few bits: the log of the sum over the rows of a chunk of exp(scale * q . key), to
// the base 2.
//
// Rows are scored in groups of 16. If a chunk does not fill its groups because rows were evicted, the others of a group
// count as nothing. The sum over a group has the same order for any number of columns, so a choice does not depend on
// which other columns are scored.
#pragma once

#include "scores.h"

// The queries of the columns, rounded: where there are few, bytes [column][n_channel]; else words as
// lctx_index_columns has them.
struct lctx_key_columns {
    const lctx_select_args & a;
    const lctx_select_scratch & w;
    bool few;
    int n, n_pad;
    static int padded(int n) { return std::max(lctx_round_up(n, LCTX_VL), LCTX_FEW_COLUMNS); }
    int8_t * bytes;            // few
    lctx_index_query * query;  // [n_pad], few
    lctx_index_columns many;

    lctx_key_columns(const lctx_select_args & a, const lctx_select_tile & t, int segment, const lctx_select_scratch & w,
                     bool few)
        : a(a), w(w), few(few), n(t.n_column()), n_pad(padded(n)) {
        const int32_t n_channel = a.index.n_channel(), n_word = n_channel / lctx_index_shape::WORD;
        int32_t * words = (int32_t *)w.queries;
        query = (lctx_index_query *)(words + (size_t)n_word * n_pad);
        float * scales = (float *)(query + n_pad);
        int32_t * starts = (int32_t *)(scales + n_pad);
        bytes = (int8_t *)words;
        many = {words, starts, scales, n_pad};
        constexpr float LOG2_E = 1.44269504f;
        int8_t * row = few ? nullptr : (int8_t *)w.wide;
        memset(words, 0, (size_t)n_word * n_pad * sizeof(int32_t));
        std::fill_n(query, n_pad, lctx_index_query{0.0f, 0});
        for (int c = 0; c < n; c++) {
            lctx_column_query(a, t, c, segment, w.rotated);
            lctx_transform(w.rotated, a.head_dim, a.index.hadamard());
            int8_t * to = row ? row : bytes + (size_t)c * n_channel;
            query[c] = lctx_index_round(a.index, w.rotated, LOG2_E * a.scale, to);
            for (int32_t i = 0; row && i < n_word; i++) {
                memcpy(words + lctx_index_word(a.index, i, c, n_pad), row + i * lctx_index_shape::WORD,
                       lctx_index_shape::WORD);
            }
        }
        for (int c = 0; c < n_pad; c++) {
            scales[c] = query[c].scale, starts[c] = query[c].start;
        }
    }
};

// Scores of the rows of one group at a time; the last one is kept.
class lctx_group_scores {
  public:
    static constexpr int GROUP = lctx_index_shape::GROUP;

    lctx_group_scores(const lctx_key_columns & q, const lctx_index_rows & rows) : q_(q), rows_(rows) {}

    // Few: [column][GROUP], else [GROUP][n_pad].
    const float * of(int32_t group) {
        if (group != last_) {
            (q_.a.index.bits == 1 ? score<1>(group) : score<2>(group));
            last_ = group;
        }
        return q_.w.many;
    }

  private:
    template <int BITS> void score(int32_t group) {
        const char * at = rows_.group(group);
        if (q_.few) {
            lctx_index_few<BITS>(q_.a.index, at, q_.bytes, q_.query, q_.n, q_.w.many, GROUP);
        } else {
            lctx_index_many<BITS>(q_.a.index, at, q_.many, (int32_t *)q_.w.k, q_.w.many);
        }
    }

    const lctx_key_columns & q_;
    const lctx_index_rows & rows_;
    int32_t last_ = -1;
};

// The largest of 16 values, and the sum of 2^(value - largest).
struct lctx_log_sum {
    float most, sum;
};

static inline lctx_log_sum lctx_sum_row(const float * s, int lo, int hi) {
    constexpr int N = lctx_index_shape::GROUP / LCTX_VL;
    float masked[lctx_index_shape::GROUP];
    if (lo > 0 || hi < lctx_index_shape::GROUP) {
        for (int i = 0; i < lctx_index_shape::GROUP; i++) {
            masked[i] = i >= lo && i < hi ? s[i] : -INFINITY;
        }
        s = masked;
    }
    lctx_vf v[N], top = lctx_vset(-INFINITY);
    for (int i = 0; i < N; i++) {
        v[i] = lctx_vload(s + i * LCTX_VL);
        top = lctx_vmax(top, v[i]);
    }
    const float most = lctx_vtop(top), base = most == -INFINITY ? 0.0f : most;
    for (int i = 0; i < N; i++) {
        v[i] = lctx_vexp2(v[i] - base);
    }
    for (int half = N / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            v[i] += v[i + half];
        }
    }
    return {most, lctx_vsum(v[0])};
}

// Compute the largest score and the sum of powers for LCTX_VL columns that stand side by side.
static inline void lctx_sum_columns(const float * s, int64_t step, int lo, int hi, lctx_vf & most, lctx_vf & sum) {
    constexpr int GROUP = lctx_index_shape::GROUP;
    lctx_vf v[GROUP];
    most = lctx_vset(-INFINITY);
    for (int i = 0; i < GROUP; i++) {
        v[i] = i >= lo && i < hi ? lctx_vload(s + i * step) : lctx_vset(-INFINITY);
        most = lctx_vmax(most, v[i]);
    }
    const lctx_vf base = most == lctx_vset(-INFINITY) ? lctx_vf{} : most;
    for (int i = 0; i < GROUP; i++) {
        v[i] = lctx_vexp2(v[i] - base);
    }
    for (int half = GROUP / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            v[i] += v[i + half];
        }
    }
    sum = v[0];
}

// Parts of both.
static inline void lctx_add_log_sum(lctx_vf & most, lctx_vf & sum, lctx_vf more, lctx_vf more_sum) {
    const lctx_vf top = lctx_vmax(most, more), base = top == lctx_vset(-INFINITY) ? lctx_vf{} : top;
    sum = sum * lctx_vexp2(most - base) + more_sum * lctx_vexp2(more - base);
    most = top;
}

// The rows of a chunk are in cells [lo, hi).
struct lctx_chunk_cells {
    int32_t lo, hi;
};

// Scores of LCTX_VL chunks from `first` on, for one of few columns at a time: s[column * of_column + chunk].
class lctx_few_keys {
  public:
    lctx_few_keys(const lctx_key_columns & q, int64_t of_column, float * s) : q_(q), of_column_(of_column), s_(s) {}

    // The scores of rows [lo, hi) of a group, which belong to a chunk; chunks come in order, and each as a whole.
    void add(int chunk, const float * scores, int lo, int hi) {
        const int lane = chunk % LCTX_VL;
        for (int c = 0; c < q_.n; c++) {
            const lctx_log_sum p = lctx_sum_row(scores + c * lctx_index_shape::GROUP, lo, hi);
            float &most = most_[c][lane], &sum = sum_[c][lane];
            if (most == -INFINITY) {
                most = p.most, sum = p.sum;
            } else if (p.most != -INFINITY) {
                lctx_vf m = lctx_vset(most), l = lctx_vset(sum);
                lctx_add_log_sum(m, l, lctx_vset(p.most), lctx_vset(p.sum));
                most = m[0], sum = l[0];
            }
        }
    }
    void clear() {
        std::fill_n(most_[0], LCTX_FEW_COLUMNS * LCTX_VL, -INFINITY);
        std::fill_n(sum_[0], LCTX_FEW_COLUMNS * LCTX_VL, 1.0f);
    }
    // Write chunks [first, end) of a column, which lie in one vector.
    void put(int column, int first, int end) const {
        float scores[LCTX_VL];
        lctx_vstore(scores, lctx_vload(most_[column]) + lctx_vlog2(lctx_vload(sum_[column])));
        for (int chunk = first; chunk < end; chunk++) {
            s_[column * of_column_ + chunk] = scores[chunk % LCTX_VL];
        }
    }

  private:
    const lctx_key_columns & q_;
    const int64_t of_column_;
    float * s_;
    float most_[LCTX_FEW_COLUMNS][LCTX_VL], sum_[LCTX_FEW_COLUMNS][LCTX_VL];
};

// f(group, first row, end row) for the groups of cells [lo, hi).
template <typename F> static inline void lctx_each_group(const lctx_chunk_cells & cells, F && f) {
    constexpr int32_t GROUP = lctx_index_shape::GROUP;
    for (int32_t cell = cells.lo; cell < cells.hi;) {
        const int32_t group = cell / GROUP, end = std::min(cells.hi, (group + 1) * GROUP);
        f(group, cell - group * GROUP, end - group * GROUP);
        cell = end;
    }
}

static inline void lctx_score_keys(const lctx_select_args & a, const lctx_select_tile & t, int slot,
                                   const lctx_chunk_range & r, float * s, const lctx_select_scratch & w) {
    const lctx_score_steps step(a, t.n_column());
    const lctx_key_columns q(a, t, a.chunks.n_run + slot, w, step.few());
    const int32_t seq = a.rows[t.first].seq, size = a.chunks.chunk_size;
    const lctx_index_rows rows = {a.cache, t.list, seq};
    const lctx_cells cells(a.cache, t.list, seq);
    lctx_group_scores scores(q, rows);
    const auto cells_of = [&](int chunk) {
        return lctx_chunk_cells{cells.cell(chunk * size), cells.cell((chunk + 1) * size)};
    };
    if (q.few) {
        lctx_few_keys few(q, step.of_column, s);
        for (int chunk = r.first; chunk < r.end;) {
            const int first = chunk, end = std::min(r.end, (chunk / LCTX_VL + 1) * LCTX_VL);
            few.clear();
            for (; chunk < end; chunk++) {
                lctx_each_group(cells_of(chunk),
                                [&](int32_t group, int lo, int hi) { few.add(chunk, scores.of(group), lo, hi); });
            }
            for (int c = 0; c < q.n; c++) {
                const lctx_chunk_range own = lctx_chunk_range(a, t.token(c), slot).within(first, end);
                few.put(c, own.first, own.end);
            }
        }
        return;
    }
    int32_t first[LCTX_MAX_COLUMNS] = {}, end[LCTX_MAX_COLUMNS] = {};
    for (int c = 0; c < q.n; c++) {
        const lctx_chunk_range own(a, t.token(c), slot);
        first[c] = own.first, end[c] = own.end;
    }
    float *most = w.many + lctx_index_shape::GROUP * LCTX_MAX_COLUMNS, *sum = most + LCTX_MAX_COLUMNS;
    for (int chunk = r.first; chunk < r.end; chunk++) {
        std::fill_n(most, q.n_pad, -INFINITY);
        std::fill_n(sum, q.n_pad, 1.0f);
        lctx_each_group(cells_of(chunk), [&](int32_t group, int lo, int hi) {
            const float * of_rows = scores.of(group);
            for (int c = 0; c < q.n_pad; c += LCTX_VL) {
                lctx_vf m, l, m_all = lctx_vload(most + c), l_all = lctx_vload(sum + c);
                lctx_sum_columns(of_rows + c, q.n_pad, lo, hi, m, l);
                if (lo == 0 && hi == size) {  // the group is the chunk
                    m_all = m, l_all = l;
                } else {
                    l_all = m_all == lctx_vset(-INFINITY) ? lctx_vf{} : l_all;
                    lctx_add_log_sum(m_all, l_all, m, l);
                }
                lctx_vstore(most + c, m_all), lctx_vstore(sum + c, l_all);
            }
        });
        float * to = s + chunk * step.of_chunk;
        for (int c = 0; c < step.of_chunk; c += LCTX_VL) {
            const lctx_vi own = (lctx_vload_words(first + c) <= chunk) & (lctx_vload_words(end + c) > chunk);
            lctx_vstore(to + c, own ? lctx_vload(most + c) + lctx_vlog2(lctx_vload(sum + c)) : lctx_vload(to + c));
        }
    }
}
