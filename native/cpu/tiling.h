// Tiles of *attend* and *vote*: columns, one per (token, query head) of one KV head, as cuda/walk.h.
#pragma once

#include "columns.h"

// Cuts the tokens and heads into tiles. The sizes depend on shapes only, not on the threads: neither do sums. The cut
// of the tokens also depends on their sequences.
struct lctx_tiling {
    static constexpr int MAX_STATES =
        1024;  // columns of a tile that reads chunks: their outputs stay in the second-level cache
    static constexpr int MIN_TOKENS = 16;  // of such a tile, if there are that many
    static constexpr int WANTED = 24;      // of such tiles, for threads to share

    int n_rep;        // query heads per KV head
    int tile_heads;   // query heads of a tile
    int tile_tokens;  // most tokens of a tile
    int n_head_tile;
    int max_column;  // padded to vector width
    int n_run;       // segments that are any rows, the first of a column
    int n_bucket;    // what items can be: those, then chunks
    int n_item;      // items of a tile at most
    bool is_whole;   // chunks are read as a whole: runs are not

    const int32_t * token_run = nullptr;  // first token of every token tile, and how many
    int n_token_tile = 0;

    explicit lctx_tiling(const lctx_attend_args & a) : n_rep(a.n_head / a.n_head_kv) {
        const int32_t n_tokens = std::max(1, a.choices().n_alone());
        if (a.params.chunk_size > 0) {
            const int n_wanted = (int)lctx_ceil_div(WANTED, a.n_head_kv);
            const int most = std::max(1, MAX_STATES / n_rep);
            tile_heads = n_rep;
            tile_tokens = std::min(std::max((int)lctx_ceil_div(n_tokens, n_wanted), MIN_TOKENS), most);
            const int n_chunk =
                (int)lctx_ceil_div((int64_t)a.cache.table.head_stride << a.cache.table.shift, a.params.chunk_size);
            n_run = a.params.n_run;
            is_whole = n_run > 0;
            n_bucket = n_run + n_chunk;
        } else {
            tile_heads = std::min(n_rep, LCTX_MAX_COLUMNS);
            tile_tokens = LCTX_MAX_COLUMNS / tile_heads;
            n_run = n_bucket = a.n_seg;
            is_whole = false;
        }
        tile_tokens = std::min(tile_tokens, n_tokens);
        n_head_tile = (int)lctx_ceil_div(n_rep, tile_heads);
        max_column = lctx_round_up(tile_heads * tile_tokens, LCTX_VL);
        n_item = std::min(n_bucket, n_run + tile_heads * tile_tokens * (a.n_seg - n_run));
    }
    // A tile ends where the sequence changes; tokens that share a list are in none. cut: int32 [cut_size].
    static size_t cut_size(const lctx_attend_args & a) { return 2 * (size_t)a.n_tokens + 1; }
    void cut_tokens(const lctx_attend_args & a, int32_t * cut) const {
        const lctx_choices choices = a.choices();
        lctx_cut_tokens(a.n_tokens, tile_tokens, cut,
                        [&](int32_t i) { return choices.is_alone(i) ? choices.alone(choices.index(i), 0)->seq : -1; });
    }
    void use_cut(const int32_t * cut) {
        n_token_tile = cut[0];
        token_run = cut + 1;
    }
    int tiles_per_head() const { return n_head_tile * n_token_tile; }
    // Columns of one product.
    int max_reader() const { return std::min(max_column, LCTX_MAX_COLUMNS); }
};

// Columns (token0 .. token0 + n_token) x (head0 .. head0 + n_head) of KV head head_kv.
struct lctx_tile {
    int head_kv, head0, n_head, token0, n_token, n_column;

    lctx_tile(const lctx_tiling & t, int head_kv, int head_tile, int token_tile)
        : lctx_tile(head_kv, head_kv * t.n_rep + head_tile * t.tile_heads,
                    std::min(t.tile_heads, t.n_rep - head_tile * t.tile_heads), t.token_run[2 * token_tile],
                    t.token_run[2 * token_tile + 1]) {}
    lctx_tile(int head_kv, int head0, int n_head, int token0, int n_token)
        : head_kv(head_kv),
          head0(head0),
          n_head(n_head),
          token0(token0),
          n_token(n_token),
          n_column(n_head * n_token) {}
    int token(int column) const { return token0 + column / n_head; }
    int head(int column) const { return head0 + column % n_head; }
};
