// llama.cpp's own memory behind the C API, for contexts without a method: it asserts on arguments that lctx.h allows, and cuts, copies and
// restores what it can no longer read. Sequences are 0 .. n_seq_max - 1. What throws, throws lctx_refusal, and nothing has changed.
#pragma once

#include "handles.h"

#include <cstddef>
#include <cstdint>

// The longest prefix that a sequence can be cut to: recurrent states go back to their checkpoint only, windows as far as they reach.
int32_t lctx_foreign_restorable(const lctx_context & ctx, int32_t seq, int32_t n);

// Keep the recurrent state of a sequence, instead of an earlier one; nothing where there is none.
void lctx_foreign_save(lctx_context & ctx, int32_t seq);

// Discard the checkpoint of a sequence, whose tokens become others; seq < 0: of all.
void lctx_foreign_forget(lctx_context & ctx, int32_t seq);

// Cut a sequence back to its first n tokens after a batch that failed, or to its checkpoint, or to nothing.
void lctx_foreign_withdraw(lctx_context & ctx, int32_t seq, int32_t n);

// Remove positions [p0, p1); throws, and then a sequence whose checkpoint cannot be restored is empty.
void lctx_foreign_remove(lctx_context & ctx, int32_t seq, int32_t p0, int32_t p1);

// Make dst the first n positions of src, all with n < 0; throws as above.
void lctx_foreign_copy(lctx_context & ctx, int32_t src, int32_t dst, int32_t n);

// Forget all other sequences.
void lctx_foreign_keep(lctx_context & ctx, int32_t seq);

// Throw when a saved state is none that the memory could have written. seq < 0: of all sequences.
void lctx_foreign_check_state(const lctx_context & ctx, int32_t seq, const uint8_t * buf, size_t size);

// Empty the sequence that a saved state takes the place of: of an empty state llama.cpp reads nothing, and leaves what was there.
void lctx_foreign_make_room(lctx_context & ctx, int32_t seq);
