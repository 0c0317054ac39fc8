// The walk of a tile of *attend*: columns, one per (token, query head) of one KV head, and the items of cells that they
// read.
//
// An item is what columns of one sequence read of one segment that may be any rows: a run, or where all heads read the
// same. Items come in the order of phase and sequence, each once, with the columns that read it; chunks come after them
// (plan.h).
#pragma once

#include "../ops/cache.h"
#include "device.h"

#include <climits>

// Cuts the tokens and heads into tiles, by shapes only. Heads of a token share a tile where they read the same; of
// those that choose for themselves, which share less than tokens that follow each other, each has its own. (Of few
// tokens these are left to decode.cu.)
struct lctx_cuda_tiling {
    static constexpr int FEW = 16;  // columns

    int n_rep;        // query heads per KV head
    int tile_heads;   // query heads of a tile
    int tile_tokens;  // tokens of a tile
    int n_head_tile;
    int n_token_tile;

    LCTX_HD static bool is_few(const lctx_attend_args & a) {
        return a.choices().n_alone() * (a.n_head / a.n_head_kv) <= FEW;
    }
    LCTX_HD lctx_cuda_tiling(const lctx_attend_args & a, int n_column) {
        n_rep = a.n_head / a.n_head_kv;
        tile_heads = lctx_min(a.params.chunk_size > 0 ? a.n_head / a.n_choice : n_rep, n_column);
        tile_tokens = lctx_max(n_column / tile_heads, 1);
        n_head_tile = (int)lctx_div_up(n_rep, tile_heads);
        n_token_tile = (int)lctx_div_up(a.choices().n_alone(), tile_tokens);
    }
    LCTX_HD int n_tile() const { return n_head_tile * n_token_tile; }
};

// The token with an index among those outside of tiles that share a list of chunks.
LCTX_HD inline int32_t lctx_cuda_token_alone(const lctx_attend_args & a, int32_t index) {
    const lctx_choices choices = a.choices();
    int32_t token = index;
    for (int32_t tile = 0; tile < choices.tiles.n_tile && choices.firsts()[tile] <= token; tile++) {
        token += choices.tiles.size;
    }
    return token;
}

// Columns of tile `index` of a KV head: late tokens, which read most, come first. Tokens that share a list of chunks
// are not among them (lists.cu).
struct lctx_cuda_tile {
    const lctx_attend_args & a;
    int head_kv, head0, n_head, index0, n_token;

    LCTX_HD lctx_cuda_tile(const lctx_attend_args & a, const lctx_cuda_tiling & t, int index, int head_kv)
        : a(a), head_kv(head_kv) {
        const int token_tile = t.n_token_tile - 1 - index / t.n_head_tile, head_tile = index % t.n_head_tile;
        head0 = head_kv * t.n_rep + head_tile * t.tile_heads;
        n_head = lctx_min(t.tile_heads, t.n_rep - head_tile * t.tile_heads);
        index0 = token_tile * t.tile_tokens;
        n_token = lctx_min(t.tile_tokens, a.choices().n_alone() - index0);
    }
    LCTX_HD int n_column() const { return n_head * n_token; }
    // Of its segments, among those of the tokens outside of tiles.
    LCTX_HD int index(int column) const { return index0 + column / n_head; }
    LCTX_HD int token(int column) const { return lctx_cuda_token_alone(a, index(column)); }
    LCTX_HD int head(int column) const { return head0 + column % n_head; }
};

// The lists of segments of the columns: phases come one after the other, a phase is segments [first, end) of every
// column. A run is a phase of its own; chunks are the last one.
struct lctx_cuda_lists {
    const lctx_attend_args & a;

    LCTX_HD bool by_chunk() const { return a.params.chunk_size > 0; }
    LCTX_HD int n_run() const { return by_chunk() ? a.params.n_run : a.n_seg; }
    LCTX_HD int n_phase() const { return by_chunk() ? a.params.n_run + 1 : a.n_seg; }
    LCTX_HD int first(int phase) const { return phase; }
    LCTX_HD int end(int phase) const { return phase < n_run() ? phase + 1 : a.n_seg; }
    LCTX_HD bool is_near(int phase) const { return phase < n_run() && (a.params.near_mask >> phase & 1); }
    LCTX_HD const lctx_segment * of(int index, int head) const {
        const int64_t list = by_chunk() ? (int64_t)index * a.n_choice + head / (a.n_head / a.n_choice) : index;
        return a.segs + list * a.n_seg;
    }
};

// The blocks of ROWS cells of an item that are this split's: every n_split-th of the tile's, whose number grows from
// item to item.
struct lctx_cuda_split {
    int index, n_split;

    // The first block from `block` on, where `at` is the number of `block` among all.
    LCTX_HD int next(int block, int at) const { return block + (index - at % n_split + n_split) % n_split; }
};

// Tells what is read next: known to all threads.
struct lctx_cuda_item {
    int32_t lo, hi;          // cells that any column reads
    int32_t all_lo, all_hi;  // cells that every column reads
    int32_t seq;
    int32_t near;
    int32_t by_chunk;  // not cells that lie side by side, but pieces of a plan (plan.h)
    int32_t valid;
    int32_t n_before;  // blocks of the items before it
    int32_t turns;     // whether a column looks at it from another angle than at what it read before
};

// One may still be read by others, one is read, the next one is on its way, and the one after it is looked up.
constexpr int LCTX_CUDA_ITEMS = 4;

// Shared memory of the walk.
template <int COLUMNS> struct lctx_cuda_walk_memory {
    lctx_cuda_item item[LCTX_CUDA_ITEMS];
    int32_t lo[LCTX_CUDA_ITEMS][COLUMNS], hi[LCTX_CUDA_ITEMS][COLUMNS];  // cells of each column; lo == hi: none
    int32_t angle[LCTX_CUDA_ITEMS][COLUMNS];
    int32_t turned[COLUMNS];  // the angle from which each looked last
};

// The runs of a tile, one after the other.
struct lctx_cuda_run_walk {
    int phase = 0;
    int32_t seq = -1;  // of the last one in this phase

    // The next run; its columns into buffer `to` of the memory. The lanes of one warp together.
    template <int COLUMNS> __device__ lctx_cuda_item next(const lctx_attend_args & a, const lctx_cuda_tile & tile,
                                                          lctx_cuda_walk_memory<COLUMNS> & m, int to) {
        const lctx_cuda_lists lists = {a};
        const int n_column = tile.n_column();
        lctx_cuda_item item = {INT_MAX, 0, 0, INT_MAX};
        for (; phase < lists.n_run() && !item.valid; phase += !item.valid) {
            int32_t least = INT_MAX;
            for (int c = lctx_lane(); c < n_column; c += LCTX_WARP) {
                const lctx_segment s = lists.of(tile.index(c), tile.head(c))[phase];
                least = s.row0 < s.row1 && s.seq > seq ? lctx_min(least, s.seq) : least;
            }
            seq = lctx_warp_min(least);
            item.valid = seq != INT_MAX;
            if (!item.valid) {
                seq = -1;
                continue;
            }
            item.seq = seq;
            item.near = lists.is_near(phase);
            const lctx_cells cells(a.cache, tile.head_kv, seq);
            for (int c = lctx_lane(); c < COLUMNS; c += LCTX_WARP) {
                int lo = 0, hi = 0, angle = 0;
                if (c < n_column) {
                    const lctx_segment s = lists.of(tile.index(c), tile.head(c))[phase];
                    if (s.row0 < s.row1 && s.seq == seq) {
                        lo = cells.cell(s.row0), hi = cells.cell(s.row1), angle = s.angle;
                    }
                    if (lo < hi) {
                        item.lo = lctx_min(item.lo, lo), item.hi = lctx_max(item.hi, hi);
                    }
                    item.all_lo = lctx_max(item.all_lo, lo), item.all_hi = lctx_min(item.all_hi, hi);
                }
                m.lo[to][c] = lo, m.hi[to][c] = hi, m.angle[to][c] = angle;
            }
            item.lo = lctx_warp_min(item.lo), item.hi = -lctx_warp_min(-item.hi);
            item.all_lo = -lctx_warp_min(-item.all_lo), item.all_hi = lctx_warp_min(item.all_hi);
        }
        return item;
    }
};

// Return whether any column turns for item `to`, which is read after all that were asked about. The lanes of one warp
// call together.
template <int COLUMNS> static __device__ bool lctx_cuda_turns(lctx_cuda_walk_memory<COLUMNS> & m, int to) {
    bool turns = false;
    for (int c = lctx_lane(); c < COLUMNS; c += LCTX_WARP) {
        if (m.lo[to][c] < m.hi[to][c] && m.turned[c] != m.angle[to][c]) {
            m.turned[c] = m.angle[to][c];
            turns = true;
        }
    }
    return lctx_ballot(turns) != 0;
}
