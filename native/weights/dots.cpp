// Products column by column, for those whose sums may not depend on how many columns there are: of all types, with the
// dot products of ggml. Its own products take other ways for many columns.
#include "../ops/fixed.h"
#include "../ops/params.h"
#include "bump.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "multiply.h"
#include "traits.h"

#include <algorithm>

namespace {

constexpr int64_t ROWS = 16;  // of weights that meet all columns, while they are in the first-level cache

// The rows of weights that a column meets, the column, and where the results go; `column` counts over all of them.
struct ends {
    const char *rows, *x;
    float * out;
};

ends of_matrix(const ggml_tensor * op, int64_t column) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const int64_t i1 = column % x->ne[1], i2 = column / x->ne[1] % x->ne[2], i3 = column / x->ne[1] / x->ne[2];
    return {(const char *)w->data + i2 / (x->ne[2] / w->ne[2]) * w->nb[2] + i3 / (x->ne[3] / w->ne[3]) * w->nb[3],
            (const char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3],
            (float *)((char *)op->data + i1 * op->nb[1] + i2 * op->nb[2] + i3 * op->nb[3])};
}

ends of_experts(const ggml_tensor * op, int64_t column) {
    const ggml_tensor *w = op->src[0], *x = op->src[1], *ids = op->src[2];
    const int64_t used = column % ids->ne[0], token = column / ids->ne[0];
    const int32_t expert = *(const int32_t *)((const char *)ids->data + used * ids->nb[0] + token * ids->nb[1]);
    GGML_ASSERT(expert >= 0 && expert < w->ne[2]);  // as ggml does
    return {(const char *)w->data + expert * w->nb[2],
            (const char *)x->data + used % x->ne[1] * x->nb[1] + token * x->nb[2],
            (float *)((char *)op->data + used * op->nb[1] + token * op->nb[2])};
}

class dots : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        size = LCTX_BUMP_ALIGN + n_column(op) * converted_size(op);
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor * w = op->src[0];
        const auto end_of = op->op == GGML_OP_MUL_MAT ? of_matrix : of_experts;
        char * converted = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_BUMP_ALIGN);
        const size_t size = converted_size(op);
        for (int64_t c = params->ith; size > 0 && c < n_column(op); c += params->nth) {
            convert(op->src[1], end_of(op, c).x, dot_type(op), converted + c * size);
        }
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        const ggml_vec_dot_t dot = ggml_get_type_traits_cpu(w->type)->vec_dot;
        const int64_t n_take = (w->ne[1] + ROWS - 1) / ROWS;
        for (int64_t take = params->ith; take < n_take; take = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            for (int64_t c = 0; c < n_column(op); c++) {
                const ends e = end_of(op, c);
                const char * x = size > 0 ? converted + c * size : e.x;
                for (int64_t row = take * ROWS; row < std::min(w->ne[1], (take + 1) * ROWS); row++) {
                    dot((int)w->ne[0], e.out + row, 0, e.rows + row * w->nb[1], 0, x, 0, 1);
                }
            }
        }
        return true;
    }

  private:
    static ggml_type dot_type(const ggml_tensor * op) {
        return ggml_get_type_traits_cpu(op->src[0]->type)->vec_dot_type;
    }
    static int64_t n_column(const ggml_tensor * op) {
        return op->op == GGML_OP_MUL_MAT ? ggml_nrows(op->src[1]) : op->src[2]->ne[0] * op->src[2]->ne[1];
    }
    // Bytes of a column as weights meet it; 0 where it is that already.
    static size_t converted_size(const ggml_tensor * op) {
        return op->src[1]->type == dot_type(op) ? 0 : ggml_row_size(dot_type(op), op->src[1]->ne[0]);
    }
    static void convert(const ggml_tensor * x, const char * column, ggml_type type, char * to) {
        if (x->type == GGML_TYPE_F16) {
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *)column, (float *)to, x->ne[0]);
        } else if (x->type == GGML_TYPE_BF16) {
            ggml_cpu_bf16_to_fp32((const ggml_bf16_t *)column, (float *)to, x->ne[0]);
        } else {
            ggml_get_type_traits_cpu(type)->from_float((const float *)column, to, x->ne[0]);
        }
    }
};

// Return whether ggml multiplies so: a column of floats, or one of f16 or bf16 that becomes floats.
bool fits(const ggml_tensor * op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(w->type);
    const bool widens =
        (x->type == GGML_TYPE_F16 || x->type == GGML_TYPE_BF16) && traits->vec_dot_type == GGML_TYPE_F32;
    return traits->vec_dot && (x->type == GGML_TYPE_F32 || x->type == traits->vec_dot_type || widens) &&
           w->nb[0] == ggml_type_size(w->type) && x->nb[0] == ggml_type_size(x->type);
}

}  // namespace

ggml::cpu::tensor_traits * lctx_cpu_dots(const ggml_tensor * op) {
    static dots ours;
    const bool is_product = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;
    if (!is_product || !lctx_is_fixed(op) || (op->op == GGML_OP_MUL_MAT && lctx_has_hint(op))) {
        return nullptr;
    }
    GGML_ASSERT(fits(op));
    return &ours;
}
