// Checks whether the results of a token can be independent of what else is computed
// (lctx_context_params::deterministic).
#pragma once

#include "handles.h"

// Throws lctx_refusal where a context cannot promise it; method: a spec, or empty for llama.cpp's own cache.
void lctx_check_deterministic(const lctx_model & model, const lctx_context_params & params, const std::string & method);

// Layers with sliding windows stay llama.cpp's, whose flash attention divides rows among threads: they compute scores
// as a matrix.
bool lctx_has_windows(const lctx_model & model);
