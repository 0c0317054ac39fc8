// Products of quantized weights with a few columns: each row is read once and meets all columns (quads.h).
#include "ggml-cpu-impl.h"
#include "multiply.h"
#include "parts.h"
#include "quads.h"
#include "traits.h"

#if defined(__AVX512VNNI__)

namespace {

constexpr int64_t N_TOGETHER = 4;     // columns whose sums stay in registers
constexpr int64_t ROWS_OF_TAKE = 32;  // that a thread takes at once

template <class BLOCK> class few_product : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        lctx_parts parts{0};
        for (int64_t c = 0; c < op->src[1]->ne[1]; c++) {
            column(parts, op);
        }
        size = LCTX_PART_ALIGN + parts.used;
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor *w = op->src[0], *x = op->src[1];
        lctx_quad_column columns[LCTX_FEW_COLUMNS];
        lctx_parts parts{GGML_PAD((uintptr_t)params->wdata, LCTX_PART_ALIGN)};
        for (int64_t c = 0; c < x->ne[1]; c++) {
            columns[c] = column(parts, op);
        }
        const int64_t k_dim = w->ne[0], n_quad = quads(op);
        for (int64_t i = params->ith; i < x->ne[1] * n_quad; i += params->nth) {
            lctx_fill_quad(columns[i / n_quad], (const float *)((const char *)x->data + i / n_quad * x->nb[1]), k_dim, i % n_quad);
        }
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        const int64_t n_take = (w->ne[1] + ROWS_OF_TAKE - 1) / ROWS_OF_TAKE;
        for (int64_t take = params->ith; take < n_take; take = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t end = std::min((take + 1) * ROWS_OF_TAKE, w->ne[1]);
            for (int64_t row = take * ROWS_OF_TAKE; row < end; row++) {
                multiply(op, columns, row);
            }
        }
        return true;
    }

  private:
    static int64_t quads(const ggml_tensor * op) { return (op->src[0]->ne[0] + LCTX_QUAD_DIM - 1) / LCTX_QUAD_DIM; }
    static lctx_quad_column column(lctx_parts & parts, const ggml_tensor * op) {
        const size_t n = quads(op);
        return {parts.take<int8_t>(n * LCTX_QUAD_DIM), parts.take<float>(n * LCTX_QUAD * 4), parts.take<float>(n * LCTX_QUAD)};
    }
    static void multiply(const ggml_tensor * op, const lctx_quad_column * columns, int64_t row) {
        const ggml_tensor * w = op->src[0];
        const BLOCK * blocks = (const BLOCK *)((const char *)w->data + row * w->nb[1]);
        const int64_t n = op->src[1]->ne[1], out_row = op->nb[1] / sizeof(float);
        float * out = (float *)op->data + row;
        for (int64_t c = 0; c < n; c += N_TOGETHER) {
            static constexpr decltype(&lctx_multiply_row<BLOCK, 1>) BY_COLUMNS[N_TOGETHER] = {
                lctx_multiply_row<BLOCK, 1>, lctx_multiply_row<BLOCK, 2>, lctx_multiply_row<BLOCK, 3>, lctx_multiply_row<BLOCK, 4>};
            BY_COLUMNS[std::min(N_TOGETHER, n - c) - 1](blocks, w->ne[0], columns + c, out + c * out_row, out_row);
        }
    }
};

template <class BLOCK> ggml::cpu::tensor_traits * few() {
    static few_product<BLOCK> p;
    return &p;
}

}  // namespace

ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type type, int64_t n_columns) {
    if (n_columns == 1 && (type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K)) {
        return nullptr;  // ggml is faster: its scales stay integers
    }
    switch (type) {
        case GGML_TYPE_Q4_0: return few<block_q4_0>();
        case GGML_TYPE_Q4_1: return few<block_q4_1>();
        case GGML_TYPE_Q4_K: return few<block_q4_K>();
        case GGML_TYPE_Q5_K: return few<block_q5_K>();
        default:             return nullptr;
    }
}

#else

ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type, int64_t) {
    return nullptr;
}

#endif
