// One layer of any method, ubatch by ubatch: what lctx_layer_run and lctx_step_run share.
#pragma once

#include "run.h"

// What stays from ubatch to ubatch; what the method does not need is nullptr.
struct lctx_op_layer {
    const lctx_op_args & a;
    const lctx_method & method;
    lctx_graph_run g;
    ggml_tensor *factors, *k_pool, *v_pool, *near, *table, *held, *reps, *open;

    // n_ubatch: tokens of the largest ubatch.
    lctx_op_layer(const lctx_op_args & a, const lctx_method & method, int32_t n_ubatch, const lctx_backend & backend);
    lctx_attend_params attend_params() const;
};

// What the heads of a layer hold, copied from where it lies.
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

// Rows [first, first + n): inputs, then nodes in their order.
struct lctx_op_ubatch {
    const lctx_op_layer & layer;
    int32_t first, n;
    lctx_graph_run g;
    ggml_tensor *pos, *k, *v, *q, *rows, *chunk_rows, *voters, *due;
    ggml_tensor *angles, *stored, *represented, *segs, *out, *voted, *evicted;  // segs: an input where no chunks are chosen

    lctx_op_ubatch(const lctx_op_layer & layer, int32_t first, int32_t n);
    // k, v and q of its own tokens; q may be nullptr when nothing reads it.
    void fill(const float * k_rows, const float * v_rows, const float * q_rows);
    // Those of the nodes that are there.
    std::vector<ggml_tensor *> nodes() const;

  private:
    void add_inputs();
    void add_nodes();
    void fill_segments() const;
};

// Methods and shapes that do not go together are refused.
void lctx_check_method(const lctx_op_args & a, const lctx_method & method);
