// Saved states of llama.cpp's own memories, checked before they are read: reading asserts, or believes what it finds.
#pragma once

#include "llama-hparams.h"
#include "llama-io.h"
#include "llama-memory.h"
#include "state-io.h"

#include <cstdint>
#include <vector>

// Tells how a state is read: the arguments of state_read, and where sequences end in our cache, if there is one.
struct lctx_state_kind {
    int32_t seq;                  // < 0: all sequences
    llama_state_seq_flags flags;  // LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: of a checkpoint
    std::vector<int32_t>
        n_pos;  // the next position of every sequence, which its cells must end at without a gap; empty: any
};

// Read the state of a memory from io, and append its bytes to *bytes (when there is one). Throws lctx_refusal when its
// cells are none that the memory could have written, or the kind of memory is not known here.
void lctx_check_state(llama_io_read_i & io, const llama_memory_i & memory, const llama_hparams & hparams,
                      const lctx_state_kind & kind, std::vector<uint8_t> * bytes);
