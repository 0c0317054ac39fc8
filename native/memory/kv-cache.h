// The KV cache of our methods: cells of K and V in pages per layer and KV head, one page list per sequence.
//
// It holds the layers that it was given: those with full attention (claim.h). A head that evicts holds rows of its own
// (ops/retain.h). Evictions are due at borders and done when the next token comes, so that the last batch can be taken
// back.
//
// Sequences that were copied share their pages; a shared page is copied before a sequence writes a row to it.
// Rows lie in stores, at least one per device that has layers (device-store.h); sequences, and what may be done with
// them, are the same for all. What cannot be done is refused with a message: bool operations return false, state
// operations throw, and what a void operation asks marks the cache broken, so that the next batch fails with the
// message until it is cleared. Never a silently wrong cache.
#pragma once

#include "budgets.h"
#include "cache-parts.h"
#include "ggml-backend.h"
#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-memory.h"
#include "llama-model.h"
#include "state-io.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

class lctx_kv_cache {
  public:
    // layers: those it holds. kv_limit: most bytes that kv usage may report, 0: none. Throws lctx_refusal when
    // the pools do not fit a device or the types do not fit the heads.
    lctx_kv_cache(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                  const std::vector<lctx_claimed> & layers, std::unique_ptr<lctx_method> method, uint32_t n_ctx,
                  uint64_t kv_limit, const lctx_offload & offload);

    const lctx_method & method() const { return *method_; }
    const lctx_placement & placement() const { return parts_.placement; }
    const lctx_sequences & sequences() const { return parts_.seqs; }
    const lctx_blocks & blocks() const { return parts_.blocks; }
    // Return what of the sequences and their pages contradicts itself, for tests; empty when nothing.
    std::string why_unsound() const;

    // a batch on its way
    // Do what is due before the batch and take the memory that it needs. The reason when it cannot be evaluated, with
    // its status.
    std::string admit(const llama_batch & batch, llama_memory_status & status);
    // Give every token of the ubatch its row: pages are taken here. admit has seen that there are enough.
    bool prepare(const llama_ubatch & ubatch);

    // sequences
    void clear();
    // The longest prefix of at most n rows that the sequence can be cut back to.
    int32_t restorable(int32_t seq, int32_t n) const;
    // Cut a sequence back; why_not_back_to has nothing against it.
    void truncate(int32_t seq, int32_t n_pos) { parts_.truncate(seq, n_pos); }
    // Make dst the first n_pos rows of src; false with take_error() when that cannot be.
    bool copy(int32_t src, int32_t dst, int32_t n_pos);
    // Forget rows [first, end) of a sequence; those after them move down. False with take_error(), and nothing changed.
    bool drop(int32_t seq, int32_t first, int32_t end);
    // The rows that a head holds, ascending, and their scores: room for n_max; returns their number.
    int32_t held_rows(int32_t seq, int32_t il, int32_t head, int32_t * rows, int32_t * scores, int32_t n_max) const;

    // what is saved, as in state.h and slice.h
    void state_write(llama_io_write_i & io, int32_t seq_id) const;
    void state_read(llama_io_read_i & io, int32_t seq_id);
    std::string why_no_slices() const;
    void slice_write(llama_io_write_i & io, int32_t seq, int32_t first, int32_t end) const;
    void slice_read(lctx_state_reader & io, int32_t seq);
    void slice_insert(lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n);

    // errors
    // Return why rows could not be read or written since the last call, where they lie in a file; empty: they could.
    std::string take_io_error() const;
    // Remember the reason of a refusal; false.
    bool refuse(const std::string & reason) const;
    // No batch is evaluated until clear().
    void break_with(const std::string & reason);
    // The reason of the last refusal, once: a later failure has a reason of its own.
    std::string take_error() { return std::exchange(error_, {}); }

    // compression (compress.cpp), where the rule waits for it
    // Queries of tokens from now on vote for the rows before them, until end_replay(); votes of before are forgotten.
    // Returns after how many of them at most the sequence can still be cut back to its end of now. Throws lctx_refusal.
    int32_t begin_replay(int32_t seq);
    void end_replay(int32_t seq);
    // Of the text, queries of the replay read rows [first, end) from now on, and the first ones. False: this method
    // reads all rows.
    bool replay_piece(int32_t seq, int32_t first, int32_t end);
    // Keep this fraction of the rows of a full cache, those with the best votes of all heads together; ends the replay.
    // False: refused.
    bool compress(int32_t seq, double fraction);

    // for graphs
    // From which row on queries choose, see lctx_method. Throws lctx_refusal.
    void select_from(int32_t from) { method_->select_from(from); }
    // Heads choose in every graph from now on, where their queries read everything too; for traces.
    void always_select(bool on) { always_selects_ = on; }
    // Units that lie close are brought as choices ask for them.
    // So they do where results may not depend on the other tokens of a batch, unless no query of the context can
    // choose.
    bool always_selects() const;
    // Results of a token do not depend on what else is computed (ops/fixed.h).
    void fix(bool on) { is_fixed_ = on; }
    bool is_fixed() const { return is_fixed_; }

  private:
    std::string check_batch(const llama_batch & batch, llama_memory_status & status) const;
    bool settle(const std::vector<int32_t> & seqs);
    void divide_layers(int32_t seq);
    std::string why_not_compress(int32_t seq) const;

    const std::unique_ptr<lctx_method> method_;
    const bool has_sections_;  // of RoPE: a token of a picture has several positions
    lctx_cache_parts parts_;
    bool always_selects_ = false, is_fixed_ = false;
    std::string broken_;
    mutable std::string error_;
};
