// Ops on rows of floats that mixtures of experts need for every token, and that ggml computes value by value.
#include "rowwise.h"

#include "../cpu/vec.h"
#include "../ops/params.h"
#include "ggml-cpu-impl.h"
#include "traits.h"

#include <algorithm>

namespace {

// OP::compute(op, row) computes a row, of all dimensions.
template <class OP> class rowwise : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int, const ggml_tensor *, size_t & size) override {
        size = 0;
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const int64_t n_row = ggml_nrows(op), first = n_row * params->ith / params->nth,
                      end = n_row * (params->ith + 1) / params->nth;
        for (int64_t row = first; row < end; row++) {
            OP::compute(op, row);
        }
        return true;
    }
};

// to = f(a, b) for n values, a vector at a time; what is left is in a vector with zeros.
template <typename F> void each_vector(int64_t n, const float * a, const float * b, float * to, F && f) {
    int64_t i = 0;
    for (; i + LCTX_VL <= n; i += LCTX_VL) {
        lctx_vstore(to + i, f(lctx_vload(a + i), lctx_vload(b + i)));
    }
    if (i < n) {
        const size_t left = (n - i) * sizeof(float);
        lctx_vf x{}, y{};
        memcpy(&x, a + i, left);
        memcpy(&y, b + i, left);
        const lctx_vf z = f(x, y);
        memcpy(to + i, &z, left);
    }
}

// Row `row` of a tensor, counted over all its dimensions.
template <typename T> T * row_of(const ggml_tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / t->ne[1] / t->ne[2];
    return (T *)((char *)t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

// GGML_OP_MUL of rows with a number each.
struct scaled {
    static bool fits(const ggml_tensor * op) {
        const ggml_tensor *a = op->src[0], *b = op->src[1];
        const bool one_each = b->ne[0] == 1 && b->ne[1] == a->ne[1] && b->ne[2] == a->ne[2] && b->ne[3] == a->ne[3];
        return one_each && a->ne[0] > 1 && a->type == GGML_TYPE_F32 && b->type == GGML_TYPE_F32 &&
               op->type == GGML_TYPE_F32 && a->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
    }
    static void compute(ggml_tensor * op, int64_t row) {
        const lctx_vf factor = lctx_vset(*row_of<const float>(op->src[1], row));
        const float * a = row_of<const float>(op->src[0], row);
        each_vector(op->ne[0], a, a, row_of<float>(op, row), [&](lctx_vf x, lctx_vf) { return x * factor; });
    }
};

// GGML_OP_GLU of kind SWIGLU_OAI: min(x, limit) / (1 + exp(-alpha x)) * (1 + y), y between -limit and limit.
struct swiglu_oai {
    static bool fits(const ggml_tensor * op) {
        const ggml_tensor *x = op->src[0], *y = op->src[1];
        return ggml_get_glu_op(op) == GGML_GLU_OP_SWIGLU_OAI && y && x->type == GGML_TYPE_F32 &&
               y->type == GGML_TYPE_F32 && op->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
               y->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
    }
    static void compute(ggml_tensor * op, int64_t row) {
        const float alpha = lctx_gate_alpha_of(op);
        const lctx_vf limit = lctx_vset(lctx_gate_limit_of(op));
        const auto gate = [&](lctx_vf x, lctx_vf y) {
            x = x > limit ? limit : x;
            y = y > limit ? limit : y < -limit ? -limit : y;
            const lctx_vf z = x * -alpha;
            return x / (1.0f + lctx_vexp(z > 88.0f ? lctx_vset(88.0f) : z)) * (y + 1.0f);  // beyond that floats end
        };
        each_vector(op->ne[0], row_of<const float>(op->src[0], row), row_of<const float>(op->src[1], row),
                    row_of<float>(op, row), gate);
    }
};

template <class OP> ggml::cpu::tensor_traits * way() {
    static rowwise<OP> p;
    return &p;
}

}  // namespace

ggml::cpu::tensor_traits * lctx_cpu_rowwise(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MUL: return scaled::fits(op) ? way<scaled>() : nullptr;
        case GGML_OP_GLU: return swiglu_oai::fits(op) ? way<swiglu_oai>() : nullptr;
        default:          return nullptr;
    }
}
