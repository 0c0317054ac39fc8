// llama.cpp's own memory, for contexts without a method: it asserts on arguments that lctx.h allows, and cuts, copies
// and restores what it can no longer read. Sequences are 0 .. n_seq_max - 1. What throws, throws lctx_refusal, and
// nothing has changed.
#pragma once

#include "llama-memory.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

class lctx_foreign {
  public:
    // Serve an open context. is_alone: it has no method, so that all of its memory is llama.cpp's own.
    void open(llama_context * ctx, bool is_alone);

    // The longest prefix that a sequence can be cut to: recurrent states go back to their checkpoint only, windows as
    // far as they reach.
    int32_t restorable(int32_t seq, int32_t n) const;
    // Keep the recurrent state of a sequence, instead of an earlier one; nothing where there is none.
    void save(int32_t seq);
    // Discard the checkpoint of a sequence, whose tokens become others; seq < 0: of all.
    void forget(int32_t seq);
    // Cut a sequence back to its first n tokens after a batch that failed, or to its checkpoint, or to nothing.
    void withdraw(int32_t seq, int32_t n);
    // Remove positions [p0, p1); throws, and then a sequence whose checkpoint cannot be restored is empty.
    void remove(int32_t seq, int32_t p0, int32_t p1);
    // Make dst the first n positions of src, all with n < 0; throws as above.
    void copy(int32_t src, int32_t dst, int32_t n);
    // Forget all other sequences.
    void keep(int32_t seq);

    // These two also serve contexts with a method, whose memory checks its part of a state by itself.
    // Throw when a saved state is none that the memory could have written. seq < 0: of all sequences.
    void check_state(int32_t seq, const uint8_t * buf, size_t size) const;
    // Empty the sequence that a saved state takes the place of: of an empty state llama.cpp reads nothing, and leaves
    // what was there.
    void make_room(int32_t seq);

  private:
    // The recurrent state of a sequence after pos tokens.
    struct checkpoint {
        int32_t pos;
        std::vector<uint8_t> bytes;
    };

    llama_memory_i * memory() const;
    bool is_recurrent() const;
    int32_t n_past(int32_t seq) const;
    const checkpoint * checkpoint_within(int32_t seq, int32_t p) const;
    const checkpoint * checkpoint_at(int32_t seq, int32_t p) const;
    void restore(int32_t seq, const checkpoint & saved);
    void require_reach(int32_t seq, int32_t p) const;

    llama_context * ctx_ = nullptr;
    bool is_alone_ = false;
    std::map<int32_t, checkpoint> checkpoints_;  // the last one of a sequence
};
