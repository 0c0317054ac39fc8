// Products of quantized weights with a few columns: each row is read once and meets all columns (quads.h, super.h).
#include "ggml-cpu-impl.h"
#include "multiply.h"
#include "parts.h"
#include "quads.h"
#include "super.h"
#include "takes.h"
#include "traits.h"

#if LCTX_HAS_SUPER

namespace {

constexpr int64_t N_TOGETHER = 4;  // columns whose sums stay in registers

#if LCTX_HAS_QUADS
// Quads of groups of 32 values, in registers.
template <class BLOCK> struct by_quads {
    typedef BLOCK block;
    typedef lctx_quad_column column;

    static int64_t n_part(int64_t k_dim) { return (k_dim + LCTX_QUAD_DIM - 1) / LCTX_QUAD_DIM; }
    static column take(lctx_parts & parts, int64_t n) {
        return {parts.take<int8_t>(n * LCTX_QUAD_DIM), parts.take<float>(n * LCTX_QUAD * 4), parts.take<float>(n * LCTX_QUAD)};
    }
    static void fill(const column & to, const float * x, int64_t k_dim, int64_t part) { lctx_fill_quad(to, x, k_dim, part); }
    template <int NC> static void multiply(const BLOCK * row, int64_t k_dim, const column * x, float * out, int64_t out_row) {
        lctx_multiply_row<BLOCK, NC>(row, k_dim, x, out, out_row);
    }
};
#endif

// Blocks of 256 values, whose scales stay integers.
template <class BLOCK> struct by_super {
    typedef BLOCK block;
    typedef lctx_super_column column;

    static int64_t n_part(int64_t k_dim) { return k_dim / QK_K; }
    static column take(lctx_parts & parts, int64_t n) {
        return {parts.take<int8_t>(n * QK_K), parts.take<float>(n), parts.take<int16_t>(n * 16)};
    }
    static void fill(const column & to, const float * x, int64_t, int64_t part) { lctx_fill_super<BLOCK>(to, x, part); }
    template <int NC> static void multiply(const block * row, int64_t k_dim, const column * x, float * out, int64_t out_row) {
        lctx_multiply_super<BLOCK, NC>(row, k_dim / QK_K, x, out, out_row);
    }
};

// Columns become bytes once; then threads take rows, of which ROWS says how many there are and what each is multiplied with.
template <class WAY, template <class> class ROWS> class few_product : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        lctx_parts parts{0};
        typename WAY::column columns[LCTX_EXPERT_COLUMNS];
        take(op, parts, columns);
        size = LCTX_PART_ALIGN + parts.used;
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor *w = op->src[0], *x = op->src[1];
        typename WAY::column columns[LCTX_EXPERT_COLUMNS];
        lctx_parts parts{GGML_PAD((uintptr_t)params->wdata, LCTX_PART_ALIGN)};
        take(op, parts, columns);
        const int64_t n_part = WAY::n_part(w->ne[0]);
        for (int64_t i = params->ith; i < x->ne[1] * x->ne[2] * n_part; i += params->nth) {
            const int64_t c = i / n_part;
            const char * values = (const char *)x->data + c % x->ne[1] * x->nb[1] + c / x->ne[1] * x->nb[2];
            WAY::fill(columns[c], (const float *)values, w->ne[0], i % n_part);
        }
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        const int64_t n_row = ROWS<WAY>::count(op);
        const lctx_takes takes(n_row, 1, params->nth);
        for (int64_t take = params->ith; takes.first(take) < n_row; take = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            for (int64_t row = takes.first(take), end = takes.first(take + 1); row < end; row++) {
                ROWS<WAY>::multiply(op, columns, row);
            }
        }
        return true;
    }

  private:
    static void take(const ggml_tensor * op, lctx_parts & parts, typename WAY::column * columns) {
        for (int64_t c = 0; c < op->src[1]->ne[1] * op->src[1]->ne[2]; c++) {
            columns[c] = WAY::take(parts, WAY::n_part(op->src[0]->ne[0]));
        }
    }
};

// GGML_OP_MUL_MAT: a row meets all columns.
template <class WAY> struct matrix_rows {
    static int64_t count(const ggml_tensor * op) { return op->src[0]->ne[1]; }
    static void multiply(const ggml_tensor * op, const typename WAY::column * columns, int64_t row) {
        const ggml_tensor * w = op->src[0];
        const auto * blocks = (const typename WAY::block *)((const char *)w->data + row * w->nb[1]);
        const int64_t n = op->src[1]->ne[1], out_row = op->nb[1] / sizeof(float);
        float * out = (float *)op->data + row;
        for (int64_t c = 0; c < n; c += N_TOGETHER) {
            static constexpr decltype(&WAY::template multiply<1>) BY_COLUMNS[N_TOGETHER] = {
                WAY::template multiply<1>, WAY::template multiply<2>, WAY::template multiply<3>, WAY::template multiply<4>};
            BY_COLUMNS[std::min(N_TOGETHER, n - c) - 1](blocks, w->ne[0], columns + c, out + c * out_row, out_row);
        }
    }
};

// GGML_OP_MUL_MAT_ID: each token has rows of the experts that ids [n_used, n_token] names, and a column for each of them or one for all.
template <class WAY> struct expert_rows {
    static int64_t count(const ggml_tensor * op) { return op->src[2]->ne[0] * op->src[2]->ne[1] * op->src[0]->ne[1]; }
    static void multiply(const ggml_tensor * op, const typename WAY::column * columns, int64_t i) {
        const ggml_tensor *w = op->src[0], *x = op->src[1], *ids = op->src[2];
        const int64_t row = i % w->ne[1], used = i / w->ne[1] % ids->ne[0], token = i / w->ne[1] / ids->ne[0];
        const int32_t expert = *(const int32_t *)((const char *)ids->data + used * ids->nb[0] + token * ids->nb[1]);
        const char * blocks = (const char *)w->data + expert * w->nb[2] + row * w->nb[1];
        float * out = (float *)((char *)op->data + used * op->nb[1] + token * op->nb[2]) + row;
        WAY::template multiply<1>((const typename WAY::block *)blocks, w->ne[0], &columns[token * x->ne[1] + used % x->ne[1]], out, 0);
    }
};

template <class WAY, template <class> class ROWS = matrix_rows> ggml::cpu::tensor_traits * few() {
    static few_product<WAY, ROWS> p;
    return &p;
}

}  // namespace

ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type type) {
    switch (type) {
#if LCTX_HAS_QUADS
        case GGML_TYPE_Q4_0:  return few<by_quads<block_q4_0>>();
        case GGML_TYPE_Q4_1:  return few<by_quads<block_q4_1>>();
        case GGML_TYPE_MXFP4: return few<by_quads<block_mxfp4>>();
#endif
        case GGML_TYPE_Q4_K: return few<by_super<block_q4_K>>();
        case GGML_TYPE_Q5_K: return few<by_super<block_q5_K>>();
        case GGML_TYPE_Q6_K: return few<by_super<block_q6_K>>();
        default:             return nullptr;
    }
}

ggml::cpu::tensor_traits * lctx_cpu_experts(ggml_type type) {
    switch (type) {
#if LCTX_HAS_QUADS
        case GGML_TYPE_Q4_0:  return few<by_quads<block_q4_0>, expert_rows>();
        case GGML_TYPE_Q4_1:  return few<by_quads<block_q4_1>, expert_rows>();
        case GGML_TYPE_MXFP4: return few<by_quads<block_mxfp4>, expert_rows>();
#endif
        case GGML_TYPE_Q4_K: return few<by_super<block_q4_K>, expert_rows>();
        case GGML_TYPE_Q5_K: return few<by_super<block_q5_K>, expert_rows>();
        case GGML_TYPE_Q6_K: return few<by_super<block_q6_K>, expert_rows>();
        default:             return nullptr;
    }
}

#else

ggml::cpu::tensor_traits * lctx_cpu_experts(ggml_type) {
    return nullptr;
}

ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type) {
    return nullptr;
}

#endif
