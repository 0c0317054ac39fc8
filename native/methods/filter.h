// Selection as a filter on the segments of a base: which rows a query reads whole, and from which chunks it chooses
// (ops/chunks.h).
#pragma once

#include "method.h"

class lctx_filter {
  public:
    // The base outlives the filter. chunks: chunk_size, n_free and n_recent are set; the filter adds n_run and n_range.
    // Queries before row `from` do not choose.
    lctx_filter(const lctx_method & base, lctx_chunks & chunks, int32_t from);

    // Queries before row `from` do not choose from now on.
    void set_from(int32_t from) { from_ = from; }
    // Return whether the query at p chooses: else it reads the segments of the base.
    bool selects(int32_t p) const { return p >= from_ && n_far(p, p) > chunks_.n_free; }
    // Return whether the tokens from p on are a tile: not where a segment of the base begins much further on for the
    // last of them, since rows that they see from different angles are read whole.
    bool is_tile(int32_t p) const;
    bool tile_selects(int32_t p) const {
        return is_tile(p) && p >= from_ && n_far(p, p + chunks_.tile - 1) > chunks_.n_shared;
    }
    // n_run runs and n_range ranges of the query at p; the angles are the base's.
    void segments(int32_t p, lctx_segment * segs) const { write(p, p, p, selects(p), segs); }
    // Write the segments of the query at p in the tile that begins at `first`: its queries read the same rows whole,
    // each up to its own.
    void tile_segments(int32_t first, int32_t p, lctx_segment * segs) const {
        write(p, first, first + chunks_.tile - 1, tile_selects(first), segs);
    }
    // Chunks that a query reads at most, in whole or in part.
    int32_t n_read() const;
    // Return which runs read the near ring, a bit for each.
    uint32_t near_mask() const;

  private:
    struct interval {
        int32_t first, end;
        int32_t size() const { return end > first ? end - first : 0; }
    };
    static constexpr int32_t MOST = 4;  // segments of a base
    static constexpr int32_t RUNS = 2;  // of a segment: at the beginning of the text or where an angle ends, and nearby
    struct whole {                      // what a query reads whole: ascending, apart
        interval at[2 + MOST];
        int32_t n = 0;
        void add(int32_t first, int32_t end);
    };

    // Of the queries at [p, last]:
    int32_t first_near(int32_t p) const;
    whole read_whole(int32_t p, int32_t last) const;
    int32_t n_far(int32_t p, int32_t last) const;
    // Segments of the query at p, which reads whole what those at [first, last] do.
    void write(int32_t p, int32_t first, int32_t last, bool chooses, lctx_segment * segs) const;

    const lctx_method & base_;
    const lctx_chunks & chunks_;
    const int32_t n_base_;
    int32_t from_;
};
