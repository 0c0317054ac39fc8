// llama.cpp's log: what reaches stderr, and the error lines of this thread for *_error().
#pragma once

#include <cstdint>
#include <string>

// Let lines up to a level reach stderr, see lctx_log_set_level.
void lctx_log_show(int32_t level);

// Install the callback (once) and forget this thread's error lines.
void lctx_log_begin();

// Return what llama.cpp said since lctx_log_begin about values that replace those of a file.
std::string lctx_log_overrides();

// The error lines since lctx_log_begin, or `fallback` when there were none.
std::string lctx_log_errors(const char * fallback);
