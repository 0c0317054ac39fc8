// Rows of K and V that are stored transformed: a few channels are much larger than the others, and a block of quantized
// numbers has one scale. A Hadamard transform spreads them over all channels of the head.
#pragma once

#include "ggml.h"

#include <cstdint>

// Channels of a block of K and of V that are transformed together, a power of two; 0: rows are stored as they come. A
// block x becomes H x, with H = H^T = H^-1 (Sylvester's matrix over the root of its size). So a query that is
// transformed too has the same scores, and a sum of values is transformed back.
struct lctx_hadamard {
    static constexpr int32_t LEAST = 32;  // channels of a block of every quantized type

    uint16_t k, v;

    static bool fits(int32_t block, int64_t head_dim) {
        return block == 0 || (block >= LEAST && (block & (block - 1)) == 0 && head_dim % block == 0);
    }
};

// Return how rows of these types and widths are stored. v_offset: where V begins in K when it is a part of it, else <
// 0. Without ggml's quantized types, and with LLAMA_ATTN_ROT_DISABLE=1 in the environment, as they come.
lctx_hadamard lctx_hadamard_of(ggml_type type_k, int32_t head_dim_k, ggml_type type_v, int32_t head_dim_v,
                               int32_t v_offset);
