// The sub-ops of one layer, chained.
#pragma once

#include "../memory/kv-cache.h"

#include <vector>

// A layer computes from these; chunk_rows if chunks have summaries, voters if heads evict. Without k and v the layer
// reads the rows of an earlier one, which has stored, summarized and will vote. sinks: F32 [n_head] or nullptr.
struct lctx_chain_inputs {
    ggml_tensor *q, *k, *v;  // not rotated
    ggml_tensor *rows, *segs, *chunk_rows, *voters, *angles;
    ggml_tensor * sinks;
    ggml_tensor * center;  // of keys, as for lctx_store, or nullptr
    bool selects;          // a query of the batch chooses chunks; else the segments are what all heads read
    ggml_tensor * tiles;   // as for lctx_select, or nullptr
};

// Nodes get these names; llama.cpp appends "-layer".
constexpr const char * LCTX_SELECT_NAME = "lctx_select";

struct lctx_link {
    const char * name;
    ggml_tensor * node;
};

struct lctx_chain {
    std::vector<lctx_link> links;  // in their order
    ggml_tensor * out;             // F32 [head_dim_v*n_head, n_tokens]
};

// params: rope_mode, scale, softcap; the method fills in the rest. key_pairs: see lctx_summarize_params.
lctx_chain lctx_chain_layer(ggml_context * ctx, const lctx_method & method, const lctx_layer & layer,
                            const lctx_chain_inputs & in, lctx_attend_params params, bool key_pairs);

// Return why the layers cannot be where they are, because a device lacks a sub-op; empty when they can.
std::string lctx_why_not_there(const llama_model & model, const lctx_kv_cache & cache);
