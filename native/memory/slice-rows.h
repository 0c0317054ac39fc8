// Holds what is known of a stored slice (slice.h) when its header was read.
#pragma once

#include "cache-parts.h"
#include "state-io.h"

#include <string>
#include <vector>

struct lctx_slice {
    int32_t first, end;                      // positions
    std::vector<std::vector<int32_t>> rows;  // of every KV head, from `first` on; empty: every head has all

    int32_t n_row() const { return end - first; }
};

// Slices say which rows each head has: heads forget some when a text is compressed.
bool lctx_has_lists(const lctx_cache_parts & parts);

// Throws lctx_refusal.
void lctx_require_slice(bool ok, const std::string & reason);

// The next n rows of a plane, where they lie.
const uint8_t * lctx_slice_rows(lctx_state_reader & io, const lctx_plane & plane, int64_t n);

// Append rows [skip, skip + n) of a slice. When it throws, the sequence is as before.
void lctx_append_rows(lctx_cache_parts & parts, lctx_state_reader & io, int32_t seq, const lctx_slice & slice,
                      int32_t skip, int32_t n);
