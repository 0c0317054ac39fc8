// Angles of places, from which queries see chunks: place i is i chunks further on. Nothing changes them, so they are computed once, at
// the first graph of a context.
#pragma once

#include "../ops/ops.h"
#include "kv-store.h"

#include <deque>
#include <vector>

class lctx_places {
  public:
    // n places of chunk_size rows. dry: tables have memory and no values, for graphs that are never run.
    lctx_places(int32_t n, int32_t chunk_size, bool dry) : n_(n), chunk_size_(chunk_size), dry_(dry) {}

    // F32 [n_dims, n] on the device of the store. still: frequency factors, or empty: those of the model, or nullptr. Throws lctx_refusal
    // when the device has no memory.
    ggml_tensor * table(const lctx_kv_store & store, const lctx_rope & rope, const std::vector<float> & still,
                        const ggml_tensor * freq_factors);

    size_t bytes(ggml_backend_buffer_type_t buft) const;

  private:
    struct entry {
        const lctx_kv_store * store;
        lctx_rope rope;
        std::vector<float> still;
        const ggml_tensor * freq_factors;
        ggml_context_ptr ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor * table;
    };
    std::vector<float> compute(const lctx_rope & rope, const std::vector<float> & factors) const;

    int32_t n_, chunk_size_;
    bool dry_;
    std::deque<entry> entries_;
};
