// Takes what a query reads anyway as the measure of what it could read: r(c), the log of the sum over these rows, makes
// scores of several queries comparable. The value of a chunk for a tile is v(i) = max over columns c of (largest score
// of a key of chunk i at the query of c) - r(c). Scores are to the base 2.
#pragma once

#include "key-scores.h"

// r of the columns: [n_pad], infinite beyond the last.
class lctx_reference {
  public:
    lctx_reference(const lctx_select_args & a, const lctx_select_tile & t, const lctx_select_scratch & w)
        : a_(a), t_(t), w_(w) {
        const int n_pad = lctx_key_columns::padded(t.n_column());
        std::fill_n(most_, n_pad, -INFINITY);
        std::fill_n(sum_, n_pad, 0.0f);
        for (int run = 0; run < a.chunks.n_run; run++) {
            if (!(a.near_mask >> run & 1)) {
                add(run);
            }
        }
        for (int c = 0; c < n_pad; c += LCTX_VL) {
            const lctx_vf m = lctx_vload(most_ + c), r = m + lctx_vlog2(lctx_vload(sum_ + c));
            lctx_vstore(most_ + c, m == lctx_vset(-INFINITY) ? lctx_vf{} : r);
        }
        std::fill(most_ + t.n_column(), most_ + n_pad, INFINITY);
    }
    lctx_vf of(int column) const { return lctx_vload(most_ + column); }
    float at(int column) const { return most_[column]; }

  private:
    // The rows of a run that each column reads.
    void add(int run) {
        const int32_t seq = a_.rows[t_.first].seq;
        const lctx_cells cells(a_.cache, t_.list, seq);
        int32_t first[LCTX_MAX_COLUMNS] = {}, end[LCTX_MAX_COLUMNS] = {}, lo = INT32_MAX, hi = 0;
        for (int c = 0; c < t_.n_column(); c++) {
            const lctx_segment & s = a_.segs[(size_t)t_.token(c) * a_.chunks.n_given() + run];
            if (s.row0 < s.row1) {
                first[c] = cells.cell(s.row0), end[c] = cells.cell(s.row1);
                lo = std::min(lo, first[c]), hi = std::max(hi, end[c]);
            }
        }
        if (lo >= hi) {
            return;
        }
        const lctx_key_columns q(a_, t_, run, w_, false);
        const lctx_index_rows rows = {a_.cache, t_.list, seq};
        lctx_group_scores scores(q, rows);
        lctx_each_group({lo, hi}, [&](int32_t group, int, int) {
            for (int c = 0; c < q.n_pad; c += LCTX_VL) {
                add_group(scores.of(group) + c, q.n_pad, group * lctx_index_shape::GROUP, lctx_vload_words(first + c),
                          lctx_vload_words(end + c), c);
            }
        });
    }
    void add_group(const float * s, int64_t step, int32_t cell, const lctx_vi & first, const lctx_vi & end,
                   int column) {
        constexpr int GROUP = lctx_index_shape::GROUP;
        lctx_vf v[GROUP], most = lctx_vload(most_ + column), sum = lctx_vload(sum_ + column), top = most;
        for (int i = 0; i < GROUP; i++) {
            v[i] = ((first <= cell + i) & (end > cell + i)) ? lctx_vload(s + i * step) : lctx_vset(-INFINITY);
            top = lctx_vmax(top, v[i]);
        }
        const lctx_vf base = top == lctx_vset(-INFINITY) ? lctx_vf{} : top;
        sum *= lctx_vexp2(most - base);
        for (int i = 0; i < GROUP; i++) {
            sum += v[i] == lctx_vset(-INFINITY) ? lctx_vf{} : lctx_vexp2(v[i] - base);
        }
        lctx_vstore(most_ + column, top), lctx_vstore(sum_ + column, sum);
    }

    const lctx_select_args & a_;
    const lctx_select_tile & t_;
    const lctx_select_scratch & w_;
    float most_[LCTX_MAX_COLUMNS], sum_[LCTX_MAX_COLUMNS];
};

// values[i] = the larger of it and v(i) for the columns of t, for chunks [some.first, some.end) of their far ranges,
// which all of them share.
static inline void lctx_tile_values(const lctx_select_args & a, const lctx_select_tile & t,
                                    const lctx_chunk_range & some, float * values, const lctx_select_scratch & w) {
    const lctx_reference reference(a, t, w);
    const int32_t seq = a.rows[t.first].seq, size = a.chunks.chunk_size;
    const lctx_index_rows rows = {a.cache, t.list, seq};
    const lctx_cells cells(a.cache, t.list, seq);
    for (int slot = 0; slot < a.chunks.n_range; slot++) {
        const lctx_chunk_range range = lctx_chunk_range(a, t.first, slot).within(some.first, some.end);
        if (range.empty()) {
            continue;
        }
        const lctx_key_columns q(a, t, a.chunks.n_run + slot, w, false);
        lctx_group_scores scores(q, rows);
        for (int chunk = range.first; chunk < range.end; chunk++) {
            lctx_vf best = lctx_vset(-INFINITY);
            lctx_each_group({cells.cell(chunk * size), cells.cell((chunk + 1) * size)},
                            [&](int32_t group, int lo, int hi) {
                                const float * s = scores.of(group);
                                for (int c = 0; c < q.n_pad; c += LCTX_VL) {
                                    lctx_vf most = lctx_vload(s + lo * q.n_pad + c);
                                    for (int i = lo + 1; i < hi; i++) {
                                        most = lctx_vmax(most, lctx_vload(s + i * q.n_pad + c));
                                    }
                                    best = lctx_vmax(best, most - reference.of(c));
                                }
                            });
            values[chunk] = std::max(values[chunk], lctx_vtop(best));
        }
    }
}
