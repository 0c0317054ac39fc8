// The memory of a context with a method, as llama.cpp sees it: it splits batches into ubatches, at the borders where
// heads evict too, and keeps our KV cache and what stays llama.cpp's own (foreign-memory.h) at the same positions.
//
// A window or a recurrent state cannot go back. A checkpoint keeps them as they were after some number of tokens of a
// sequence, in host memory; the rows of our cache are still there, so none of them are copied. A saved state has the
// last few of them, since nothing else leads a restored sequence back into its text.
#pragma once

#include "foreign-memory.h"
#include "kv-cache.h"

#include <map>
#include <memory>
#include <vector>

class lctx_context_memory final : public llama_memory_i {
  public:
    // foreign: nullptr when all layers with a memory are in the cache. n_checkpoint: most that a sequence keeps, if
    // their bytes are few.
    lctx_context_memory(std::unique_ptr<lctx_kv_cache> cache, std::unique_ptr<lctx_foreign_memory> foreign,
                        int32_t n_checkpoint);

    lctx_kv_cache & cache() const { return *cache_; }
    bool has_foreign() const { return foreign_ != nullptr; }

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

    // Slices of a sequence, and its windows and recurrent states at its end (slice.h). They throw lctx_refusal; then
    // the sequence ends where it did, or is empty after read_foreign.
    void slice_read(lctx_state_reader & io, int32_t seq);
    void slice_insert(lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n);
    void write_foreign(llama_io_write_i & io, int32_t seq) const;
    void read_foreign(llama_io_read_i & io, int32_t seq);

    // The longest prefix of at most n tokens that the sequence can be cut back to.
    int32_t restorable(int32_t seq, int32_t n) const;
    // Make dst the first n_pos tokens of src (all with n_pos < 0); false with the cache's take_error() when that cannot
    // be.
    bool copy(int32_t src, int32_t dst, int32_t n_pos);
    // Forget rows [first, end) of a sequence; those after them move down. False with the cache's take_error() when that
    // cannot be.
    bool drop(int32_t seq, int32_t first, int32_t end);
    // Keep what is needed to come back to the end of a sequence. Nothing, where the cache can go back by itself.
    void checkpoint(int32_t seq);
    // The positions of the checkpoints that a state of the sequence has, ascending.
    std::vector<int32_t> saved_checkpoints(int32_t seq) const;
    // Cut the sequence back to n_pos tokens, or to what can still be reached, or to nothing.
    void withdraw(int32_t seq, int32_t n_pos);
    // Call f(device, bytes) for what everything takes when the text fills n_ctx, checkpoints at most.
    void each_size(const std::function<void(ggml_backend_dev_t, const lctx_sizes &)> & f) const;
    // Bytes of what stays llama.cpp's own, and of the checkpoints.
    uint64_t foreign_bytes() const;
    uint64_t checkpoint_bytes() const;

  private:
    struct saved {
        int32_t pos;
        std::shared_ptr<const std::vector<uint8_t>> bytes;
    };

    std::vector<llama_ubatch> split(llama_batch_allocr & balloc, int32_t n_ubatch) const;
    std::vector<llama_ubatch> split_equal(llama_batch_allocr & balloc, int32_t n_ubatch, bool one_sequence,
                                          std::string & wrong) const;
    std::string why_not_back_to(int32_t seq, int32_t p) const;
    const saved * find_checkpoint(int32_t seq, int32_t p) const;
    bool cut(int32_t seq, int32_t p);
    bool restore(int32_t src, int32_t dst, int32_t p);
    void require_foreign() const;
    void append(int32_t seq, const std::function<void()> & read);
    void read_foreign(llama_io_read_i & io, int32_t seq_id, llama_state_seq_flags flags);
    void write_checkpoints(llama_io_write_i & io, int32_t seq) const;
    void read_checkpoints(llama_io_read_i & io, int32_t seq);
    void empty(int32_t seq);

    const std::unique_ptr<lctx_kv_cache> cache_;
    const std::unique_ptr<lctx_foreign_memory> foreign_;
    const size_t n_checkpoint_;
    std::vector<std::vector<saved>> checkpoints_;  // of every sequence, ascending
};
