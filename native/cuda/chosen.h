// Writes the chunks that *select* chooses where its readers find them (../ops/choices.h).
#pragma once

#include "scores.h"

// The segments of a token that chooses for itself: its runs, then the chunks.
struct lctx_chosen_segments {
    const lctx_select_args & a;
    int32_t token;      // whose ranges count
    lctx_segment * to;  // [n_segment]

    __device__ int n_most() const { return a.chunks.n_free; }
    __device__ static void put(lctx_segment * to, int32_t row0, int32_t row1, int32_t angle, int32_t seq) {
        *(uint4 *)to = {(unsigned)row0, (unsigned)row1, (unsigned)angle, (unsigned)seq};
    }
    // Chunk number i of those chosen, which lies in the range of a slot; one lane.
    __device__ void put_chunk(int chunk, int slot, int i) const {
        const int size = a.chunks.chunk_size;
        const lctx_segment & r = lctx_range_of(a, token, slot);
        put(to + a.chunks.n_run + i, chunk * size, (chunk + 1) * size, r.angle, r.seq);
    }
    // Write the runs, and empty segments after the n chunks; one warp.
    __device__ void put_rest(int n) const {
        const int n_run = a.chunks.n_run, n_given = a.chunks.n_given();
        for (int i = lctx_lane(); i < n_run; i += LCTX_WARP) {
            *(uint4 *)(to + i) = *(const uint4 *)(a.segs + (size_t)token * n_given + i);
        }
        for (int i = n_run + n + lctx_lane(); i < a.chunks.n_segment(); i += LCTX_WARP) {
            put(to + i, 0, 0, 0, a.rows[token].seq);
        }
    }
};
