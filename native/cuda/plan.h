// Plans what a tile of *attend* reads of chunks: pieces of up to 16 cells, each once, with the columns that read it.
// That is the inverted list of LongHeads, made for a tile before it is computed, because heads and tokens choose many
// of the same chunks.
#pragma once

#include "kernels.h"
#include "walk.h"

// Cells [lo, hi) of a group of 16, which lie together.
struct lctx_cuda_piece {
    static constexpr int CELLS = 16;

    unsigned long long columns;  // bit c: column c reads it; 0: nothing is here
    int32_t row;                 // of the pools: that of cell `lo`
    int32_t key;                 // sequence * n_angle + the number of the angle among those of a token
    int16_t lo, hi;
};

// The plans of `n_tile` tiles of every KV head: a count of pieces, columns[n_chunk] while it is made, pieces[n_piece].
struct lctx_cuda_plan {
    static constexpr int HEADER = 16;

    char * data = nullptr;                 // nullptr: nothing is read of chunks
    int32_t n_chunk = 0, n_piece = 0;      // at most, of a tile
    int32_t per_chunk = 0, per_block = 0;  // pieces
    int32_t n_tile = 0;

    static bool has_chunks(const lctx_attend_args & a) { return a.params.chunk_size > 0 && a.n_seg > a.params.n_run; }
    lctx_cuda_plan(const lctx_attend_args & a, int n_column, int per_block, int n_tile, char * work)
        : per_block(per_block), n_tile(n_tile) {
        if (!has_chunks(a)) {
            return;
        }
        const int size = a.params.chunk_size, n_chosen = a.n_seg - a.params.n_run;
        const bool aligned = !a.cache.held.data && size % lctx_cuda_piece::CELLS == 0;
        data = work;
        n_chunk = (int32_t)lctx_div_up((int64_t)a.cache.table.head_stride << a.cache.table.shift, size);
        per_chunk =
            aligned ? size / lctx_cuda_piece::CELLS : (size + 2 * lctx_cuda_piece::CELLS - 2) / lctx_cuda_piece::CELLS;
        // all columns choose different chunks; every key begins with a block of rows
        const int64_t n_list = (int64_t)n_column * n_chosen, n_key = (int64_t)n_column * a.n_angle;
        n_piece = (int32_t)(n_list * per_chunk + lctx_min(n_list, n_key) * per_block);
    }
    size_t size(const lctx_attend_args & a) const { return n_piece > 0 ? data_of(n_tile * a.n_head_kv) : 0; }
    LCTX_HD size_t data_of(int tile) const {
        return tile * (HEADER + n_chunk * sizeof(unsigned long long) + n_piece * sizeof(lctx_cuda_piece));
    }
    // Of the tile number `side` of those of a KV head.
    LCTX_HD int32_t & count(int side, int head_kv) const {
        return *(int32_t *)(data + data_of(head_kv * n_tile + side));
    }
    LCTX_HD unsigned long long * columns(int side, int head_kv) const {
        return (unsigned long long *)((char *)&count(side, head_kv) + HEADER);
    }
    LCTX_HD lctx_cuda_piece * pieces(int side, int head_kv) const {
        return (lctx_cuda_piece *)(columns(side, head_kv) + n_chunk);
    }
};

// Make the plans of tiles [first, first + n_tile) of every KV head.
void lctx_cuda_make_plans(const lctx_cuda_queue & queue, const lctx_attend_args & args, const lctx_cuda_plan & plan,
                          int n_column, int first);
