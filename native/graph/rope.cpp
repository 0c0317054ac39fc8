#include "rope.h"

#include "../base/refusal.h"
#include "../ops/params.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>

namespace {

// Rotation by nothing: the frequency is 0, so every angle is.
constexpr lctx_rope STILL = {GGML_ROPE_TYPE_NEOX, 2, 0, 1.0f, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f};

// True when a rotation stands between the projections and t.
bool is_rotated(const ggml_tensor * t, std::set<const ggml_tensor *> & seen) {
    if (!t || t->op == GGML_OP_NONE || t->op == GGML_OP_MUL_MAT || t->op == GGML_OP_MUL_MAT_ID ||
        !seen.insert(t).second) {
        return false;
    }
    return t->op == GGML_OP_ROPE || std::any_of(std::begin(t->src), std::end(t->src),
                                                [&](const ggml_tensor * src) { return is_rotated(src, seen); });
}

// Return why this rotation cannot be taken off; empty when it can. is_normed: heads are normalized after it.
std::string why_not(const ggml_tensor * t, bool is_normed) {
    if (t->op != GGML_OP_ROPE) {
        return std::string("is not the result of RoPE (but of ") + ggml_op_desc(t) + ")";
    }
    const lctx_rope_params params = lctx_rope_params_of(t);
    const int32_t mode = params.rope.mode;
    const bool known = mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX || mode == GGML_ROPE_TYPE_MROPE ||
                       mode == GGML_ROPE_TYPE_IMROPE;
    if (!known) {
        return "uses RoPE mode " + std::to_string(mode);
    }
    if (params.offset != 0 && params.offset + params.rope.n_dims != t->ne[0]) {
        return "is rotated in the middle of the head";
    }
    if (is_normed && (params.rope.ext_factor != 0.0f || params.rope.attn_factor != 1.0f)) {
        return "is normalized after a rotation that changes its length";
    }
    return t->src[2] && (mode & GGML_ROPE_TYPE_MROPE) ? "has frequency factors and sections" : "";
}

// llama.cpp copies the factors of a model to every device that has layers.
bool same_factors(const ggml_tensor * a, const ggml_tensor * b) {
    return a == b || (a && b && ggml_are_same_shape(a, b) && strcmp(ggml_get_name(a), ggml_get_name(b)) == 0);
}

}  // namespace

lctx_peeled lctx_peel_rope(ggml_context * ctx, ggml_tensor * t, bool moves, const char * what, int il) {
    lctx_peeled result = {t, nullptr, nullptr, STILL, 1.0f, {}, false, false};
    std::set<const ggml_tensor *> seen;
    if (!is_rotated(t, seen)) {
        return result;
    }
    std::vector<const ggml_tensor *> after;  // what does not mind a rotation
    ggml_tensor * rotated = t;
    for (; rotated->op != GGML_OP_ROPE && rotated->op != GGML_OP_CONCAT; rotated = rotated->src[0]) {
        if (rotated->op == GGML_OP_SCALE && lctx_scale_bias_of(rotated) == 0.0f) {
            result.scale *= lctx_scale_factor_of(rotated);
        } else if ((rotated->op == GGML_OP_MUL && rotated->src[1]->ne[0] == 1) || rotated->op == GGML_OP_RMS_NORM) {
            after.push_back(rotated);
        } else {
            break;
        }
    }
    const bool is_normed =
        std::any_of(after.begin(), after.end(), [](const ggml_tensor * x) { return x->op == GGML_OP_RMS_NORM; });
    ggml_tensor * whole = rotated;  // the head, of which `rotated` may be a part
    if (whole->op == GGML_OP_CONCAT && lctx_concat_dim_of(whole) == 0) {
        rotated = whole->src[1]->op == GGML_OP_REPEAT ? whole->src[1]->src[0] : whole->src[1];
        seen.clear();
        rotated = is_rotated(whole->src[0], seen) ? whole : rotated;
    }
    const std::string why = why_not(rotated, is_normed);
    if (!why.empty()) {
        if (!moves) {
            result.scale = 1.0f;
            return result;
        }
        throw lctx_refusal("layer " + std::to_string(il) + ": the " + what + " " + why +
                           "; a method that reads keys from other positions than their own needs queries and keys that "
                           "are rotated last, " +
                           "with NORM or NEOX RoPE: method=full and the eviction rules alone run");
    }
    const lctx_rope_params params = lctx_rope_params_of(rotated);
    result.rope = params.rope;
    result.interleaved = params.rope.mode == GGML_ROPE_TYPE_IMROPE;
    if (params.rope.mode & GGML_ROPE_TYPE_MROPE) {
        result.rope.mode = GGML_ROPE_TYPE_NEOX;
        result.sections = params.sections;
    }
    result.x = rotated->src[0];
    if (whole != rotated) {
        ggml_tensor * part = whole->src[1]->op == GGML_OP_REPEAT ? ggml_repeat(ctx, result.x, whole->src[1]) : result.x;
        result.x = ggml_concat(ctx, part, whole->src[0], 0);
    } else if (const int64_t offset = params.offset) {
        const auto channels = [&](int64_t n, int64_t from) {
            return ggml_view_3d(ctx, rotated->src[0], n, rotated->ne[1], rotated->ne[2], rotated->src[0]->nb[1],
                                rotated->src[0]->nb[2], from * rotated->src[0]->nb[0]);
        };
        result.x = ggml_concat(ctx, channels(rotated->ne[0] - offset, offset), channels(offset, 0), 0);
    }
    result.moved = result.x != rotated->src[0];
    for (auto it = after.rbegin(); it != after.rend(); ++it) {
        const bool is_norm = (*it)->op == GGML_OP_RMS_NORM;
        result.x =
            is_norm ? ggml_rms_norm(ctx, result.x, lctx_norm_eps_of(*it)) : ggml_mul(ctx, result.x, (*it)->src[1]);
    }
    result.pos = rotated->src[1];
    result.freq_factors = rotated->src[2];
    return result;
}

bool lctx_same_rope(const lctx_peeled & a, const lctx_peeled & b) {
    return a.moved == b.moved && a.pos == b.pos && same_factors(a.freq_factors, b.freq_factors) &&
           a.sections == b.sections && a.interleaved == b.interleaved && memcmp(&a.rope, &b.rope, sizeof(a.rope)) == 0;
}

// Text has the token's position in the first three sections and 0 in the fourth. Interleaved, section s is the pairs
// that leave s when divided by 3, as far as it reaches; the pairs that are left belong to the fourth.
std::vector<float> lctx_still_factors(const lctx_peeled & peeled) {
    const auto & s = peeled.sections;
    const int32_t n = s[0] + s[1] + s[2] + s[3];
    std::vector<float> factors;
    bool any = false;
    for (int32_t i = 0; n > 0 && i < peeled.rope.n_dims / 2; i++) {
        const int32_t pair = i % n;
        const bool still = peeled.interleaved ? pair >= 3 * s[pair % 3] : pair >= s[0] + s[1] + s[2];
        factors.push_back(still ? std::numeric_limits<float>::infinity() : 1.0f);
        any = any || still;
    }
    return any ? factors : std::vector<float>();
}
