// Holds what the layers of one device keep: pages of K and V, block tables, and what else their method needs, in
// tensors of its own.
//
// The host has counts, the device has the rows: after an eviction, its counts come back.
#pragma once

#include "../base/counts.h"
#include "../ops/ops.h"
#include "paged-tensors.h"
#include "planes.h"

#include <memory>
#include <string>
#include <vector>

// Pools of one layer as the graph sees them: views made in the graph's context.
struct lctx_layer {
    ggml_tensor * k_pool;
    ggml_tensor * v_pool;
    ggml_tensor * table;
    ggml_tensor * index;      // the keys in few bits, or nullptr
    ggml_tensor * near;       // nullptr: the method has no near ring
    ggml_tensor * summaries;  // summaries of chunks, or nullptr
    ggml_tensor * open;       // queries of the open chunk, or nullptr
    ggml_tensor * held;       // which rows each head holds, or nullptr: all
    // what lies close while the pools are far (ops/staging.h), or nullptr
    ggml_tensor * k_staged;
    ggml_tensor * v_staged;
    ggml_tensor * staging;
    ggml_tensor * staging_table;
    ggml_tensor * k_transit;  // units of a file that found no room there, for one batch; or nullptr
    ggml_tensor * v_transit;
    lctx_hadamard hadamard;
};

// The eviction of a layer; arguments as of lctx_evict. chunks: of the method, or nullptr.
ggml_tensor * lctx_evict_layer(ggml_context * ctx, const lctx_layer & layer, ggml_tensor * due, ggml_tensor * budgets,
                               const lctx_retain & retain, const lctx_chunks * chunks);

// All stores of a memory have this in common.
struct lctx_kv_shape {
    ggml_type type_k, type_v;
    int32_t head_dim_k, head_dim_v;
    int32_t n_ctx;  // rows of one sequence
    int32_t n_seq;
    int32_t n_page_head;  // pages in the pools per head
    int32_t near_rows;    // of the near ring, 0: none
    int32_t n_staged;  // > 0: the pools are in a slower memory, and this many units of a head (ops/staging.h) are close
    std::string folder;          // of a file that has the pools then; empty: they are in memory of the host
    const lctx_chunks * chunks;  // or nullptr
    const lctx_retain * retain;  // or nullptr
    bool shrinks;                // rows leave before their sequence does
    int32_t v_offset;            // latent attention: V is the channels of K from here on; -1: it has a pool of its own
    lctx_hadamard hadamard;

    // Bytes of a row of a head: K and V, and what the index has of it.
    size_t index_bytes() const {
        return chunks && chunks->by_keys() ? lctx_index_shape{chunks->key_bits(), head_dim_k}.row_size() : 0;
    }
    size_t row_bytes() const {
        return ggml_row_size(type_k, head_dim_k) + (v_offset < 0 ? ggml_row_size(type_v, head_dim_v) : 0);
    }
    // Rows of a unit are 1 << this; units of a page.
    int32_t unit_shift() const { return lctx_unit_shift(chunks->chunk_size); }
    int32_t of_page() const { return LCTX_PAGE_ROWS >> unit_shift(); }
    // Rows of a head in the pools, all of which may pass through.
    int64_t n_row_head() const { return (int64_t)n_page_head * LCTX_PAGE_ROWS; }
    static int32_t n_block(int32_t n_rows) { return (n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS; }
    int32_t n_complete(int32_t n_pos) const { return chunks ? n_pos / chunks->chunk_size : 0; }
};

// The heads of a layer among those of its store.
struct lctx_layer_heads {
    int32_t first, n;              // KV heads
    int32_t first_query, n_query;  // query heads
};

class lctx_device_store final : public lctx_paged_tensors {
  public:
    // Only the tensors; nothing is allocated. work: where entries of block tables are counted.
    lctx_device_store(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, const lctx_kv_shape & shape,
                      const std::vector<lctx_layer_heads> & layers, lctx_work & work);

    // False when the device refuses. dry: give the tensors a buffer without memory, for graphs that are never run.
    bool allocate(bool dry);
    // Bytes in use when every head of every sequence holds n_cell rows; all that is allocated where memory is not
    // committed as it is used.
    lctx_sizes sizes(int32_t n_cell) const;
    lctx_layer layer(ggml_context * ctx, const lctx_layer_heads & heads) const;

    // Rows of a sequence that a head holds: those stored but those evicted.
    int32_t n_cell(int32_t seq, int32_t head, int32_t n_pos) const { return n_pos - gone(seq, head); }
    int32_t & gone(int32_t seq, int32_t head) { return gone_[(size_t)seq * n_head + head]; }
    int32_t gone(int32_t seq, int32_t head) const { return gone_[(size_t)seq * n_head + head]; }

    // All that it keeps of its heads, in the order of states.
    const std::vector<lctx_plane> & planes() const { return planes_; }
    // Those of rows in pages that are saved: K, and V where it has rows of its own.
    std::vector<const lctx_plane *> row_planes() const;
    // Entries that sequences of these lengths have in a plane outside the pages.
    uint64_t n_entry(const lctx_plane & plane, const std::vector<int32_t> & n_pos) const;
    // Memory of these planes for rows [n_now, n_then) of a sequence; why there is none.
    std::string commit_rows(int32_t seq, int32_t n_now, int32_t n_then);
    void return_rows(int32_t seq, int32_t n_then, int32_t n_now);
    // Make the index of rows [first, end) of a sequence again, after they were written from elsewhere.
    void index_rows(int32_t seq, int32_t first, int32_t end, int32_t n_threads);

    // Units that lie close: what is known of a sequence's is void, after its rows were written from elsewhere.
    void forget_staged(int32_t seq);
    // Return how many units were there, were fetched, and were read from the host; of all heads.
    lctx_offload_info offload();

    // Eviction.
    size_t held_offset(int32_t seq, int32_t head, int32_t plane) const;  // plane -1: the header
    std::vector<int32_t> headers(int32_t seq);                           // [n_head][lctx_held::HEADER]
    void set_headers(int32_t seq, int32_t dense_from, int32_t undo_from);
    void copy_headers(int32_t src, int32_t dst);
    // Every head holds all rows that come.
    void forget_evictions(int32_t seq);
    // Take back what the queries of a sequence from row n_pos on did, for the heads that they have reached.
    void take_votes_back(int32_t seq, int32_t n_pos);
    // Tells how many rows the next eviction leaves, if heads have budgets of their own.
    int32_t & budget(int32_t seq, int32_t head) { return budget_[(size_t)seq * n_head + head]; }
    // Evict at the border of every sequence in due ([n_seq], < 0: it does not), and free what is after the rows that
    // stayed; false when the device fails.
    bool evict(const std::vector<int32_t> & due, int32_t n_threads);

    const int32_t n_query_head;  // of all its layers

    ggml_tensor * k_pool = nullptr;     // [head_dim_k, n_page*64]
    ggml_tensor * v_pool = nullptr;     // [head_dim_v, n_page*64]; latent attention: a view of k_pool
    ggml_tensor * index = nullptr;      // [lctx_index_shape::row_size, n_page*64]
    ggml_tensor * near = nullptr;       // [head_dim_k, near_rows, n_head, n_seq]
    ggml_tensor * summaries = nullptr;  // [summary_dim, n_chunk_max, n_head or n_query_head, n_seq]
    ggml_tensor * open = nullptr;       // [head_dim_k, 2*chunk_size, n_query_head, n_seq]
    ggml_tensor * held = nullptr;       // [lctx_held::size, n_head, n_seq]
    // with n_staged > 0
    ggml_tensor * k_staged = nullptr;       // [head_dim_k, n_head*n_staged << unit_shift]
    ggml_tensor * v_staged = nullptr;       // [head_dim_v, n_head*n_staged << unit_shift]
    ggml_tensor * staging = nullptr;        // [lctx_staging::size, n_head]
    ggml_tensor * staging_table = nullptr;  // [n_page_max*of_page, n_head, n_seq]
    // with pools in a file, for the layer that runs
    ggml_tensor * k_transit = nullptr;  // [head_dim_k, most heads of a layer * n_page_head * 64]
    ggml_tensor * v_transit = nullptr;

  private:
    void init_staging();
    void list_planes();
    template <typename F> bool each_row_range(int32_t seq, int32_t n_from, int32_t n_to, F && f) const;
    void prepare_eviction(int32_t n_threads);
    void shrink(int32_t seq, int32_t head, int32_t n_before, int32_t n_left);

    const lctx_kv_shape & shape_;
    const std::vector<lctx_layer_heads> layers_;
    std::vector<lctx_plane> planes_;
    std::vector<int32_t> gone_;    // [n_seq][n_head] rows evicted
    std::vector<int32_t> budget_;  // [n_seq][n_head]

    ggml_tensor * due_ = nullptr;      // [n_seq]
    ggml_tensor * budgets_ = nullptr;  // [n_head, n_seq], where heads have budgets of their own
    ggml_tensor * counts_ = nullptr;   // [1, n_head, n_seq] rows evicted, as the device counts
    ggml_backend_ptr evictor_;         // on the CPU; elsewhere backend_
    ggml_context_ptr evict_ctx_;
    ggml_cgraph * evict_graph_ = nullptr;
};
