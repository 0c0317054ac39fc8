// The kernels take these arguments: raw pointers and strides in bytes, no graph. nodes.h fills them from a node; the
// CPU and the CUDA kernels share them.
#pragma once

#include "ops.h"
#include "row-file.h"

#include <cstddef>
#include <cstdint>

struct lctx_angles_args {
    const int32_t * pos;         // [n]
    const float * freq_factors;  // [n_dims/2] or nullptr
    float * dst;                 // [n][n_dims]
    int64_t n;
    lctx_rope rope;
};

// Rows of one kind: where a row of (page, head, sequence) lies.
struct lctx_pool_args {
    char * data;
    ggml_type type;
    size_t row_size;
    char * far = nullptr;     // where row 0 would be of those from n_row on: they lie elsewhere
    size_t n_row = SIZE_MAX;  // rows at data
};

struct lctx_table_args {
    const int32_t * pages;  // pages[seq][head][row >> shift]
    size_t head_stride;     // in elements
    size_t seq_stride;
    int32_t shift = LCTX_PAGE_SHIFT;  // else entries are of units (staging.h)
};

struct lctx_near_args {
    char * data;         // nullptr: no near ring
    size_t head_stride;  // in bytes
    size_t seq_stride;
    int64_t rows;
};

// Points to what every head of every sequence holds.
struct lctx_held_args {
    int32_t * data;  // of all layers (lctx_held::of); nullptr: all rows
    int64_t n;       // heads of all sequences there
    int32_t n_head;  // of one sequence
    int32_t first;   // of these heads among them
    int32_t n_row_max;

    LCTX_HD lctx_held of(int32_t head, int32_t seq) const {
        return lctx_held::of(data, n, (int64_t)seq * n_head + first + head, n_row_max);
    }
};

// The rows of one layer.
struct lctx_cache_args {
    lctx_pool_args k_pool;
    lctx_pool_args v_pool;
    lctx_table_args table;
    lctx_near_args near;
    lctx_held_args held;
    lctx_pool_args index = {};  // rows of lctx_index_shape; data is nullptr: there is none
};

struct lctx_store_args {
    const char * k;  // F32 rows at k + head*k_head_stride + token*k_token_stride
    const char * v;
    size_t k_head_stride;
    size_t k_token_stride;
    size_t v_head_stride;
    size_t v_token_stride;
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t n_head_kv;
    int32_t n_tokens;
    lctx_cache_args cache;
    const lctx_row * rows;  // [n_tokens]
    const float * angles;   // [*][n_dims]
    int32_t n_dims;
    const float * center;  // [n_head_kv][head_dim_k], subtracted from rotated keys; nullptr: nothing is
    lctx_store_params params;
    lctx_row_file * file;  // of the pools, or nullptr
};

struct lctx_index_args {
    lctx_cache_args cache;  // without V
    const lctx_row * rows;  // [n_rows]
    int32_t n_rows;
    int32_t n_head_kv;
    int32_t hadamard_k;  // of the stored keys
    lctx_index_shape index;
    lctx_row_file * file;  // of the pools, or nullptr
};

struct lctx_attend_args {
    const char * q;  // F32 rows at q + head*q_head_stride + token*q_token_stride
    size_t q_head_stride;
    size_t q_token_stride;
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_tokens;
    int32_t n_seg;
    lctx_cache_args cache;
    const lctx_segment * segs;  // [n_tokens][n_seg]; with params.chunk_size > 0 choices().data,
                                // [n_tokens][n_choice][n_seg] without tiles
    int32_t n_choice;           // heads with segments of their own
    const float * angles;       // [*][n_dims]
    int32_t n_dims;
    int32_t n_angle;  // with params.chunk_size > 0: rows of the angle table of one token, which its segments have
    lctx_attend_params params;
    float * dst;  // [n_tokens][n_head][head_dim_v]
    float * lse;  // [n_tokens][n_head] or nullptr

    LCTX_HD lctx_choices choices() const {
        return {(const int32_t *)segs, n_tokens, n_choice, n_seg, n_head_kv, params.tiles};
    }
};

struct lctx_summarize_args {
    const char * q;  // F32 rows as in lctx_attend_args; nullptr unless by attention
    size_t q_head_stride;
    size_t q_token_stride;
    int32_t head_dim_k;
    int32_t head_dim_v;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_tokens;
    lctx_cache_args cache;
    const lctx_chunk_row * rows;  // [n_tokens]
    const float * angles;         // [*][n_dims]
    int32_t n_dims;
    ggml_type summary_type;
    char * summaries;  // rows of it at summaries + chunk*summary_stride + head*summary_head_stride +
                       // seq*summary_seq_stride
    size_t summary_stride;
    size_t summary_head_stride;
    size_t summary_seq_stride;
    char * open;  // F32 rows at open + row*open_stride + head*open_head_stride + seq*open_seq_stride, or nullptr
    size_t open_stride;
    size_t open_head_stride;
    size_t open_seq_stride;
    lctx_summarize_params params;
};

struct lctx_select_args {
    const char * q;  // F32 rows as in lctx_attend_args
    size_t q_head_stride;
    size_t q_token_stride;
    int32_t head_dim;
    int32_t n_head;
    int32_t n_list;    // heads with keys or summaries of their own
    int32_t n_choice;  // heads with a choice of their own
    int32_t n_tokens;
    int32_t n_chunk_max;
    lctx_cache_args cache;  // table, held and index: by keys
    ggml_type summary_type;
    const char * summaries;  // else
    size_t summary_stride;
    size_t summary_head_stride;
    size_t summary_seq_stride;
    const lctx_row * rows;      // [n_tokens]
    const lctx_segment * segs;  // [n_tokens][n_given]
    const float * angles;       // [*][n_dims]
    int32_t n_dims;
    int32_t rope_mode;
    lctx_chunks chunks;
    lctx_index_shape index;
    float scale;
    const int32_t * tiles;  // [n_tile] first tokens
    int32_t n_tile;
    uint32_t near_mask;
    lctx_segment * dst;  // [n_tokens][n_choice][n_segment]; choices().data

    LCTX_HD lctx_written_choices choices() const {
        return {(int32_t *)dst,     n_tokens, n_choice,
                chunks.n_segment(), n_list,   {n_tile, chunks.tile, chunks.n_given(), chunks.n_shared}};
    }
};

struct lctx_vote_args {
    lctx_attend_args attend;    // the attention that was run; its lse is an input here
    const lctx_voter * voters;  // [n_tokens]
    lctx_retain retain;
};

struct lctx_evict_args {
    lctx_cache_args cache;
    int32_t n_head_kv;
    int32_t n_seq;
    const int32_t * due;      // [n_seq]
    const int32_t * budgets;  // [n_seq][n_head_kv], rows budget_stride apart; nullptr: all have that of the rule
    size_t budget_stride;     // in elements
    char * summaries;         // nullptr: none
    int32_t n_summary;        // per KV head
    size_t summary_stride;
    size_t summary_head_stride;
    size_t summary_seq_stride;
    lctx_evict_params params;
    lctx_index_shape index;
};

struct lctx_fetch_args {
    lctx_cache_args all;   // pools and table of all pages
    lctx_row_file * file;  // of these pools, or nullptr
    lctx_pool_args k_staged;
    lctx_pool_args v_staged;
    lctx_pool_args k_transit;  // where units of a file go that find no frame: those of head h from h*n_transit on
    lctx_pool_args v_transit;
    int32_t n_transit;
    int32_t * staging;  // lctx_staging of head h at staging + h*staging_stride
    size_t staging_stride;
    int32_t * table;     // result
    size_t head_stride;  // of it, in elements
    size_t seq_stride;
    int32_t n_head_kv;
    int32_t n_seq;
    int32_t n_page_max;
    lctx_fetch_params params;
    const lctx_segment * segs;  // [n_tokens][n_choice][n_seg]; choices().data
    int32_t n_tokens;
    int32_t n_choice;
    int32_t n_seg;

    LCTX_HD lctx_choices choices() const {
        return {(const int32_t *)segs, n_tokens, n_choice, n_seg, n_head_kv, params.tiles};
    }
    LCTX_HD int32_t shift() const { return lctx_unit_shift(params.chunk_size); }
    LCTX_HD int32_t of_page() const { return LCTX_PAGE_ROWS >> shift(); }  // units
    LCTX_HD int32_t n_key() const { return n_seq * n_page_max * of_page(); }
    LCTX_HD lctx_staging staging_of(int32_t head) const { return {staging + head * staging_stride, params.n_staged}; }
    // Return the entry of the result that says where a key is.
    LCTX_HD int32_t & entry(int32_t head, int32_t key) const {
        const int32_t n_unit_max = n_page_max * of_page();
        return table[key / n_unit_max * seq_stride + head * head_stride + key % n_unit_max];
    }
    LCTX_HD int32_t near_unit(int32_t head, int32_t frame) const { return head * params.n_staged + frame; }
    LCTX_HD int32_t far_unit(int32_t head, int32_t key) const {
        return n_head_kv * params.n_staged + pool_unit(head, key);
    }
    LCTX_HD int32_t transit_unit(int32_t head, int32_t i) const {
        return n_head_kv * params.n_staged + head * n_transit + i;
    }
    LCTX_HD int32_t pool_unit(int32_t head, int32_t key) const {
        const int32_t page = key / of_page();
        return all.table.pages[page / n_page_max * all.table.seq_stride + head * all.table.head_stride +
                               page % n_page_max] *
                   of_page() +
               key % of_page();
    }
    // The key lies nowhere near any more.
    LCTX_HD void forget(int32_t head, int32_t key) const {
        const lctx_staging r = staging_of(head);
        const int32_t frame = entry(head, key) - near_unit(head, 0);
        if (frame >= 0 && frame < r.n_staged) {
            r.keys()[frame] = -1;
        }
        entry(head, key) = -1;
    }
};

// Bytes of the segments of all tokens and choices, where lists of tiles are written out (lctx_expanded); 0: there are
// no tiles. A: arguments with choices().
template <typename A> size_t lctx_expanded_size(const A & a) {
    constexpr size_t ALIGNMENT = 256;
    const size_t n = (size_t)a.n_tokens * a.n_choice * a.choices().n_expanded(a.params.n_run) * sizeof(lctx_segment);
    return a.params.tiles.n_tile > 0 ? (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : 0;
}

// Return the arguments without tiles, their segments at `segs`.
template <typename A> A lctx_expanded_args(const A & a, const lctx_segment * segs) {
    A expanded = a;
    expanded.segs = segs;
    expanded.n_seg = a.choices().n_expanded(a.params.n_run);
    expanded.params.tiles = {};
    return expanded;
}
