// The CUDA backend as a library of its own (the package pylongctx-cuda): what it offers to the library that loads it.
//
// Each has its own copy of ggml's base and may have its own C++ library, so only C types cross, and interfaces of
// virtual functions. ggml's structs are the same on both sides when `build` is.
#pragma once

#include "arena.h"
#include "ggml.h"

struct lctx_cuda_module {
    const char * build;          // LCTX_BUILD of its sources
    const char * architectures;  // a JSON list
    ggml_backend_reg_t (*backend)(void);
    void (*log_set)(ggml_log_callback callback, void * user_data);
    const lctx_device_memory_kind * memory;  // nullptr: compiled without virtual memory
};

// The one symbol that is looked up.
extern "C" __attribute__((visibility("default"))) const lctx_cuda_module * lctx_cuda_module_get(void);
