// Numbers that ggml's constructors put into op_params, by their index in it: all that native/ reads of nodes which are
// not ours. tests/native/test_op_params.py compares them with nodes that ggml made.
#pragma once

#include "ops.h"

#include <array>
#include <cstring>

inline float lctx_float_param(const ggml_tensor * node, int i) {
    float value;
    memcpy(&value, node->op_params + i, sizeof(value));
    return value;
}

// A node of GGML_OP_ROPE.
struct lctx_rope_params {
    lctx_rope rope;
    std::array<int32_t, 4> sections;
    int32_t offset;  // of the rotated channels in the head
};

inline lctx_rope_params lctx_rope_params_of(const ggml_tensor * node) {
    const int32_t * p = node->op_params;
    const auto f = [&](int i) { return lctx_float_param(node, i); };
    return {{p[2], p[1], p[4], f(5), f(6), f(7), f(8), f(9), f(10)}, {p[11], p[12], p[13], p[14]}, p[15]};
}

// A node of GGML_OP_SCALE: x * factor + bias.
inline float lctx_scale_factor_of(const ggml_tensor * node) {
    return lctx_float_param(node, 0);
}
inline float lctx_scale_bias_of(const ggml_tensor * node) {
    return lctx_float_param(node, 1);
}

// A node of GGML_OP_RMS_NORM.
inline float lctx_norm_eps_of(const ggml_tensor * node) {
    return lctx_float_param(node, 0);
}

// The dimension in which a node of GGML_OP_CONCAT joins.
inline int32_t lctx_concat_dim_of(const ggml_tensor * node) {
    return node->op_params[0];
}

// A node of GGML_OP_GLU, of kind SWIGLU_OAI.
inline float lctx_gate_alpha_of(const ggml_tensor * node) {
    return lctx_float_param(node, 2);
}
inline float lctx_gate_limit_of(const ggml_tensor * node) {
    return lctx_float_param(node, 3);
}

// Return whether a node of GGML_OP_MUL_MAT is not a product but a transform of rows.
inline bool lctx_has_hint(const ggml_tensor * node) {
    return node->op_params[1] != 0;
}
