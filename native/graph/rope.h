// Taking the RoPE off a query or key that a model has already rotated.
#pragma once

#include "../ops/ops.h"

struct lctx_peeled {
    ggml_tensor * x;             // the tensor before rotation [head_dim, n_head, n_tokens]
    ggml_tensor * pos;           // I32 [n_tokens], the model's own positions
    ggml_tensor * freq_factors;  // or nullptr
    lctx_rope rope;
    float scale;  // product of the scales that stood between the rotation and the attention
};

// Peel GGML_OP_ROPE (NORM or NEOX) through GGML_OP_SCALE. Throws lctx_refusal naming layer and reason.
lctx_peeled lctx_peel_rope(ggml_tensor * t, const char * what, int il);

// True when two peeled tensors were rotated in the same way.
bool lctx_same_rope(const lctx_peeled & a, const lctx_peeled & b);
