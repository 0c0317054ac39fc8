// What queries meet chunks with and nothing changes: it is computed once, at the first graph of a context.
#pragma once

#include "../methods/method.h"
#include "../ops/ops.h"
#include "kv-store.h"

#include <deque>
#include <vector>

// cos and sin of positions, [n][n_dims], as lctx_angles computes them on the CPU. factors: of frequencies, or empty.
std::vector<float> lctx_angles_at(const lctx_rope & rope, const std::vector<float> & factors, const std::vector<int32_t> & positions);

// 1 for channels that turn at most once in n positions, or not at all, else 0; [head_dim].
std::vector<float> lctx_slow_channels(const lctx_rope & rope, const std::vector<float> & factors, int32_t head_dim, int32_t n);

// Means of cos and sin over the distances from which later queries look, [n_dims]: 1, 2, 4 .. 65536 (TriAttention, arXiv 2604.04921).
std::vector<float> lctx_mean_ahead(const lctx_rope & rope, const std::vector<float> & factors);

class lctx_places {
  public:
    struct tables {
        ggml_tensor * angles;  // F32 [n_dims, n_place] of the places from which queries see chunks: place i is i chunks further on
                               // nullptr: no chunks are chosen
        ggml_tensor * slow;    // F32 [head_dim], where comparisons know no distances: the channels that count; else nullptr
        ggml_tensor * ahead;   // F32 [n_dims], where rows are scored with mean queries: lctx_mean_ahead; else nullptr
    };

    // The method chooses chunks, or its rule scores rows with mean queries. dry: tables have memory and no values, for graphs that are
    // never run.
    lctx_places(const lctx_method & method, int32_t head_dim, bool dry) : method_(method), head_dim_(head_dim), dry_(dry) {}

    // On the device of the store, for layers that rotate by rope, whose angles carry no magnitude. still: factors of frequencies, or empty:
    // those of the model, or nullptr. Throws lctx_refusal when the device has no memory.
    tables of(const lctx_kv_store & store, const lctx_rope & rope, const std::vector<float> & still, const ggml_tensor * freq_factors);

    size_t bytes(ggml_backend_buffer_type_t buft) const;

  private:
    struct entry {
        const lctx_kv_store * store;
        lctx_rope rope;
        std::vector<float> still;
        const ggml_tensor * freq_factors;
        tables made;
        ggml_context_ptr ctx;
        ggml_backend_buffer_ptr buffer;
    };
    void fill(const entry & e) const;

    const lctx_method & method_;
    int32_t head_dim_;
    bool dry_;
    std::deque<entry> entries_;
};
