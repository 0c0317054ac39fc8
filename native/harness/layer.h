// One layer of any method, ubatch by ubatch: what lctx_layer_run and lctx_step_run share. Its nodes are those of
// lctx_chain_layer, as in a model.
#pragma once

#include "../graph/chain.h"
#include "../methods/tiles.h"
#include "run.h"

// Holds what stays from ubatch to ubatch; what the method does not need is nullptr.
struct lctx_op_layer : lctx_layer {
    const lctx_op_args & a;
    const lctx_method & method;
    lctx_graph_run g;
    ggml_tensor * factors;

    // n_ubatch: tokens of the largest ubatch.
    lctx_op_layer(const lctx_op_args & a, const lctx_method & method, int32_t n_ubatch, const lctx_backend & backend);
    // due: I32 [1], the row after which the sequence evicts; budgets: I32 [n_head_kv], or nullptr: that of the rule.
    ggml_tensor * evict(ggml_context * ctx, ggml_tensor * due, ggml_tensor * budgets = nullptr) const;
    int32_t replay_from = INT32_MAX;  // queries from here on vote too
    bool always_selects = false;      // *select* runs where no query chooses
};

// Copies what the heads of a layer hold from where it lies.
class lctx_held_copy {
  public:
    explicit lctx_held_copy(const lctx_op_layer & layer);
    bool all() const { return data_.empty(); }  // nothing is evicted
    lctx_held of(int32_t head_kv);
    void write_back() const;

  private:
    const lctx_op_layer & layer_;
    std::vector<int32_t> data_;
};

// Rows [first, first + n).
struct lctx_op_ubatch {
    const lctx_op_layer & layer;
    int32_t first, n;
    lctx_graph_run g;
    ggml_tensor *pos, *due, *budgets;  // inputs, next to those of the chain
    lctx_chain_inputs in;
    std::vector<ggml_tensor *> prepared;  // what the chain computes from: angles
    std::vector<ggml_tensor *> nodes;     // in their order: those, the chain, the eviction when one is due

    lctx_op_ubatch(const lctx_op_layer & layer, int32_t first, int32_t n);
    // k, v and q of its own tokens; q may be nullptr when nothing reads it.
    void fill(const float * k_rows, const float * v_rows, const float * q_rows);
    // The node of a sub-op; nullptr when there is none.
    ggml_tensor * node(lctx_op op) const;
    // The segments that are read: chosen, or an input.
    ggml_tensor * segs() const { return in.selects ? node(LCTX_OP_SELECT) : in.segs; }

  private:
    void add_inputs();
    void add_nodes();
    void fill_segments() const;
    lctx_batch_tiles tiles() const;
};

// Methods and shapes that do not go together are refused.
void lctx_check_method(const lctx_op_args & a, const lctx_method & method);
