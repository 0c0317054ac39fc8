// Taking the RoPE off a query or key that a model has already rotated.
#pragma once

#include "../ops/ops.h"

#include <array>
#include <vector>

struct lctx_peeled {
    ggml_tensor * x;                  // the tensor before rotation [head_dim, n_head, n_tokens]
    ggml_tensor * pos;                // I32 [n_tokens], the model's own positions; nullptr: nothing rotates it
    ggml_tensor * freq_factors;       // or nullptr
    lctx_rope rope;                   // NORM or NEOX
    float scale;                      // product of the scales that stood between the rotation and the attention
    std::array<int32_t, 4> sections;  // of a multi-section RoPE, which is NEOX on text; else 0
    bool interleaved;                 // sections take turns
    bool moved;                       // the rotated channels were the last ones of a head; in x they are the first
};

// Peel GGML_OP_ROPE through what does not mind a rotation: factors of a whole head, norms without weights. Where a part
// of each head is rotated and joined with the rest, the rotated channels are moved to the front. What nothing rotates
// is rotated by nothing. moves: the method reads keys from other positions than their own. If it does not, a tensor
// that cannot be peeled stays as the model made it. Throws lctx_refusal naming layer and reason.
lctx_peeled lctx_peel_rope(ggml_context * ctx, ggml_tensor * t, bool moves, const char * what, int il);

// True when two peeled tensors were rotated in the same way.
bool lctx_same_rope(const lctx_peeled & a, const lctx_peeled & b);

// Frequency factors [n_dims/2] that hold still the pairs whose section has position 0 on text (the fourth); empty where
// there is none.
std::vector<float> lctx_still_factors(const lctx_peeled & peeled);
