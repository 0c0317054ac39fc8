// Results of a token that have the same bits whatever else is computed (lctx_context_params::deterministic).
//
// *attend* has a parameter for this. A product of weights has a mark in the last of its op_params, which ggml leaves
// alone, and which is sent to an RPC server with its node.
#pragma once

#include "ggml.h"

constexpr int LCTX_FIXED_AT = GGML_MAX_OP_PARAMS / sizeof(int32_t) - 1;
constexpr int32_t LCTX_FIXED_MARK = 0x4c435458;

// Return whether the sum of a product's column has one order, however many columns there are.
inline bool lctx_is_fixed(const ggml_tensor * op) {
    return op->op_params[LCTX_FIXED_AT] == LCTX_FIXED_MARK;
}

// Mark all products of a graph that was built.
void lctx_fix_products(ggml_cgraph * graph);
