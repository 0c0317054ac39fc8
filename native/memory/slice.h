// Slices of a sequence: its rows of some positions, and what goes with them, as a text is stored piece by piece. Slices
// that follow each other make the sequence again, in any context of the same model, method and types.
#pragma once

#include "cache-parts.h"
#include "llama-io.h"
#include "state-io.h"

#include <string>

// Return why sequences have no slices; empty if their rows stay as they were stored.
std::string lctx_why_no_slices(const lctx_cache_parts & parts);

// All throw lctx_refusal.
// Rows [first, end) of a sequence and what goes with them: first begins a page, end is where it can be cut.
void lctx_write_slice(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t seq, int32_t first, int32_t end);
// Append a slice to the sequence. What was taken for it is there when it throws, up to its end.
void lctx_read_slice(lctx_cache_parts & parts, lctx_state_reader & io, int32_t seq);
// Append n rows of a slice after its first `skip`, wherever it was read, as a span. When it throws, the sequence is as
// before.
void lctx_insert_slice(lctx_cache_parts & parts, lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n);
