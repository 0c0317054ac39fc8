// The walk of *attend* and *vote* over stored rows, as cuda/walk.h: tiles of columns, one per (token, query head) of
// one KV head, and the items of cells that they read.
//
// An item is what columns read of one chunk, or of one segment that may be any rows: a run, or where all heads read the
// same. The lists "column -> segments" are inverted, so that an item is unpacked once for all columns that read it and
// its products are dense. Nothing is as wide as the context, and there is no private copy of K or V.
#pragma once

#include "lookups.h"
#include "tiling.h"

#include <climits>

// A column that reads an item.
struct lctx_reader {
    int32_t column;
    int32_t seg;    // index of its segment among all
    int32_t angle;  // of that: segments are far apart
};

// Holds what the columns of a tile read, ascending: readers[start[i] .. start[i + 1]) are the columns that read
// bucket[i], ascending. Parts of the tile find theirs by the cells or by the running number of blocks.
struct lctx_tile_plan {
    int32_t *cursor, *chunk;  // [max_column]  while lists are merged: where they are, and the chunk there
    int32_t & n;              // items
    int32_t * bucket;         // [n_item]
    int32_t * start;          // [n_item + 1]
    int32_t *lo, *hi;         // [n_item]  cells that any column reads
    int32_t * n_before;       // [n_item + 1]  blocks of the items before
    lctx_reader * readers;    // [max_column * n_seg]

    static size_t size(const lctx_attend_args & a, const lctx_tiling & t) {
        return (5 * (size_t)t.n_item + 3 + 2 * t.max_column) * sizeof(int32_t) +
               (size_t)t.max_column * a.n_seg * sizeof(lctx_reader);
    }
    lctx_tile_plan(void * base, const lctx_tiling & t)
        : cursor((int32_t *)base),
          chunk(cursor + t.max_column),
          n(chunk[t.max_column]),
          bucket(&n + 1),
          start(bucket + t.n_item),
          lo(start + t.n_item + 1),
          hi(lo + t.n_item),
          n_before(hi + t.n_item),
          readers((lctx_reader *)(n_before + t.n_item + 1)) {}
    int n_block() const { return n > 0 ? n_before[n] : 0; }
    // The item with block number `block`, or before it where that has none; the first item from this block on.
    int item_of(int block) const { return (int)(std::upper_bound(n_before, n_before + n + 1, block) - n_before) - 1; }
    int item_from(int block) const { return (int)(std::lower_bound(n_before, n_before + n + 1, block) - n_before); }
};

// The queries of a tile at the few angles from which they look at chunks, rotated, transformed and scaled once:
// [n_angle][max_column][head_dim_k].
struct lctx_turned {
    static constexpr int MOST = 3;  // angles

    float * rows = nullptr;  // nullptr: queries are rotated item by item
    int max_column = 0, dim = 0, n_angle = 0;

    static bool pays(const lctx_attend_args & a) { return a.params.chunk_size > 0 && a.n_angle <= MOST; }
    static size_t size(const lctx_attend_args & a, const lctx_tiling & t) {
        return pays(a) ? (size_t)a.n_angle * t.max_column * a.head_dim_k * sizeof(float) : 0;
    }
    lctx_turned() = default;
    lctx_turned(void * base, const lctx_attend_args & a, const lctx_tiling & t)
        : rows(pays(a) ? (float *)base : nullptr), max_column(t.max_column), dim(a.head_dim_k), n_angle(a.n_angle) {}
    float * row(int angle, int column) const { return rows + ((size_t)angle * max_column + column) * dim; }
    void fill(const lctx_attend_args & a, const lctx_tile & tile) const;
    // The query of a reader as its segment sees it.
    const float * of(const lctx_reader & reader, const lctx_tile & tile) const {
        return row(reader.angle - tile.token(reader.column) * n_angle, reader.column);
    }
};

// A query rotated to a row of the angle table and transformed as keys are; to: [head_dim_k].
static inline void lctx_turn_query(const lctx_attend_args & a, const lctx_tile & tile, int column, int32_t angle,
                                   float * to) {
    const float * q =
        (const float *)(a.q + tile.head(column) * a.q_head_stride + tile.token(column) * a.q_token_stride);
    lctx_rotate_row(q, to, a.head_dim_k, a.angles + (size_t)angle * a.n_dims, a.n_dims, a.params.rope_mode);
    lctx_transform(to, a.head_dim_k, a.params.hadamard.k);
}

// With the scale of the scores.
inline void lctx_turned::fill(const lctx_attend_args & a, const lctx_tile & tile) const {
    for (int angle = 0; rows && angle < n_angle; angle++) {
        for (int c = 0; c < tile.n_column; c++) {
            lctx_turn_query(a, tile, c, tile.token(c) * n_angle + angle, row(angle, c));
            for (int d = 0; d < dim; d++) {
                row(angle, c)[d] *= lctx_query_scale(a.params.scale, a.params.softcap);
            }
        }
    }
}

static inline bool lctx_is_near(const lctx_attend_args & a, int64_t seg) {
    return a.params.near_mask != 0 && (a.params.near_mask >> seg % a.n_seg & 1);
}

// Columns that follow each other and read the same.
static inline int lctx_together(const lctx_attend_args & a, const lctx_tile & tile) {
    return std::min(a.n_head / a.n_choice, tile.n_head);
}

// The first segment of the list of a column.
static inline int64_t lctx_first_segment(const lctx_attend_args & a, const lctx_tile & tile, int column) {
    return ((int64_t)a.choices().index(tile.token(column)) * a.n_choice + tile.head(column) / (a.n_head / a.n_choice)) *
           a.n_seg;
}

// Writes items in their order. Columns that read the same are together, and have one list.
class lctx_plan_writer {
  public:
    const lctx_attend_args & a;
    const lctx_tile & tile;
    const lctx_tile_plan & plan;
    const int n_together, n_list;

    lctx_plan_writer(const lctx_attend_args & a, const lctx_tile & tile, const lctx_tile_plan & plan)
        : a(a), tile(tile), plan(plan), n_together(lctx_together(a, tile)), n_list(tile.n_column / n_together) {
        plan.n = 0;
    }
    int64_t first(int list) const { return lctx_first_segment(a, tile, list * n_together); }
    void begin(int bucket) { plan.bucket[plan.n] = bucket, plan.start[plan.n++] = n_reader_; }
    // A list of the item reads it by a segment.
    void add(int list, int64_t seg) {
        for (int h = 0; h < n_together; h++) {
            plan.readers[n_reader_++] = {list * n_together + h, (int32_t)seg, a.segs[seg].angle};
        }
    }
    // Runs stay also where they are empty, so that an item of them has all columns in their order.
    void add_runs(int n_run) {
        for (int run = 0; run < n_run; run++) {
            begin(run);
            for (int list = 0; list < n_list; list++) {
                add(list, first(list) + run);
            }
        }
    }
    void end() { plan.start[plan.n] = n_reader_; }

  private:
    int n_reader_ = 0;
};

// Merges the lists of the columns, which ascend.
static inline void lctx_merge_segments(const lctx_attend_args & a, const lctx_tiling & t, const lctx_tile & tile,
                                       const lctx_tile_plan & plan) {
    lctx_plan_writer to(a, tile, plan);
    to.add_runs(t.n_run);
    const auto find = [&](int list, int32_t seg) {
        const int64_t first = to.first(list);
        for (; seg < a.n_seg && a.segs[first + seg].row0 >= a.segs[first + seg].row1; seg++) {
        }
        plan.cursor[list] = seg;
        plan.chunk[list] = seg < a.n_seg ? a.segs[first + seg].row0 / a.params.chunk_size : INT_MAX;
    };
    for (int list = 0; list < to.n_list; list++) {
        find(list, t.n_run);
    }
    for (int next; (next = *std::min_element(plan.chunk, plan.chunk + to.n_list)) != INT_MAX;) {
        to.begin(t.n_run + next);
        for (int list = 0; list < to.n_list; list++) {
            if (plan.chunk[list] == next) {
                to.add(list, to.first(list) + plan.cursor[list]);
                find(list, plan.cursor[list] + 1);
            }
        }
    }
    to.end();
}

// Holds what up to LCTX_MAX_COLUMNS readers read of an item: cells that any of them reads, and cells that all of them
// read.
struct lctx_item {
    const lctx_reader * readers;
    int n;
    bool near;
    int32_t head_kv, seq;
    lctx_cells cells;
    int lo = 0, hi = 0, all_lo = 0, all_hi = 0;
    int next = -1;          // first cell of the item that follows, for prefetches
    bool is_chunk = false;  // else a run

    lctx_item(const lctx_attend_args & a, int head_kv, const lctx_reader * readers, int n)
        : readers(readers),
          n(n),
          near(lctx_is_near(a, readers[0].seg)),
          head_kv(head_kv),
          seq(a.segs[readers[0].seg].seq),
          cells(a.cache, head_kv, seq) {
        int row0 = INT_MAX, row1 = 0, all_row0 = 0, all_row1 = INT_MAX;
        for (int i = 0; i < n; i++) {
            const lctx_segment & sg = a.segs[readers[i].seg];
            if (sg.row0 < sg.row1) {
                row0 = std::min(row0, sg.row0), row1 = std::max(row1, sg.row1);
            }
            all_row0 = std::max(all_row0, sg.row0), all_row1 = std::min(all_row1, sg.row1);
        }
        if (row0 < row1) {
            lo = cells.cell(row0), hi = cells.cell(row1), all_lo = cells.cell(all_row0), all_hi = cells.cell(all_row1);
            lo -= a.params.fixed ? lo % LCTX_VL : 0;  // the lane of a cell does not depend on the other readers
        }
    }
    // Cells [lo, hi), which all readers read.
    lctx_item(const lctx_attend_args & a, int head_kv, const lctx_reader * readers, int n, int lo, int hi)
        : readers(readers),
          n(n),
          near(false),
          head_kv(head_kv),
          seq(a.segs[readers[0].seg].seq),
          cells(a.cache, head_kv, seq),
          lo(lo),
          hi(hi),
          all_lo(lo),
          all_hi(hi) {}
    int first_block() const { return lo / LCTX_BLOCK; }
    int n_block() const { return lo < hi ? (int)lctx_ceil_div(hi, LCTX_BLOCK) - first_block() : 0; }
    // Slots of block b that are read.
    int block_lo(int b) const { return std::max(lo, b * LCTX_BLOCK); }
    int block_hi(int b) const { return std::min(hi, (b + 1) * LCTX_BLOCK); }
    bool is_partial(int cell, int n_cell) const { return cell < all_lo || cell + n_cell > all_hi; }

    // The queries of the readers at the positions from which they look, from `turned` where it has them. rotated:
    // [head_dim_k].
    void load_queries(const lctx_attend_args & a, const lctx_tile & tile, const lctx_columns & columns, float * rotated,
                      const lctx_turned & turned = {}) const {
        const float scale = lctx_query_scale(a.params.scale, a.params.softcap);
        columns.clear();
        for (int i = 0; i < n; i++) {
            if (!turned.rows) {
                lctx_turn_query(a, tile, readers[i].column, readers[i].angle, rotated);
            }
            columns.set(i, turned.rows ? turned.of(readers[i], tile) : rotated, turned.rows ? 1.0f : scale);
        }
    }
    // Take away what a reader does not read: score of cell cell_of(x) and reader i at s[x * cell_step + i *
    // column_step].
    template <typename F>
    void mask(const lctx_attend_args & a, int n_cell, float * s, int cell_step, int column_step, F && cell_of) const {
        for (int i = 0; i < n; i++) {
            const int first = cells.cell(a.segs[readers[i].seg].row0), end = cells.cell(a.segs[readers[i].seg].row1);
            for (int x = 0; x < n_cell; x++) {
                const int cell = cell_of(x);
                if (cell < first || cell >= end) {
                    s[x * cell_step + i * column_step] = -INFINITY;
                }
            }
        }
    }
};

// f(readers, n) for the readers of an item, up to LCTX_MAX_COLUMNS at a time.
template <typename F> static inline void lctx_each_readers(const lctx_tile_plan & plan, int item, F && f) {
    for (int i = plan.start[item], end = plan.start[item + 1]; i < end; i += LCTX_MAX_COLUMNS) {
        f(plan.readers + i, std::min(LCTX_MAX_COLUMNS, end - i));
    }
}

// Find the cells of the items, and count their blocks.
static inline void lctx_locate(const lctx_attend_args & a, const lctx_tiling & t, int head_kv,
                               const lctx_tile_plan & plan) {
    const int size = a.params.chunk_size;
    plan.n_before[0] = 0;
    for (int i = 0; i < plan.n; i++) {
        int32_t &lo = plan.lo[i], &hi = plan.hi[i], n_block = 0;
        const int chunk = plan.bucket[i] - t.n_run;
        const bool is_whole = chunk >= 0 && t.is_whole;
        if (is_whole) {
            const lctx_cells cells(a.cache, head_kv, a.segs[plan.readers[0].seg].seq);
            lo = cells.cell(chunk * size), hi = cells.cell((chunk + 1) * size);
        } else {
            lo = INT_MAX, hi = 0;
        }
        lctx_each_readers(plan, i, [&](const lctx_reader * readers, int n) {
            const lctx_item item =
                is_whole ? lctx_item(a, head_kv, readers, n, lo, hi) : lctx_item(a, head_kv, readers, n);
            lo = item.lo < item.hi ? std::min(lo, item.lo) : lo, hi = std::max(hi, item.hi);
            n_block += item.n_block();
        });
        plan.n_before[i + 1] = plan.n_before[i] + n_block;
    }
}

// Look up what a tile reads; once for all its parts.
static inline void lctx_invert(const lctx_attend_args & a, const lctx_tiling & t, const lctx_tile & tile,
                               const lctx_tile_plan & plan) {
    lctx_merge_segments(a, t, tile, plan);
    lctx_locate(a, t, tile.head_kv, plan);
    lctx_lookups::segments += tile.n_column * a.n_seg;
}

// f(item) for items [first, end), in the order of the buckets, up to LCTX_MAX_COLUMNS readers at a time.
template <typename F> static inline void lctx_each_item(const lctx_attend_args & a, const lctx_tiling & t, int head_kv,
                                                        const lctx_tile_plan & plan, int first, int end, F && f) {
    for (int at = first; at < end; at++) {
        lctx_each_readers(plan, at, [&](const lctx_reader * readers, int n) {
            const int chunk = plan.bucket[at] - t.n_run;
            lctx_item item = chunk >= 0 && t.is_whole ? lctx_item(a, head_kv, readers, n, plan.lo[at], plan.hi[at])
                                                      : lctx_item(a, head_kv, readers, n);
            item.is_chunk = chunk >= 0;
            item.next = item.is_chunk && at + 1 < plan.n && plan.lo[at + 1] < plan.hi[at + 1] ? plan.lo[at + 1] : -1;
            f(item);
        });
    }
    lctx_lookups::items += std::max(0, end - first);
}
