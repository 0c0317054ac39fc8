// The walk of *attend* and *vote* over stored rows, as cuda/walk.h: tiles of columns, one per (token, query head) of one KV head, and the
// spans of cells that they read.
//
// A span is what columns read of one chunk, or of one segment where all heads read the same. The lists "column -> segments" are inverted,
// so that a span is unpacked once for all columns that read it and its products are dense. Nothing is as wide as the context, and there
// is no private copy of K or V.
#pragma once

#include "columns.h"

#include <climits>

// How the tokens and heads are cut. The sizes depend on shapes and threads only; the cut of the tokens also on their sequences.
struct lctx_tiling {
    static constexpr int MAX_STATES = 1024;  // columns of a tile that reads chunks: their outputs stay in the second-level cache
    static constexpr int MIN_TOKENS = 16;    // of such a tile, if there are so many
    static constexpr int TILES_PER_THREAD = 4;

    int n_rep;        // query heads per KV head
    int head_block;   // query heads of a tile
    int token_block;  // most tokens of a tile
    int n_head_tile;
    int max_column;  // padded to vector width
    int n_bucket;    // spans: chunks, or segments
    bool by_chunk;

    const int32_t * token_start = nullptr;  // first token of every token tile, and the end
    int n_token_tile = 0;

    lctx_tiling(const lctx_attend_args & a, int n_thread) : n_rep(a.n_head / a.n_head_kv), by_chunk(a.params.chunk_size > 0) {
        if (by_chunk) {
            const int n_wanted = (int)lctx_ceil_div(TILES_PER_THREAD * n_thread, a.n_head_kv);
            const int most = std::max(1, MAX_STATES / n_rep);
            head_block = n_rep;
            token_block = std::min(std::max((int)lctx_ceil_div(a.n_tokens, n_wanted), MIN_TOKENS), most);
            const int n_chunk = (int)lctx_ceil_div((int64_t)a.cache.table.head_stride * LCTX_PAGE_ROWS, a.params.chunk_size);
            n_bucket = n_chunk;
        } else {
            head_block = std::min(n_rep, LCTX_MAX_COLUMNS);
            token_block = LCTX_MAX_COLUMNS / head_block;
            n_bucket = a.n_seg;
        }
        token_block = std::min(token_block, a.n_tokens);
        n_head_tile = (int)lctx_ceil_div(n_rep, head_block);
        max_column = lctx_round_up(head_block * token_block, LCTX_VL);
    }
    // A tile ends where the sequence changes. cut: int32 [n_tokens + 2].
    void cut_tokens(const lctx_attend_args & a, int32_t * cut) const {
        lctx_cut_tokens(a.n_tokens, token_block, cut, [&](int32_t i) { return a.segs[(int64_t)i * a.n_choice * a.n_seg].seq; });
    }
    void use_cut(const int32_t * cut) {
        n_token_tile = cut[0];
        token_start = cut + 1;
    }
    int tiles_per_head() const { return n_head_tile * n_token_tile; }
    // Columns of one product.
    int max_reader() const { return std::min(max_column, LCTX_MAX_COLUMNS); }
};

// Columns (token0 .. token0 + n_token) x (head0 .. head0 + n_head) of KV head head_kv.
struct lctx_tile {
    int head_kv, head0, n_head, token0, n_token, n_column;

    lctx_tile(const lctx_tiling & t, int head_kv, int head_tile, int token_tile) : head_kv(head_kv) {
        token0 = t.token_start[token_tile];
        n_token = t.token_start[token_tile + 1] - token0;
        head0 = head_kv * t.n_rep + head_tile * t.head_block;
        n_head = std::min(t.head_block, t.n_rep - head_tile * t.head_block);
        n_column = n_head * n_token;
    }
    int token(int column) const { return token0 + column / n_head; }
    int head(int column) const { return head0 + column % n_head; }
};

// A column that reads a span.
struct lctx_reader {
    int32_t column;
    int32_t seg;  // index of its segment among all
};

// readers[start[b] .. start[b + 1]) are the columns that read bucket b, ascending.
struct lctx_spans {
    int32_t * start;        // [n_bucket + 1]
    lctx_reader * readers;  // [max_column * n_seg]

    static size_t size(const lctx_attend_args & a, const lctx_tiling & t) {
        return (t.n_bucket + 1) * sizeof(int32_t) + (size_t)t.max_column * a.n_seg * sizeof(lctx_reader);
    }
    lctx_spans(void * base, const lctx_tiling & t) : start((int32_t *)base), readers((lctx_reader *)(start + t.n_bucket + 1)) {}
};

static inline bool lctx_is_near(const lctx_attend_args & a, int64_t seg) {
    return a.params.near_mask != 0 && (a.params.near_mask >> seg % a.n_seg & 1);
}

// f(bucket, column, index of the segment). Segments of chunks without rows are left out; those that all heads read stay, so that a span
// has all columns in their order.
template <typename F>
static inline void lctx_each_segment(const lctx_attend_args & a, const lctx_tiling & t, const lctx_tile & tile, F && f) {
    const int heads_per_choice = a.n_head / a.n_choice, n_together = std::min(heads_per_choice, tile.n_head);
    for (int c = 0; c < tile.n_column; c += n_together) {
        const int64_t first = ((int64_t)tile.token(c) * a.n_choice + tile.head(c) / heads_per_choice) * a.n_seg;
        for (int i = 0; i < a.n_seg; i++) {
            const lctx_segment & sg = a.segs[first + i];
            if (t.by_chunk && sg.row0 >= sg.row1) {
                continue;
            }
            const int bucket = t.by_chunk ? sg.row0 / a.params.chunk_size : i;
            for (int h = 0; h < n_together; h++) {
                f(bucket, c + h, (int32_t)(first + i));
            }
        }
    }
}

// A counting sort of the tile's segments by bucket.
static inline void lctx_invert(const lctx_attend_args & a, const lctx_tiling & t, const lctx_tile & tile, const lctx_spans & spans) {
    int32_t * start = spans.start;
    std::fill_n(start, t.n_bucket + 1, 0);
    lctx_each_segment(a, t, tile, [&](int bucket, int, int32_t) { start[bucket + 1]++; });
    for (int i = 0; i < t.n_bucket; i++) {
        start[i + 1] += start[i];
    }
    lctx_each_segment(a, t, tile, [&](int bucket, int column, int32_t seg) { spans.readers[start[bucket]++] = {column, seg}; });
    for (int i = t.n_bucket; i > 0; i--) {
        start[i] = start[i - 1];
    }
    start[0] = 0;
}

// What up to LCTX_MAX_COLUMNS readers read of a span: cells that any of them reads, and cells that all of them read.
struct lctx_span {
    const lctx_reader * readers;
    int n;
    bool near;
    int32_t head_kv, seq;
    lctx_cells cells;
    int lo = 0, hi = 0, all_lo = 0, all_hi = 0;
    int next = -1;  // first cell of the span that follows, for prefetches

    lctx_span(const lctx_attend_args & a, int head_kv, const lctx_reader * readers, int n)
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
        }
    }
    int first_block() const { return lo / LCTX_BLOCK; }
    int n_block() const { return lo < hi ? (int)lctx_ceil_div(hi, LCTX_BLOCK) - first_block() : 0; }
    // Slots of block b that are read.
    int block_lo(int b) const { return std::max(lo, b * LCTX_BLOCK); }
    int block_hi(int b) const { return std::min(hi, (b + 1) * LCTX_BLOCK); }
    bool is_partial(int cell, int n_cell) const { return cell < all_lo || cell + n_cell > all_hi; }

    // Rotate the queries of the readers to the positions from which they look, and transform them as keys are. rotated: [head_dim_k].
    void load_queries(const lctx_attend_args & a, const lctx_tile & tile, const lctx_columns & columns, float * rotated) const {
        const float scale = lctx_query_scale(a.params.scale, a.params.softcap);
        columns.clear();
        for (int i = 0; i < n; i++) {
            const int token = tile.token(readers[i].column), head = tile.head(readers[i].column);
            const float * q = (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
            const float * cs = a.angles + (size_t)a.segs[readers[i].seg].angle * a.n_dims;
            lctx_rotate_row(q, rotated, a.head_dim_k, cs, a.n_dims, a.params.rope_mode);
            lctx_transform(rotated, a.head_dim_k, a.params.hadamard.k);
            columns.set(i, rotated, scale);
        }
    }
    // Take away what a reader does not read: score of cell cell_of(x) and reader i at s[x * cell_step + i * column_step].
    template <typename F> void mask(const lctx_attend_args & a, int n_cell, float * s, int cell_step, int column_step, F && cell_of) const {
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

// f(span) in the order of the buckets, up to LCTX_MAX_COLUMNS readers at a time.
template <typename F>
static inline void lctx_each_span(const lctx_attend_args & a, const lctx_tiling & t, int head_kv, const lctx_spans & spans, F && f) {
    const int n_reader = spans.start[t.n_bucket];
    for (int bucket = 0; bucket < t.n_bucket; bucket++) {
        for (int i = spans.start[bucket], end = spans.start[bucket + 1]; i < end; i += LCTX_MAX_COLUMNS) {
            lctx_span span(a, head_kv, spans.readers + i, std::min(LCTX_MAX_COLUMNS, end - i));
            if (t.by_chunk && i + span.n < n_reader) {
                span.next = span.cells.cell(a.segs[spans.readers[i + span.n].seg].row0);
            }
            f(span);
        }
    }
}
