// Holds what a product multiplies: matrices of weights, and the tiles of columns (bytes.h) that each of them meets.
#pragma once

#include "bump.h"
#include "bytes.h"

#include <algorithm>

#if LCTX_HAS_BYTES

// A matrix, and its tiles [first, end).
struct lctx_matrix {
    const char * rows;
    int64_t first, end;
};

// f(tile, row, end) for rows [first, end) of tiles of n_row rows each, counted over all of them.
template <typename F> static inline void lctx_each_tile(int64_t first, int64_t end, int64_t n_row, F && f) {
    for (int64_t n = 0; first < end; first += n) {
        const int64_t tile = first / n_row, row = first % n_row;
        n = std::min(end - first, n_row - row);
        f(tile, row, row + n);
    }
}

// GGML_OP_MUL_MAT: one matrix and all columns.
struct lctx_one_matrix {
    const ggml_tensor * op;

    lctx_one_matrix(const ggml_tensor * op, lctx_bump &) : op(op) {}
    int64_t max_tile() const { return (n_column() + LCTX_TILE - 1) / LCTX_TILE; }
    int64_t n_tile() const { return max_tile(); }
    int64_t n_matrix() const { return 1; }
    void sort() const {}

    int64_t most_columns() const { return n_column(); }
    lctx_matrix matrix(int64_t) const { return {(const char *)op->src[0]->data, 0, n_tile()}; }
    lctx_matrix matrix_of(int64_t) const { return matrix(0); }
    lctx_tile_ends tile(int64_t i) const {
        const ggml_tensor * x = op->src[1];
        lctx_tile_ends ends;
        ends.n = (int)std::min<int64_t>(LCTX_TILE, n_column() - i * LCTX_TILE);
        for (int c = 0; c < ends.n; c++) {
            const int64_t column = i * LCTX_TILE + c;
            ends.x[c] = (const float *)((const char *)x->data + column * x->nb[1]);
            ends.out[c] = (float *)((char *)op->data + column * op->nb[1]);
        }
        return ends;
    }

  private:
    int64_t n_column() const { return op->src[1]->ne[1]; }
};

// GGML_OP_MUL_MAT_ID: ids [n_used, n_token] names the experts of a token, each of which has a column for itself or one
// that all share. The pairs of a token and an expert are sorted by expert: each expert has tiles of its own.
struct lctx_expert_matrices {
    const ggml_tensor * op;

    lctx_expert_matrices(const ggml_tensor * op, lctx_bump & at)
        : op(op),
          n_of(at.take<int32_t>(n_matrix())),
          first_tile(at.take<int32_t>(n_matrix() + 1)),
          pairs(at.take<int32_t>(max_tile() * LCTX_TILE)) {}
    int64_t n_matrix() const { return op->src[0]->ne[2]; }
    int64_t n_used() const { return op->src[2]->ne[0]; }
    int64_t n_pair() const { return n_used() * op->src[2]->ne[1]; }
    int64_t max_tile() const { return (n_pair() + (LCTX_TILE - 1) * std::min(n_matrix(), n_pair())) / LCTX_TILE; }
    int64_t n_tile() const { return first_tile[n_matrix()]; }
    int64_t most_columns() const { return *std::max_element(n_of, n_of + n_matrix()); }

    // Before anything else is asked; every thread for itself, which is sooner done than waiting for one.
    void sort() const {
        std::fill_n(n_of, n_matrix(), 0);
        for (int64_t pair = 0; pair < n_pair(); pair++) {
            n_of[expert(pair)]++;
        }
        first_tile[0] = 0;
        for (int64_t e = 0; e < n_matrix(); e++) {
            first_tile[e + 1] = first_tile[e] + (n_of[e] + LCTX_TILE - 1) / LCTX_TILE;
        }
        std::fill_n(pairs, n_tile() * LCTX_TILE, -1);
        std::fill_n(n_of, n_matrix(), 0);
        for (int64_t pair = 0; pair < n_pair(); pair++) {
            const int32_t e = expert(pair);
            pairs[first_tile[e] * LCTX_TILE + n_of[e]++] = (int32_t)pair;
        }
    }

    lctx_matrix matrix(int64_t e) const {
        const ggml_tensor * w = op->src[0];
        return {(const char *)w->data + e * w->nb[2], first_tile[e], first_tile[e + 1]};
    }
    lctx_matrix matrix_of(int64_t tile) const {
        return matrix(std::upper_bound(first_tile, first_tile + n_matrix(), tile) - first_tile - 1);
    }
    lctx_tile_ends tile(int64_t i) const {
        const ggml_tensor * x = op->src[1];
        lctx_tile_ends ends;
        ends.n = 0;
        for (int c = 0; c < LCTX_TILE && pairs[i * LCTX_TILE + c] >= 0; c++, ends.n++) {
            const int64_t used = pairs[i * LCTX_TILE + c] % n_used(), token = pairs[i * LCTX_TILE + c] / n_used();
            ends.x[c] = (const float *)((const char *)x->data + used % x->ne[1] * x->nb[1] + token * x->nb[2]);
            ends.out[c] = (float *)((char *)op->data + used * op->nb[1] + token * op->nb[2]);
        }
        return ends;
    }
    // Return which column of x that of a tile is, counted over all tokens.
    int64_t column(int64_t tile, int c) const {
        const int64_t pair = pairs[tile * LCTX_TILE + c], n_own = op->src[1]->ne[1];
        return pair / n_used() * n_own + pair % n_used() % n_own;
    }

  private:
    int32_t *n_of, *first_tile,
        *pairs;  // columns of an expert; its first tile; the pairs of all tiles, -1 after the last one

    int32_t expert(int64_t pair) const {
        const ggml_tensor * ids = op->src[2];
        const int32_t e =
            *(const int32_t *)((const char *)ids->data + pair % n_used() * ids->nb[0] + pair / n_used() * ids->nb[1]);
        GGML_ASSERT(e >= 0 && e < n_matrix());  // as ggml does
        return e;
    }
};

#endif
