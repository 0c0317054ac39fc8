// Turns scores and LSE into votes of queries for the rows they have read: a weight is exp(score - LSE).
#pragma once

#include "columns.h"

// The columns of a block of scores, as voters.
struct lctx_ballots {
    float * threshold;  // [n_pad] least score of an important row: LSE - ln t, t the rows that the query reads; inf: no
                        // vote
    float * lse;        // [n_pad] inf: no vote
    int32_t * step;     // [n_pad] the query's row

    static size_t n_float() { return 3 * LCTX_MAX_COLUMNS; }
    explicit lctx_ballots(float * base)
        : threshold(base), lse(base + LCTX_MAX_COLUMNS), step((int32_t *)(lse + LCTX_MAX_COLUMNS)) {}

    void clear() const {
        std::fill_n(threshold, LCTX_MAX_COLUMNS, INFINITY);
        std::fill_n(lse, LCTX_MAX_COLUMNS, INFINITY);
        std::fill_n(step, LCTX_MAX_COLUMNS, -1);
    }
    void set(int column, float of_lse, int64_t n_item, int32_t row) const {
        threshold[column] = of_lse - logf((float)n_item);
        lse[column] = of_lse;
        step[column] = row;
    }
};

static inline int32_t lctx_last_important(const float * s, const lctx_ballots & b, int n_pad, int32_t last) {
    lctx_vi best = lctx_vi{} + last;
    for (int c = 0; c < n_pad; c += LCTX_VL) {
        lctx_vi step;
        memcpy(&step, b.step + c, sizeof(step));
        const lctx_vi important = lctx_vload(s + c) >= lctx_vload(b.threshold + c);
        const lctx_vi later = important & (step > best);
        best = (later & step) | (~later & best);
    }
    for (int i = 0; i < LCTX_VL; i++) {
        last = std::max(last, best[i]);
    }
    return last;
}

// The largest weight that a column gives a row, at least `most`: that of the largest exponent. NaN is ignored.
static inline float lctx_largest_weight(const float * s, const lctx_ballots & b, int n_pad, float most) {
    lctx_vf best = lctx_vset(-INFINITY);
    for (int c = 0; c < n_pad; c += LCTX_VL) {
        const lctx_vf x = lctx_vload(s + c) - lctx_vload(b.lse + c);
        best = x > best ? x : best;
    }
    float exponent = -INFINITY;
    for (int i = 0; i < LCTX_VL; i++) {
        exponent = std::max(exponent, best[i]);
    }
    return std::max(most, expf(exponent));
}

// Add the votes of the columns for n picked cells. s: [n][n_pad], a row that is not read is -inf; overwritten.
static inline void lctx_count_votes(lctx_held held, lctx_score kind, const lctx_ballots & b, float * s, int n_col,
                                    int n_pad, const int32_t * picked, int n) {
    for (int x = 0; x < n; x++) {
        int32_t & score = held.scores()[picked[x]];
        float * row = s + (size_t)x * n_pad;
        if (kind == LCTX_SCORE_LAST) {
            score = lctx_last_important(row, b, n_pad, score);
        } else if (kind == LCTX_SCORE_COUNT) {
            for (int c = 0; c < n_col; c++) {
                score += row[c] >= b.threshold[c];
            }
        } else if (kind == LCTX_SCORE_MAX) {
            score = lctx_held::as_score(lctx_largest_weight(row, b, n_pad, lctx_held::as_float(score)));
        } else {
            float sum = lctx_held::as_float(score);
            for (int c = 0; c < n_pad; c += LCTX_VL) {  // a query that is NaN has no weight where it does not read
                const lctx_vf x = lctx_vload(row + c), none = lctx_vset(-INFINITY);
                lctx_vstore(row + c, x == none ? lctx_vf{} : lctx_vexp(x - lctx_vload(b.lse + c)));
            }
            for (int c = 0; c < n_col; c++) {  // one by one: the sum must not depend on where the tokens were cut
                sum += row[c];
            }
            score = lctx_held::as_score(sum);
        }
    }
}

// Rows that a query reads.
static inline int64_t lctx_rows_read(const lctx_segment * segs, int n_seg) {
    int64_t n = 0;
    for (int i = 0; i < n_seg; i++) {
        n += std::max(0, segs[i].row1 - segs[i].row0);
    }
    return n;
}

// The cells of [cell, cell + n) that need votes of queries before this border; returns their number. picked: [n].
static inline int lctx_pick_open(const lctx_retain & r, lctx_held held, int32_t border, int cell, int n,
                                 int32_t * picked) {
    int n_picked = 0;
    for (int s = cell; s < cell + n; s++) {
        picked[n_picked] = s;
        n_picked += !r.one_vote_is_enough() || r.is_open(held.rows()[s], held.scores()[s], border);
    }
    return n_picked;
}

// Blocks of cells are dealt to the splits of a head's work, so that each cell has one writer: the first block from
// `block` on that is this split's.
static inline int lctx_first_mine(int block, int split, int n_split) {
    return block + (split - block % n_split + n_split) % n_split;
}

// Keep the scores from before the ubatch for the sequences that vote: the split's own blocks.
static inline void lctx_keep_scores(const lctx_cache_args & cache, const lctx_voter * voters, int n_tokens, int head_kv,
                                    int split, int n_split) {
    for (int i = 0; i < n_tokens; i++) {
        const bool is_last = i + 1 == n_tokens || voters[i + 1].seq != voters[i].seq;
        if (voters[i].undo_from < 0 || !is_last) {
            continue;
        }
        const lctx_held held = lctx_cells(cache, head_kv, voters[i].seq).held;
        const int n_held = held.cell(voters[i].row) + 1;
        for (int cell = split * LCTX_BLOCK; cell < n_held; cell += n_split * LCTX_BLOCK) {
            std::copy_n(held.scores() + cell, std::min(LCTX_BLOCK, n_held - cell), held.undo() + cell);
        }
        if (split == 0) {
            held.undo_from() = voters[i].undo_from;
        }
    }
}
