// How lctx_context_create tells lctx_create_memory, across llama_init_from_model, what to make: per thread.
#pragma once

#include <cstdint>
#include <string>

struct lctx_pending {
    bool active = false;  // false: the method comes from the environment variable LCTX_METHOD
    std::string method;   // empty: llama.cpp's own cache
    uint32_t n_ctx = 0;   // as asked, before padding
    uint64_t kv_limit = 0;
};

lctx_pending & lctx_pending_settings();
