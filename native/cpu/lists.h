// Inverted lists of *attend* and *vote* for heads that chose their own chunks: chunk -> the columns that read it, so that every chunk is
// unpacked for all of them at once and its products are dense. Nothing as wide as the context, no private copy of K or V.
#pragma once

#include "columns.h"

#include <cstring>

// Blocks of tokens of one KV head; a column is a (token, query head) of a block, a bucket is a chunk in the pools or in the near ring.
struct lctx_list_plan {
    static constexpr int MAX_STATES = 1024;  // columns of a block: their outputs stay in the second-level cache
    static constexpr int MIN_TOKENS = 16;    // of a block, if there are so many
    static constexpr int JOBS_PER_THREAD = 4;

    int n_rep;        // query heads per KV head
    int n_choice;     // choices per KV head
    int token_block;  // most tokens of a block
    int n_bucket;

    const int32_t * token_start = nullptr;  // first token of every block, and the end
    int n_block = 0;

    lctx_list_plan(const lctx_attend_args & a, int n_thread) {
        n_rep = a.n_head / a.n_head_kv;
        n_choice = a.n_choice / a.n_head_kv;
        const int n_wanted = (int)lctx_ceil_div(JOBS_PER_THREAD * n_thread, a.n_head_kv);
        const int most = std::max(1, MAX_STATES / n_rep);
        token_block = std::min({std::max((int)lctx_ceil_div(a.n_tokens, n_wanted), MIN_TOKENS), most, a.n_tokens});
        const int n_chunk = (int)lctx_ceil_div((int64_t)a.cache.table.head_stride * LCTX_PAGE_ROWS, a.params.chunk_size);
        n_bucket = a.cache.near.data ? 2 * n_chunk : n_chunk;
    }
    void cut_tokens(const lctx_attend_args & a, int32_t * cut) const {
        lctx_cut_tokens(a.n_tokens, token_block, cut, [&](int32_t i) { return a.segs[(int64_t)i * a.n_choice * a.n_seg].seq; });
    }
    void use_cut(const int32_t * cut) {
        n_block = cut[0];
        token_start = cut + 1;
    }
};

struct lctx_list_block {
    int head_kv, token0, n_token, n_column;

    lctx_list_block(const lctx_list_plan & g, int head_kv, int index) : head_kv(head_kv) {
        token0 = g.token_start[index];
        n_token = g.token_start[index + 1] - token0;
        n_column = n_token * g.n_rep;
    }
    int token(const lctx_list_plan & g, int column) const { return token0 + column / g.n_rep; }
    int head(const lctx_list_plan & g, int column) const { return head_kv * g.n_rep + column % g.n_rep; }
};

// A column that reads a chunk.
struct lctx_list_entry {
    int32_t column;
    int32_t seg;
};

// entries[start[b] .. start[b + 1]) are the columns that read bucket b, ascending.
struct lctx_lists {
    int32_t * start;            // [n_bucket + 1]
    lctx_list_entry * entries;  // [token_block * n_rep * n_seg]

    static size_t size(const lctx_attend_args & a, const lctx_list_plan & g) {
        return (g.n_bucket + 1) * sizeof(int32_t) + (size_t)g.token_block * g.n_rep * a.n_seg * sizeof(lctx_list_entry);
    }
    lctx_lists(void * base, const lctx_list_plan & g) : start((int32_t *)base), entries((lctx_list_entry *)(start + g.n_bucket + 1)) {}
    int count(int bucket) const { return start[bucket + 1] - start[bucket]; }
};

static inline bool lctx_is_near(const lctx_attend_args & a, int64_t seg) {
    return a.cache.near.data && seg % a.n_seg >= a.params.near_from;
}

// f(bucket, column, index of the segment) for every segment of the block that spans rows.
template <typename F>
static inline void lctx_each_segment(const lctx_attend_args & a, const lctx_list_plan & g, const lctx_list_block & b, F && f) {
    const int heads_per_choice = g.n_rep / g.n_choice;
    const int near_bucket = g.n_bucket / 2;
    for (int c = 0; c < b.n_token * g.n_choice; c++) {
        const int64_t first = ((int64_t)(b.token0 + c / g.n_choice) * a.n_choice + b.head_kv * g.n_choice + c % g.n_choice) * a.n_seg;
        for (int i = 0; i < a.n_seg; i++) {
            const lctx_segment & sg = a.segs[first + i];
            if (sg.row0 >= sg.row1) {
                continue;
            }
            const int bucket = sg.row0 / a.params.chunk_size + (lctx_is_near(a, i) ? near_bucket : 0);
            for (int h = 0; h < heads_per_choice; h++) {
                f(bucket, c * heads_per_choice + h, (int32_t)(first + i));
            }
        }
    }
}

// A counting sort of the block's segments by bucket.
static inline void lctx_invert(const lctx_attend_args & a, const lctx_list_plan & g, const lctx_list_block & b, const lctx_lists & lists) {
    int32_t * start = lists.start;
    std::fill_n(start, g.n_bucket + 1, 0);
    lctx_each_segment(a, g, b, [&](int bucket, int, int32_t) { start[bucket + 1]++; });
    for (int i = 0; i < g.n_bucket; i++) {
        start[i + 1] += start[i];
    }
    lctx_each_segment(a, g, b, [&](int bucket, int column, int32_t seg) { lists.entries[start[bucket]++] = {column, seg}; });
    for (int i = g.n_bucket; i > 0; i--) {
        start[i] = start[i - 1];
    }
    start[0] = 0;
}

// Slots that any of the entries reads, and slots that all of them read.
struct lctx_list_range {
    int lo, hi, all_lo, all_hi;

    lctx_list_range(const lctx_attend_args & a, const lctx_slots & slots, const lctx_list_entry * e, int n) {
        int row0 = a.segs[e[0].seg].row0, row1 = a.segs[e[0].seg].row1, all_row0 = row0, all_row1 = row1;
        for (int i = 1; i < n; i++) {
            const lctx_segment & sg = a.segs[e[i].seg];
            row0 = std::min(row0, sg.row0), all_row0 = std::max(all_row0, sg.row0);
            row1 = std::max(row1, sg.row1), all_row1 = std::min(all_row1, sg.row1);
        }
        lo = slots.slot(row0), hi = slots.slot(row1), all_lo = slots.slot(all_row0), all_hi = slots.slot(all_row1);
    }
    // The end of the slots from `slot` on that lie in its page.
    int block_hi(int slot) const { return std::min(hi, (slot / LCTX_BLOCK + 1) * LCTX_BLOCK); }
    bool is_partial(int slot, int n) const { return slot < all_lo || slot + n > all_hi; }
};

// Rotate the queries of n entries to the positions from which they look at the chunk. rotated: [head_dim_k].
static inline void lctx_load_queries(const lctx_attend_args & a, const lctx_list_plan & g, const lctx_list_block & b,
                                     const lctx_list_entry * e, const lctx_columns & columns, float * rotated) {
    const float scale = lctx_query_scale(a.params.scale, a.params.softcap);
    columns.clear();
    for (int i = 0; i < columns.n; i++) {
        const float * q = (const float *)(a.q + b.head(g, e[i].column) * a.q_head_stride + b.token(g, e[i].column) * a.q_token_stride);
        const float * cs = a.angles + (size_t)a.segs[e[i].seg].angle * a.n_dims;
        lctx_rotate_row(q, rotated, a.head_dim_k, cs, a.n_dims, a.params.rope_mode);
        columns.set(i, rotated, scale);
    }
}

// Take away what an entry does not read: score of slot x and entry i at s[x * slot_step + i * column_step], row_of(x) its row.
template <typename F> static inline void lctx_list_mask(const lctx_attend_args & a, const lctx_list_entry * e, int n_entry, int n,
                                                        float * s, int slot_step, int column_step, F && row_of) {
    for (int i = 0; i < n_entry; i++) {
        const lctx_segment & sg = a.segs[e[i].seg];
        for (int x = 0; x < n; x++) {
            const int row = row_of(x);
            if (row < sg.row0 || row >= sg.row1) {
                s[x * slot_step + i * column_step] = -INFINITY;
            }
        }
    }
}
