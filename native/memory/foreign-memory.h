// Wraps what stays llama.cpp's own in a context with a method: the memory of layers with a sliding window or a
// recurrent state. It was built without the layers that our cache has claimed, and continues to track their positions.
#pragma once

#include "kv-cache.h"

#include <cstdint>
#include <memory>
#include <vector>

class lctx_foreign_memory {
  public:
    // nullptr: this kind of memory cannot be used together with ours.
    static std::unique_ptr<lctx_foreign_memory> create(std::unique_ptr<llama_memory_i> memory,
                                                       const llama_model & model, const llama_cparams & cparams);
    virtual ~lctx_foreign_memory() = default;

    llama_memory_i & memory() const { return *memory_; }
    // Every ubatch has as many tokens of one sequence as of another, and of sequences that follow each other where they
    // are kept apart.
    bool splits_equal() const { return is_recurrent_ || !is_unified_; }
    bool splits_sequential() const { return !is_unified_; }
    // A ubatch has one sequence: for embeddings of all tokens, and where recurrent layers would mix up several.
    bool splits_by_sequence(bool embd_all) const { return is_recurrent_ && (embd_all || mixes_sequences_); }
    // The last tokens of a sequence that must not be divided among ubatches; 0: any may.
    uint32_t n_keep_tail() const { return n_keep_tail_; }

    // A context of the batch, which gives rows cells in the cache too; nullptr when there is no room.
    virtual llama_memory_context_ptr batch(lctx_kv_cache & cache, const std::vector<llama_ubatch> & ubatches) = 0;
    // The context of graphs that are built for the worst case.
    virtual llama_memory_context_ptr full(lctx_kv_cache & cache) = 0;

    // True when the sequence, whose end is n_pos, can be cut to p tokens without a checkpoint.
    virtual bool can_go_back(int32_t seq, int32_t p) const = 0;
    // A checkpoint is what cutting back would lose: windows and recurrent states.
    std::vector<uint8_t> save(int32_t seq) const;
    // Return the bytes of a checkpoint after p tokens, which save() made, from a state. Throws when they are none.
    std::vector<uint8_t> read_saved(llama_io_read_i & io, int32_t seq, int32_t p) const;
    // Put the sequence where a checkpoint was saved, p tokens from its beginning; src: the sequence that was saved.
    // Throws when it fails.
    void restore(int32_t src, int32_t seq, int32_t p, const std::vector<uint8_t> & saved);
    // Read a saved state; seq < 0: of all sequences. n_pos: where the rows of every sequence end in our cache; empty:
    // anywhere. Throws.
    void read(llama_io_read_i & io, int32_t seq, llama_state_seq_flags flags, const std::vector<int32_t> & n_pos);
    void copy(int32_t src, int32_t dst, int32_t n_pos);
    void remove(int32_t seq, int32_t from);

  protected:
    lctx_foreign_memory(std::unique_ptr<llama_memory_i> memory, const llama_cparams & cparams,
                        const llama_hparams & hparams, bool is_recurrent, bool mixes_sequences = false)
        : hparams_(hparams),
          memory_(std::move(memory)),
          is_recurrent_(is_recurrent),
          mixes_sequences_(mixes_sequences),
          is_unified_(cparams.kv_unified),
          n_keep_tail_(is_recurrent && cparams.n_rs_seq > 0 ? cparams.n_rs_seq + 1 : 0) {}
    // Of the layers that were claimed: only positions, no rows.
    virtual llama_memory_i & books() const = 0;

    const llama_hparams & hparams_;

  private:
    const std::unique_ptr<llama_memory_i> memory_;
    const bool is_recurrent_, mixes_sequences_, is_unified_;
    const uint32_t n_keep_tail_;
};
