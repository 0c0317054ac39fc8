// The memory of our methods: rows of K and V in pages per layer and KV head, one page list per sequence.
//
// Sequences that were copied share their full pages; a page is copied before somebody else's row would be written to it.
// What cannot be done is refused with a message: bool operations return false, state operations throw, and void operations mark
// the memory broken, so that the next batch fails with the message until the memory is cleared. Never a silently wrong cache.
#pragma once

#include "../lctx.h"
#include "../methods/method.h"
#include "ggml-cpp.h"
#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-memory.h"
#include "llama-model.h"
#include "pages.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

// Pools of one layer as the graph sees them: views made in the graph's context.
struct lctx_layer {
    ggml_tensor * k_pool;
    ggml_tensor * v_pool;
    ggml_tensor * table;
    ggml_tensor * near;  // nullptr: the method has no near ring
};

class lctx_memory final : public llama_memory_i {
  public:
    // Throws lctx_refusal when the pools do not fit the machine or the types do not fit the heads.
    lctx_memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                std::unique_ptr<lctx_method> method, uint32_t n_ctx);

    // llama_memory_i
    llama_memory_context_ptr init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize) override;
    bool get_can_shift() const override { return false; }
    void clear(bool data) override;
    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq_id) override;
    void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override;
    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;
    void state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) override;

    // for the graph
    const lctx_method & method() const { return *method_; }
    lctx_layer layer(ggml_context * ctx, int32_t il) const;

    // for the API
    void usage(lctx_kv_info & info, int32_t * rows) const;
    // Make dst the first n_pos rows of src (all with n_pos < 0); false with take_error() when that cannot be.
    bool copy(int32_t src, int32_t dst, int32_t n_pos);
    // The reason of the last refusal, told once: a later failure has a reason of its own.
    std::string take_error() { return std::exchange(error_, {}); }

    // Give every token of the ubatch its row: pages are taken here. init_batch has seen that there are enough.
    bool place(const llama_ubatch & ubatch);

  private:
    struct sequence {
        int32_t n_pos = 0;       // rows stored
        int32_t first_live = 0;  // rows in [n_sink, first_live) lost their pages
        int32_t first_near = 0;  // near keys before this row were overwritten
    };

    int32_t n_block(int32_t n_rows) const { return (n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS; }
    int32_t & page(int32_t seq, int32_t head, int32_t block) const;
    int32_t live_blocks() const;
    int32_t n_page() const;
    void allocate(const llama_model & model);

    // blocks.cpp: the blocks of a sequence
    int32_t held_blocks(int32_t seq) const;
    bool has_block(int32_t seq, int32_t block) const { return page(seq, 0, block) >= 0; }
    bool is_shared(int32_t seq, int32_t block) const { return pages_.is_shared(page(seq, 0, block)); }
    bool take_block(int32_t seq, int32_t block);
    bool own_block(int32_t seq, int32_t block);
    void drop_block(int32_t seq, int32_t block);
    void drop_dead(int32_t seq, int32_t p);
    void truncate(int32_t seq, int32_t n_pos);
    bool grow(int32_t seq, int32_t n_pos);
    std::string why_not_back_to(int32_t seq, int32_t p) const;
    void copy_prefix(int32_t src, int32_t dst, int32_t n_pos);

    std::string check_batch(const llama_batch & batch, llama_memory_status & status) const;
    bool refuse(const std::string & reason) const;
    void break_with(const std::string & reason);

    // state.cpp: save and restore
    void write_sequence(llama_io_write_i & io, int32_t seq) const;
    void check_header(llama_io_read_i & io, int32_t n_seq) const;
    void read_sequence(llama_io_read_i & io, int32_t seq);
    template <typename F> void each_run(int32_t seq, F && f) const;

    std::unique_ptr<lctx_method> method_;
    ggml_type type_k_, type_v_;
    int32_t n_ctx_;       // rows of one sequence
    int32_t n_rows_all_;  // rows of all sequences together
    int32_t n_ubatch_, n_batch_, n_seq_;
    int32_t head_dim_k_, head_dim_v_;
    int32_t near_rows_ = 0;
    int32_t n_head_total_ = 0;          // KV heads of all layers
    std::vector<int32_t> n_head_kv_;    // per layer
    std::vector<int32_t> head_offset_;  // first head of a layer
    ggml_context_ptr ctx_;
    std::vector<ggml_backend_buffer_ptr> buffers_;
    ggml_tensor * k_pool_ = nullptr;  // [head_dim_k, n_page*64]
    ggml_tensor * v_pool_ = nullptr;  // [head_dim_v, n_page*64]
    ggml_tensor * near_ = nullptr;    // [head_dim_k, near_rows, n_head_total, n_seq]
    ggml_tensor * table_ = nullptr;   // [n_page_max, n_head_total, n_seq]
    lctx_pages pages_;
    std::vector<sequence> seqs_;
    std::vector<int32_t> near_touched_;  // rows of every sequence's ring that were ever written
    std::string broken_;
    mutable std::string error_;
};

// One batch on its way: the ubatches and which one is next.
class lctx_memory_context final : public llama_memory_context_i {
  public:
    explicit lctx_memory_context(llama_memory_status status) : status_(status) {}
    lctx_memory_context(lctx_memory * memory, std::vector<llama_ubatch> ubatches)
        : memory_(memory), ubatches_(std::move(ubatches)), status_(LLAMA_MEMORY_STATUS_SUCCESS) {}

    bool next() override { return ++next_ < ubatches_.size(); }
    bool apply() override { return ubatches_.empty() || memory_->place(ubatches_[next_]); }
    const llama_ubatch & get_ubatch() const override { return ubatches_[next_]; }
    llama_memory_status get_status() const override { return status_; }
    const lctx_memory & memory() const { return *memory_; }

  private:
    lctx_memory * memory_ = nullptr;
    std::vector<llama_ubatch> ubatches_;
    size_t next_ = 0;
    llama_memory_status status_;
};
