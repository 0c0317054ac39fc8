// Says which rows a head keeps: settings of the eviction rules, the arithmetic that host and kernels share, and where
// it is written down.
//
// Every KV head of a sequence holds some of the rows that were stored, ascending; the index of a row among them is its
// cell, and cell i lies in block table[i / 64]. Queries vote for the rows they read; at a border the rows without
// enough votes leave and the others move up.
#pragma once

#include "portable.h"

#include <cstdint>
#include <cstring>

enum lctx_score : int32_t {
    LCTX_SCORE_LAST,   // the last query to which the row was important (or one of the window, if one is enough); -1:
                       // none
    LCTX_SCORE_COUNT,  // how many queries found it important
    LCTX_SCORE_SUM,    // sum of its weights, a float
    LCTX_SCORE_MAX,    // the largest of its weights, a float
};

// A float.
LCTX_HD inline bool lctx_is_weight(lctx_score kind) {
    return kind == LCTX_SCORE_SUM || kind == LCTX_SCORE_MAX;
}

struct lctx_retain {
    lctx_score score;
    int32_t resets;  // 1: scores begin again after an eviction
    int32_t
        window;  // queries before a border that vote; 0: those of a replay do, and heads evict when they are asked to
    int32_t recent;       // newest rows that stay
    int32_t evict_every;  // rows from one border to the next
    int32_t budget;    // rows that a head keeps at most, the best by score; 0: those that a query of the window found
                       // important
    int32_t adaptive;  // 1: the heads of a layer share their budgets, and keep their best rows together

    // The first border at p or later: an eviction follows it.
    LCTX_HD int32_t border(int32_t p) const { return (p / evict_every + 1) * evict_every - 1; }
    LCTX_HD bool votes(int32_t p) const { return border(p) - p < window; }
    LCTX_HD bool waits() const { return window == 0; }
    // The budget of a head is known when it evicts only.
    LCTX_HD bool own_budgets() const { return adaptive || waits(); }
    // Rows from this one on stay when heads evict after row p. chunk_size: 0 or that of the chunks, of which the open
    // one stays.
    LCTX_HD int32_t first_safe(int32_t p, int32_t chunk_size) const {
        const int32_t first = p - recent + 1, open = chunk_size > 0 ? (p + 1) / chunk_size * chunk_size : first;
        const int32_t least = first < open ? first : open;
        return least < 0 ? 0 : least;
    }

    // True when every vote counts at one border only. Then a row that has one, or is too new to leave, needs no other.
    LCTX_HD bool one_vote_is_enough() const { return score == LCTX_SCORE_LAST && evict_every >= window; }
    LCTX_HD bool is_open(int32_t row, int32_t score_so_far, int32_t border) const {
        return border - score_so_far >= window && border - row >= recent;
    }
};

// Lists what one KV head of one sequence holds: a header, and planes of n_row_max numbers. In a tensor int32 [size,
// n_head, n_seq] all headers come first, then the planes of one head after the other: a device need not have memory for
// planes before they have rows.
struct lctx_held {
    int32_t * data;  // the header
    int32_t * planes;
    int32_t n_row_max;

    static constexpr int32_t HEADER = 4, PLANES = 3;
    LCTX_HD static int64_t size(int32_t n_row_max) { return HEADER + (int64_t)PLANES * n_row_max; }
    // That of number `index` of the n of a tensor.
    LCTX_HD static lctx_held of(int32_t * all, int64_t n, int64_t index, int32_t n_row_max) {
        return {all + index * HEADER, all + n * HEADER + index * PLANES * n_row_max, n_row_max};
    }

    LCTX_HD int32_t & n_gone() const { return data[0]; }      // rows evicted so far
    LCTX_HD int32_t & dense_from() const { return data[1]; }  // rows from this one on are all here
    LCTX_HD int32_t & undo_from() const {
        return data[2];
    }  // undo() is what scores() was before the queries from this row on voted
    LCTX_HD int32_t * rows() const { return planes; }
    LCTX_HD int32_t * scores() const { return rows() + n_row_max; }
    LCTX_HD int32_t * undo() const {
        return scores() + n_row_max;
    }  // scores before the last ubatch that voted: it may be taken back

    LCTX_HD static int32_t first_score(lctx_score kind) { return kind == LCTX_SCORE_LAST ? -1 : 0; }
    LCTX_HD static float as_float(int32_t score) {
        float value;
        memcpy(&value, &score, sizeof(value));
        return value;
    }
    LCTX_HD static int32_t as_score(float value) {
        int32_t score;
        memcpy(&score, &value, sizeof(score));
        return score;
    }

    // Larger for a better score; NaN is the worst.
    LCTX_HD static uint32_t rank(lctx_score kind, int32_t score) {
        constexpr uint32_t SIGN = 0x80000000u, INF = 0x7f800000u;
        const uint32_t bits = (uint32_t)score;
        if (!lctx_is_weight(kind)) {
            return bits ^ SIGN;
        }
        return (bits & ~SIGN) > INF ? 0 : bits & SIGN ? ~bits : bits | SIGN;
    }

    // The number of held rows before `row`: its cell when it is held.
    LCTX_HD int32_t cell(int32_t row) const {
        if (row >= dense_from()) {
            return row - n_gone();
        }
        int32_t lo = 0, hi = dense_from() - n_gone();
        while (lo < hi) {
            const int32_t middle = lo + (hi - lo) / 2;
            if (rows()[middle] < row) {
                lo = middle + 1;
            } else {
                hi = middle;
            }
        }
        return lo;
    }
};
