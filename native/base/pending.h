// Tells lctx_memory_begin what to make: lctx_context_create leaves it here, per thread, across llama_init_from_model.
#pragma once

#include "claim.h"

#include <cstdint>
#include <string>
#include <vector>

// Pages of K and V in a slower memory, of which some units lie close (ops/staging.h).
struct lctx_offload {
    uint64_t bytes = 0;  // for units that lie close; 0: all pages lie where they are read, UINT64_MAX: automatic
    std::string folder;  // of the file that has the pages; empty: they are in memory of the host
};

struct lctx_pending {
    bool active = false;  // false: the method comes from the environment variable LCTX_METHOD
    std::string method;   // empty: llama.cpp's own cache
    uint32_t n_ctx = 0;   // as asked, before padding
    uint64_t kv_limit = 0;
    bool fixed = false;  // results of a token do not depend on what else is computed (ops/fixed.h)
    lctx_offload offload;
    // while llama.cpp makes its memory
    bool claims = false;
    std::vector<lctx_claimed> layers;  // taken so far
};

inline lctx_pending & lctx_pending_settings() {
    static thread_local lctx_pending pending;
    return pending;
}
