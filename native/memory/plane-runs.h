// Loops over the planes of a sequence: what a state or a slice has of them, and copies.
#pragma once

#include "placement.h"
#include "sequences.h"

#include <functional>

// Says what is saved of a sequence: all of it in a state, or rows [first, end) in a slice.
struct lctx_extent {
    lctx_plane_saved saved;
    int32_t first, end;
};

// A run of bytes: offset and size in the tensor of a plane.
using lctx_run_visitor = std::function<void(lctx_device_store &, const lctx_plane &, size_t, size_t)>;

// The whole of a sequence.
inline lctx_extent lctx_whole(const lctx_sequences & seqs, int32_t seq) {
    return {lctx_plane_saved::in_states, 0, seqs.n_pos(seq)};
}

// Every run of bytes that `what` has of a sequence, in the order of states and slices: for every head its rows, block
// by block, K before V, and its near keys; then for every head the lists of rows and their scores, then summaries, then
// queries.
void lctx_each_run(const lctx_placement & placement, const lctx_sequences & seqs, int32_t seq, const lctx_extent & what,
                   const lctx_run_visitor & f);

// Copy the entries that dst has in planes outside the pages from src.
void lctx_copy_planes(const lctx_placement & placement, const lctx_sequences & seqs, int32_t src, int32_t dst);
