// Holds what a graph gets from the host for each ubatch, and llama.cpp's own inputs with it.
#pragma once

#include "../memory/batch.h"
#include "../memory/kv-cache.h"
#include "../methods/tiles.h"
#include "llama-graph.h"
#include "rope.h"

#include <deque>
#include <map>
#include <vector>

// The inputs that change with every ubatch. Topology depends on the method and the number of tokens only, so that
// graphs are reused; the host writes O(n_tokens) numbers.
class lctx_inputs {
  public:
    lctx_inputs(const llm_graph_context & graph, const lctx_kv_cache & cache);

    void set(const llama_ubatch & ubatch);
    bool can_reuse(const llama_ubatch & ubatch) const;

    // Layers that rotate alike share this on a device.
    struct table {
        lctx_peeled peeled;
        const lctx_device_store * store;
        std::vector<float>
            still;  // frequency factors that the host writes to `factors`; empty: it is the model's, or nullptr
        ggml_tensor * factors;  // F32 [n_dims/2]
        ggml_tensor * angles;   // F32 [n_dims, n_angle * n_tokens]
    };

    // The tables of a layer; made once.
    const table & tables(const llm_graph_context & graph, const lctx_peeled & peeled, int il);

    const lctx_kv_cache & cache;
    ggml_cgraph * graph;
    std::map<int32_t, lctx_peeled> keys;  // how the layers that have stored in this graph rotate

    ggml_tensor * rows;                  // I32 [4, n_tokens]           lctx_row
    ggml_tensor * segs;                  // I32 [4, n_seg, n_tokens]    lctx_segment
    ggml_tensor * chunk_rows = nullptr;  // I32 [4, n_tokens]           lctx_chunk_row, where chunks have summaries
    ggml_tensor * voters = nullptr;      // I32 [4, n_tokens]           lctx_voter, when heads evict
    ggml_tensor * pos;                   // I32 [n_angle * n_tokens]
    bool selects;                        // heads choose chunks in this graph
    ggml_tensor * tiles =
        nullptr;  // I32 [n_tile]                first tokens of tiles that choose, where there are any

  private:
    // A graph depends on this in addition to the number of tokens.
    struct topology {
        bool selects;
        int64_t n_tile;
    };
    topology topology_of(const llama_ubatch & ubatch) const;
    void set_segments(const llama_ubatch & ubatch);
    void set_chunk_rows(const llama_ubatch & ubatch);

    std::deque<table> tables_;
};

// Add a node to the graph. It runs where the rows of the layer are; the scheduler would move the pools where the
// weights are.
void lctx_add(const llm_graph_context & graph, const lctx_device_store & store, ggml_tensor * node, const char * name,
              int il);

// Lets build_attn find our inputs in whatever input a model's graph hands it.
class lctx_has_inputs {
  public:
    lctx_has_inputs(const llm_graph_context & graph, const lctx_kv_cache & cache) : ours(graph, cache) {}
    virtual ~lctx_has_inputs() = default;

    lctx_inputs ours;
};
