#include "rope.h"

#include "../methods/method.h"

#include <cstring>
#include <string>

namespace {

[[noreturn]] void refuse(const char * what, int il, const std::string & reason) {
    throw lctx_refusal("layer " + std::to_string(il) + ": the " + what + " " + reason +
                       "; only models that rotate queries and keys last, with NORM or NEOX RoPE, can run with a method");
}

template <typename T> T op_param(const ggml_tensor * t, int i) {
    T value;
    memcpy(&value, t->op_params + i, sizeof(value));
    return value;
}

}  // namespace

lctx_peeled lctx_peel_rope(ggml_tensor * t, const char * what, int il) {
    lctx_peeled result = {};
    result.scale = 1.0f;
    while (t->op == GGML_OP_SCALE && op_param<float>(t, 1) == 0.0f) {
        result.scale *= op_param<float>(t, 0);
        t = t->src[0];
    }
    if (t->op != GGML_OP_ROPE) {
        refuse(what, il, std::string("is not the result of RoPE (but of ") + ggml_op_desc(t) + ")");
    }
    // op_params of ggml_rope: 1 n_dims, 2 mode, 4 n_ctx_orig, 5.. frequencies, 15 offset of the rotated dimensions
    result.rope = {op_param<int32_t>(t, 2), op_param<int32_t>(t, 1), op_param<int32_t>(t, 4), op_param<float>(t, 5), op_param<float>(t, 6),
                   op_param<float>(t, 7),   op_param<float>(t, 8),   op_param<float>(t, 9),   op_param<float>(t, 10)};
    if (result.rope.mode != GGML_ROPE_TYPE_NORMAL && result.rope.mode != GGML_ROPE_TYPE_NEOX) {
        refuse(what, il, "uses RoPE mode " + std::to_string(result.rope.mode));
    }
    if (op_param<int32_t>(t, 15) != 0) {
        refuse(what, il, "is rotated from an offset");
    }
    result.x = t->src[0];
    result.pos = t->src[1];
    result.freq_factors = t->src[2];
    return result;
}

bool lctx_same_rope(const lctx_peeled & a, const lctx_peeled & b) {
    return a.pos == b.pos && a.freq_factors == b.freq_factors && memcmp(&a.rope, &b.rope, sizeof(a.rope)) == 0;
}
