// From where mean queries look at rows (the rule triattention): it is computed once, at the first graph of a context.
#pragma once

#include "../ops/ops.h"
#include "kv-store.h"

#include <deque>
#include <vector>

// Frequency factors of a rotation: those that hold pairs still, else those of the model, else none.
std::vector<float> lctx_factors_of(const std::vector<float> & still, const ggml_tensor * freq_factors, int32_t n_pair);

// cos and sin of positions, [n][n_dims], as lctx_angles computes them on the CPU. factors: of frequencies, or empty.
std::vector<float> lctx_angles_at(const lctx_rope & rope, const std::vector<float> & factors, const std::vector<int32_t> & positions);

// Means of cos and sin over positions, [n_dims].
std::vector<float> lctx_mean_angles(const lctx_rope & rope, const std::vector<float> & factors, const std::vector<int32_t> & positions);

// Means of cos and sin over the distances from which later queries look, [n_dims]: 1, 2, 4 .. 65536 (TriAttention, arXiv 2604.04921).
std::vector<float> lctx_mean_ahead(const lctx_rope & rope, const std::vector<float> & factors);

class lctx_means {
  public:
    // dry: tables have memory and no values, for graphs that are never run.
    explicit lctx_means(bool dry) : dry_(dry) {}

    // F32 [n_dims]: lctx_mean_ahead on the device of the store, for layers that rotate by rope, whose angles carry no magnitude. still:
    // factors of frequencies, or empty: those of the model, or nullptr. Throws lctx_refusal when the device has no memory.
    ggml_tensor * of(const lctx_kv_store & store, const lctx_rope & rope, const std::vector<float> & still,
                     const ggml_tensor * freq_factors);

    size_t bytes(ggml_backend_buffer_type_t buft) const;

  private:
    struct entry {
        const lctx_kv_store * store;
        lctx_rope rope;
        std::vector<float> still;
        const ggml_tensor * freq_factors;
        ggml_tensor * ahead;
        ggml_context_ptr ctx;
        ggml_backend_buffer_ptr buffer;
    };

    bool dry_;
    std::deque<entry> entries_;
};
