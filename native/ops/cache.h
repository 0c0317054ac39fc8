// Computes where the rows of a sequence lie: the index arithmetic that the CPU and the CUDA kernels share.
#pragma once

#include "args.h"

// Maps what one head of a sequence holds: a row's cell is its index among them, the row number itself when nothing is
// evicted.
struct lctx_cells {
    lctx_held held;

    LCTX_HD lctx_cells(const lctx_cache_args & cache, int32_t head, int32_t seq)
        : held(cache.held.data ? cache.held.of(head, seq) : lctx_held{}) {}
    LCTX_HD bool all() const { return !held.data; }
    // The first cell whose row is not before `row`.
    LCTX_HD int32_t cell(int32_t row) const { return all() ? row : held.cell(row); }
    LCTX_HD int32_t row(int32_t cell) const { return all() ? cell : held.rows()[cell]; }
};

// These find where a cell lies: its page, or unit where rows are staged, the row of the pools, and its key and value;
// near keys stand in a ring by row number. Tiles have rows between those that are read: what such rows are does not
// matter, but that they are memory does.
LCTX_HD inline int32_t lctx_page_of(const lctx_table_args & table, int32_t cell, int32_t head, int32_t seq) {
    return table.pages[seq * table.seq_stride + head * table.head_stride + (cell >> table.shift)];
}

// The row of a cell whose page is known.
LCTX_HD inline size_t lctx_row_in(const lctx_table_args & table, int32_t page, int32_t cell) {
    return ((size_t)page << table.shift) + (cell & ((1 << table.shift) - 1));
}

LCTX_HD inline size_t lctx_pool_row(const lctx_table_args & table, int32_t cell, int32_t head, int32_t seq) {
    return lctx_row_in(table, lctx_max(lctx_page_of(table, cell, head, seq), 0), cell);
}

LCTX_HD inline char * lctx_pool_at(const lctx_pool_args & pool, size_t row) {
    return (row < pool.n_row ? pool.data : pool.far) + row * pool.row_size;
}

// Latent attention: values are channels of the keys, and move with them.
LCTX_HD inline bool lctx_values_in_keys(const lctx_cache_args & cache) {
    return cache.v_pool.data >= cache.k_pool.data && cache.v_pool.data < cache.k_pool.data + cache.k_pool.row_size;
}

LCTX_HD inline char * lctx_value_row(const lctx_cache_args & cache, int32_t cell, int32_t head, int32_t seq) {
    return lctx_pool_at(cache.v_pool, lctx_pool_row(cache.table, cell, head, seq));
}

LCTX_HD inline char * lctx_key_row(const lctx_cache_args & cache, int32_t cell, int32_t head, int32_t seq) {
    return lctx_pool_at(cache.k_pool, lctx_pool_row(cache.table, cell, head, seq));
}

// Return whether the cell lies in a unit of staged pools: the table tells of others too.
LCTX_HD inline bool lctx_is_staged(const lctx_cache_args & cache, int32_t cell, int32_t head, int32_t seq) {
    const int32_t page = lctx_page_of(cache.table, cell, head, seq);
    return page >= 0 && (size_t)page << cache.table.shift < cache.k_pool.n_row;
}

// Rows that a head keeps at most.
LCTX_HD inline int32_t lctx_budget_of(const lctx_evict_args & a, int32_t head, int32_t seq) {
    return a.budgets ? a.budgets[seq * a.budget_stride + head] : a.params.retain.budget;
}

LCTX_HD inline char * lctx_near_row(const lctx_cache_args & cache, int32_t row, int32_t head, int32_t seq) {
    const lctx_near_args & near = cache.near;
    return near.data + seq * near.seq_stride + head * near.head_stride +
           (size_t)(row % near.rows) * cache.k_pool.row_size;
}
