// The far ranges of a query in chunks, of which *select* chooses.
#pragma once

#include "args.h"

LCTX_HD inline const lctx_segment & lctx_range_of(const lctx_select_args & a, int32_t token, int slot) {
    return a.segs[(size_t)token * a.chunks.n_given() + a.chunks.n_run + slot];
}

// Far range `slot` of a token, as chunks [first, end).
struct lctx_chunk_range {
    int first, end;

    LCTX_HD lctx_chunk_range(int first, int end) : first(first), end(end) {}
    LCTX_HD lctx_chunk_range() : lctx_chunk_range(0, 0) {}
    LCTX_HD lctx_chunk_range(const lctx_select_args & a, int32_t token, int slot) : lctx_chunk_range(0, 0) {
        const lctx_segment & s = lctx_range_of(a, token, slot);
        if (s.row0 < s.row1) {
            first = s.row0 / a.chunks.chunk_size, end = s.row1 / a.chunks.chunk_size;
        }
    }
    LCTX_HD bool empty() const { return first >= end; }
    LCTX_HD bool has(int chunk) const { return chunk >= first && chunk < end; }
    LCTX_HD lctx_chunk_range within(int lo, int hi) const { return {lctx_max(first, lo), lctx_min(end, hi)}; }
    // From the first chunk of both to the last.
    LCTX_HD lctx_chunk_range with(const lctx_chunk_range & r) const {
        return r.empty() ? *this : empty() ? r : lctx_chunk_range(lctx_min(first, r.first), lctx_max(end, r.end));
    }
};
