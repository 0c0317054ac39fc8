// Save and restore: rows as they are stored, so a restored sequence continues with the same logits.
#pragma once

#include "cache-parts.h"
#include "llama-io.h"

// seq_id < 0: all sequences. Throw lctx_refusal; the sequences are empty then.
void lctx_write_state(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t seq_id);
void lctx_read_state(lctx_cache_parts & parts, llama_io_read_i & io, int32_t seq_id);

// Write what a state of n_seq sequences, or a slice (0), begins with. lctx_check_header throws lctx_refusal when it is
// another memory's.
void lctx_write_header(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t n_seq);
void lctx_check_header(const lctx_cache_parts & parts, llama_io_read_i & io, int32_t n_seq);
