// What differs between Linux, macOS and Windows in a line or two: libraries, forks, and what went wrong.
#pragma once

#include <string>

// The error of this thread's last call of the system that failed, in words.
std::string lctx_system_error();

// Load a shared library, with all that it needs, by its name or path (UTF-8); nullptr when that fails.
void * lctx_library_open(const char * path);

// Why this thread's last lctx_library_open failed. Once per failure.
std::string lctx_library_error();

// The address of what a library exports by this name; nullptr when it does not.
void * lctx_library_symbol(void * library, const char * name);

void lctx_library_close(void * library);

// Call these around each fork of the process from now on: before it, and after it in the parent and in the child.
// Windows has no forks.
void lctx_at_fork(void (*before)(), void (*parent)(), void (*child)());
