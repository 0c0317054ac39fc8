// Attention of one layer: peel the RoPE, chain the sub-ops.
#pragma once

#include "chain.h"
#include "llama-graph.h"
#include "rope.h"

#include <tuple>
#include <vector>

// The inputs of a graph that change with every ubatch. Topology depends on the method and the number of tokens only, so that
// graphs are reused; the host writes O(n_tokens) numbers.
class lctx_graph_input final : public llm_graph_input_attn_kv {
  public:
    lctx_graph_input(const llm_graph_context & graph, const lctx_memory_context * mctx);

    void set_input(const llama_ubatch * ubatch) override;
    bool can_reuse(const llm_graph_params & params) override;

    // The angle table for this RoPE; made once per device and shared by the layers that rotate alike.
    ggml_tensor * angles(const llm_graph_context & graph, const lctx_peeled & peeled, int il);

    const lctx_memory & memory() const { return mctx_->memory(); }

    ggml_tensor * rows;                  // I32 [4, n_tokens]           lctx_row
    ggml_tensor * segs = nullptr;        // I32 [4, n_seg, n_tokens]    lctx_segment; or the heads choose for themselves:
    ggml_tensor * chunk_rows = nullptr;  // I32 [4, n_tokens]           lctx_chunk_row
    ggml_tensor * voters = nullptr;      // I32 [4, n_tokens]           lctx_voter, when heads evict
    ggml_tensor * pos;                   // I32 [n_angle * n_tokens]

  private:
    void set_segments(const llama_ubatch * ubatch);
    void set_chunk_rows(const llama_ubatch * ubatch);

    const lctx_memory_context * mctx_;
    std::vector<std::tuple<lctx_peeled, const lctx_kv_store *, ggml_tensor *>> angles_;
};
