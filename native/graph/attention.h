// Attention of one layer: peel the RoPE, chain the sub-ops. lctx_build_attn (hooks.h) is its entry.
#pragma once

#include "../memory/kv-store.h"
#include "llama-graph.h"

// Add a node to the graph. It runs where the rows of the layer are; the scheduler would move the pools where the weights are.
void lctx_add(const llm_graph_context & graph, const lctx_kv_store & store, ggml_tensor * node, const char * name, int il);
