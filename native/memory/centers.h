// Computes what is subtracted from keys before they are stored: the mean of what the bias of their projection becomes
// when it is rotated.
//
// A vector that is the same for all keys of a head adds the same to all scores of a query, which the softmax takes out.
// The bias of keys is large in some models (Qwen2), most of all in channels that turn slowly, so that without its mean
// a key loses far less to a type of few bits, and to the index. Where queries see keys under several angles the sums
// differ, so nothing is subtracted there.
#pragma once

#include "device-store.h"

#include <map>
#include <vector>

class lctx_centers {
  public:
    // dry: vectors have memory and no values, for graphs that are never run.
    explicit lctx_centers(bool dry) : dry_(dry) {}

    // F32 [head_dim, n_head] on the device of the store: the mean of the rotated bias, F32 [head_dim*n_head], over
    // positions. It is computed at the first graph and stays, since stored keys depend on it. still, freq_factors: as
    // of lctx_factors_of. Throws lctx_refusal when the device has no memory.
    ggml_tensor * of(const lctx_device_store & store, int32_t il, const ggml_tensor * bias, int32_t head_dim,
                     const lctx_rope & rope, const std::vector<float> & still, const ggml_tensor * freq_factors);

    size_t bytes(const lctx_device_store & store) const;

  private:
    struct entry {
        const lctx_device_store * store;
        ggml_tensor * center;
        ggml_context_ptr ctx;
        ggml_backend_buffer_ptr buffer;
    };

    bool dry_;
    std::map<int32_t, entry> entries_;  // by layer
};
