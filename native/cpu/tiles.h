// Tiles of *attend* and *vote*: up to LCTX_MAX_COLUMNS columns, one per (token, query head) of one KV head, and the blocks of up to 64
// slots that their segments cover.
#pragma once

#include "columns.h"

#include <climits>

// How the tokens and heads are cut. The sizes depend on shapes only; the cut of the tokens also on which sequences they belong to.
struct lctx_tiling {
    int n_rep;        // query heads per KV head
    int head_block;   // query heads per tile
    int token_block;  // most tokens per tile
    int n_head_tile;
    int max_col;  // padded to vector width

    const int32_t * token_start = nullptr;  // first token of every token tile, and the end
    int n_token_tile = 0;

    explicit lctx_tiling(const lctx_attend_args & a) {
        n_rep = a.n_head / a.n_head_kv;
        head_block = std::min(n_rep, LCTX_MAX_COLUMNS);
        token_block = std::min(std::max(LCTX_MAX_COLUMNS / head_block, 1), a.n_tokens);
        n_head_tile = (int)lctx_ceil_div(n_rep, head_block);
        max_col = lctx_round_up(head_block * token_block, LCTX_VL);
    }
    // A tile reads one page list, so it ends where the sequence changes. cut: int32 [n_tokens + 2].
    void cut_tokens(const lctx_attend_args & a, int32_t * cut) const {
        lctx_cut_tokens(a.n_tokens, token_block, cut, [&](int32_t i) { return a.segs[(size_t)i * a.n_seg].seq; });
    }
    void use_cut(const int32_t * cut) {
        n_token_tile = cut[0];
        token_start = cut + 1;
    }
    int tiles_per_head() const { return n_head_tile * n_token_tile; }
};

// Columns (token0 .. token0 + n_token) x (head0 .. head0 + n_head) of KV head head_kv.
struct lctx_tile {
    int head_kv, head0, n_head, token0, n_token, n_col, n_col_pad;

    lctx_tile(const lctx_tiling & t, int head_kv, int head_tile, int token_tile) : head_kv(head_kv) {
        token0 = t.token_start[token_tile];
        n_token = t.token_start[token_tile + 1] - token0;
        head0 = head_kv * t.n_rep + head_tile * t.head_block;
        n_head = std::min(t.head_block, t.n_rep - head_tile * t.head_block);
        n_col = n_head * n_token;
        n_col_pad = lctx_round_up(n_col, LCTX_VL);
    }
    int token(int col) const { return token0 + col / n_head; }
    int head(int col) const { return head0 + col % n_head; }
};

static inline const lctx_segment & lctx_segment_of(const lctx_attend_args & a, int token, int seg) {
    return a.segs[(size_t)token * a.n_seg + seg];
}

// Slots that any token of a tile reads in one segment, and the slots that all of them read.
struct lctx_tile_range {
    int lo = 0, hi = 0;          // union
    int all_lo = 0, all_hi = 0;  // intersection

    lctx_tile_range(const lctx_attend_args & a, const lctx_tile & t, const lctx_slots & slots, int seg) {
        int row0 = INT_MAX, row1 = 0, all_row0 = 0, all_row1 = INT_MAX;
        for (int i = 0; i < t.n_token; i++) {
            const lctx_segment & sg = lctx_segment_of(a, t.token0 + i, seg);
            if (sg.row0 < sg.row1) {
                row0 = std::min(row0, sg.row0);
                row1 = std::max(row1, sg.row1);
            }
            all_row0 = std::max(all_row0, sg.row0);
            all_row1 = std::min(all_row1, sg.row1);
        }
        if (row0 < row1) {
            lo = slots.slot(row0), hi = slots.slot(row1);
            all_lo = slots.slot(all_row0), all_hi = slots.slot(all_row1);
        }
    }
    int first_block() const { return lo / LCTX_BLOCK; }
    int n_block() const { return lo < hi ? (int)lctx_ceil_div(hi, LCTX_BLOCK) - first_block() : 0; }
    // Slots of block b that are read.
    int block_lo(int b) const { return std::max(lo, b * LCTX_BLOCK); }
    int block_hi(int b) const { return std::min(hi, (b + 1) * LCTX_BLOCK); }
    bool is_partial(int slot, int n) const { return slot < all_lo || slot + n > all_hi; }
};

// Rotate the queries of the tile to the positions from which they look at the segment. rotated: [head_dim_k].
static inline void lctx_load_queries(const lctx_attend_args & a, const lctx_tile & t, int seg, const lctx_columns & columns,
                                     float * rotated) {
    const float scale = lctx_query_scale(a.params.scale, a.params.softcap);
    columns.clear();
    for (int c = 0; c < t.n_col; c++) {
        const float * q = (const float *)(a.q + t.head(c) * a.q_head_stride + t.token(c) * a.q_token_stride);
        const float * cs = a.angles + (size_t)lctx_segment_of(a, t.token(c), seg).angle * a.n_dims;
        lctx_rotate_row(q, rotated, a.head_dim_k, cs, a.n_dims, a.params.rope_mode);
        columns.set(c, rotated, scale);
    }
}

// Take away what a token does not read: score of slot x and column c at s[x * slot_step + c * column_step], row_of(x) its row.
template <typename F> static inline void lctx_tile_mask(const lctx_attend_args & a, const lctx_tile & t, int seg, int n, float * s,
                                                        int slot_step, int column_step, F && row_of) {
    for (int c = 0; c < t.n_col; c++) {
        const lctx_segment & sg = lctx_segment_of(a, t.token(c), seg);
        for (int x = 0; x < n; x++) {
            const int row = row_of(x);
            if (row < sg.row0 || row >= sg.row1) {
                s[x * slot_step + c * column_step] = -INFINITY;
            }
        }
    }
}
