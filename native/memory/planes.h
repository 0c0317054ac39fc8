// Planes: what a store keeps of its heads, each with five facts: the bytes of an entry, its key, which heads have it,
// how it grows, and when it is saved. States, slices, copies, memory, sizes and limits are loops over them: a new plane
// is a line in lctx_device_store.
#pragma once

#include "../base/counts.h"
#include "ggml.h"

#include <cstdint>

// Says what entry i of a head belongs to.
enum class lctx_plane_key {
    page,   // row i % 64 of page i / 64 of a pool, which the block table gives
    ring,   // the last row whose number is i modulo the number of entries
    cell,   // cell i
    chunk,  // complete chunk i
    query,  // a query of one of the two chunks that were begun last: two halves of a chunk
};

enum class lctx_plane_saved { never, in_states, in_slices };  // in_slices: in states too

// Says what saved entries must be.
enum class lctx_plane_values { any, finite, rows, scores, undo };

struct lctx_plane {
    ggml_tensor * tensor;
    size_t entry_size;
    size_t first, head_stride, seq_stride;  // bytes, of entry 0 of a head of a sequence in the tensor; pages: 0
    lctx_plane_key key;
    bool by_query;      // query heads have entries, else KV heads
    int32_t n_head;     // of the store
    int32_t n_entry;    // of a head at most; pages: 0
    int32_t rows_each;  // rows that an entry stands for; query: those of a half
    bool at_once;       // grows to n_entry with the first row, else with the rows
    lctx_plane_saved saved;
    lctx_plane_values values;
    uint64_t lctx_sizes::*counted_as;

    size_t offset(int32_t seq, int32_t head, int64_t entry) const {
        return first + seq * seq_stride + head * head_stride + entry * entry_size;
    }
    // Entries that a head has for n_row rows, of which it holds n_cell; pages are counted by their owners.
    int32_t used(int32_t n_row, int32_t n_cell) const;
    // Entries that need memory then.
    int32_t committed(int32_t n_row, int32_t n_cell) const {
        return at_once && n_row > 0 ? n_entry : used(n_row, n_cell);
    }
};
