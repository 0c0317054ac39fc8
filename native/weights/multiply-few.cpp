// Products of quantized weights with a few columns: each row is read once and meets all columns (quads.h, super.h).
#include "ggml-cpu-impl.h"
#include "multiply.h"
#include "quads.h"
#include "super.h"
#include "takes.h"
#include "tiles.h"
#include "traits.h"

#if LCTX_HAS_SUPER

namespace {

constexpr int64_t N_TOGETHER = 4;  // columns whose sums stay in registers

#if LCTX_HAS_QUADS
// Groups of 32 values, in a quad of lanes each. EXACT: the bits are those of a panel.
template <class BLOCK, bool EXACT> struct by_quads {
    typedef BLOCK block;
    typedef lctx_quad_column column;

    static int64_t n_piece(int64_t k_dim) { return (k_dim + LCTX_QUADS_DIM - 1) / LCTX_QUADS_DIM; }
    static column take(lctx_bump & at, int64_t n) {
        return {at.take<int8_t>(n * LCTX_QUADS_DIM), at.take<float>(n * LCTX_VL), at.take<int32_t>(n * LCTX_VL)};
    }
    static void fill(const column & to, const float * x, int64_t k_dim, int64_t piece) {
        lctx_fill_quads<BLOCK>(to, x, k_dim, piece);
    }
    template <int NC>
    static void multiply(const BLOCK * row, int64_t k_dim, const column * x, float * out, int64_t out_row) {
        lctx_multiply_row<BLOCK, NC, EXACT>(row, k_dim, x, out, out_row);
    }
};
#endif

// Blocks of 256 values, whose scales stay integers.
template <class BLOCK, bool EXACT> struct by_super {
    typedef BLOCK block;
    typedef lctx_super_column column;

    static int64_t n_piece(int64_t k_dim) { return k_dim / QK_K; }
    static column take(lctx_bump & at, int64_t n) {
        return {at.take<int8_t>(n * QK_K), at.take<float>(n), at.take<int16_t>(n * 16)};
    }
    static void fill(const column & to, const float * x, int64_t, int64_t piece) {
        lctx_fill_super<BLOCK>(to, x, piece);
    }
    template <int NC>
    static void multiply(const block * row, int64_t k_dim, const column * x, float * out, int64_t out_row) {
        lctx_multiply_super<BLOCK, NC, EXACT>(row, k_dim / QK_K, x, out, out_row);
    }
};

// A row with the first n of some columns, results in out[column * out_row].
template <class WAY> void multiply_row(const char * row, int64_t k_dim, const typename WAY::column * columns, int64_t n,
                                       float * out, int64_t out_row) {
    static constexpr decltype(&WAY::template multiply<1>) BY_COLUMNS[N_TOGETHER] = {
        WAY::template multiply<1>, WAY::template multiply<2>, WAY::template multiply<3>, WAY::template multiply<4>};
    for (int64_t c = 0; c < n; c += N_TOGETHER) {
        BY_COLUMNS[std::min(N_TOGETHER, n - c) - 1]((const typename WAY::block *)row, k_dim, columns + c,
                                                    out + c * out_row, out_row);
    }
}

// The columns of x as bytes, in a work buffer.
template <class WAY> class byte_columns {
  public:
    byte_columns(const ggml_tensor * op, lctx_bump & at)
        : x(op->src[1]), k_dim(x->ne[0]), n_piece(WAY::n_piece(k_dim)) {
        lctx_bump one{0};
        WAY::take(one, n_piece);
        size = one.used;
        base = (uintptr_t)at.take<char>(count() * size);
    }
    int64_t count() const { return x->ne[1] * x->ne[2]; }
    typename WAY::column at(int64_t c) const {
        lctx_bump at{base + c * size};
        return WAY::take(at, n_piece);
    }
    void fill(int ith, int nth) const {
        for (int64_t i = ith; i < count() * n_piece; i += nth) {
            const int64_t c = i / n_piece;
            const char * values = (const char *)x->data + c % x->ne[1] * x->nb[1] + c / x->ne[1] * x->nb[2];
            WAY::fill(at(c), (const float *)values, k_dim, i % n_piece);
        }
    }

  private:
    const ggml_tensor * x;
    int64_t k_dim, n_piece;
    size_t size;
    uintptr_t base;
};

// GGML_OP_MUL_MAT: a row meets all columns.
template <class WAY> class matrix_rows {
  public:
    matrix_rows(const ggml_tensor * op, const byte_columns<WAY> & columns, lctx_bump &) : op(op) {
        for (int64_t c = 0; c < columns.count(); c++) {
            all[c] = columns.at(c);
        }
    }
    void sort() const {}
    int64_t count() const { return op->src[0]->ne[1]; }
    void multiply(int64_t first, int64_t end) const {
        const ggml_tensor * w = op->src[0];
        for (int64_t row = first; row < end; row++) {
            const char * at = (const char *)w->data + row * w->nb[1];
            multiply_row<WAY>(at, w->ne[0], all, op->src[1]->ne[1], (float *)op->data + row, op->nb[1] / sizeof(float));
        }
    }

  private:
    const ggml_tensor * op;
    typename WAY::column all[std::max(LCTX_FEW_COLUMNS_32, LCTX_FEW_COLUMNS_256)];
};

// GGML_OP_MUL_MAT_ID: a row of an expert meets the columns of a tile of its own.
template <class WAY> class expert_rows {
  public:
    expert_rows(const ggml_tensor * op, const byte_columns<WAY> & columns, lctx_bump & at)
        : op(op), columns(columns), matrices(op, at) {}
    void sort() const { matrices.sort(); }
    int64_t count() const { return matrices.n_tile() * n_row(); }
    void multiply(int64_t first, int64_t end) const {
        lctx_each_tile(first, end, n_row(),
                       [&](int64_t tile, int64_t row, int64_t row_end) { multiply_tile(tile, row, row_end); });
    }

  private:
    const ggml_tensor * op;
    const byte_columns<WAY> columns;
    const lctx_expert_matrices matrices;

    int64_t n_row() const { return op->src[0]->ne[1]; }
    void multiply_tile(int64_t tile, int64_t first, int64_t end) const {
        const lctx_tile_ends ends = matrices.tile(tile);
        typename WAY::column of_tile[LCTX_TILE];
        for (int c = 0; c < ends.n; c++) {
            of_tile[c] = columns.at(matrices.column(tile, c));
        }
        const char * at = matrices.matrix_of(tile).rows + first * op->src[0]->nb[1];
        for (int64_t row = first; row < end; row++, at += op->src[0]->nb[1]) {
            float products[LCTX_TILE];
            multiply_row<WAY>(at, op->src[0]->ne[0], of_tile, ends.n, products, 1);
            for (int c = 0; c < ends.n; c++) {
                ends.out[c][row] = products[c];
            }
        }
    }
};

// Columns become bytes once; then threads take rows, of which ROWS says how many there are and what each is multiplied
// with.
template <class WAY, template <class> class ROWS> class few_product : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        lctx_bump shared{0};
        const byte_columns<WAY> columns(op, shared);
        size = LCTX_BUMP_ALIGN + shared.used + n_threads * own_size(op);
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        lctx_bump shared{GGML_PAD((uintptr_t)params->wdata, LCTX_BUMP_ALIGN)};
        const byte_columns<WAY> columns(op, shared);
        lctx_bump own{shared.base + shared.used + params->ith * own_size(op)};
        const ROWS<WAY> rows(op, columns, own);
        rows.sort();
        columns.fill(params->ith, params->nth);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        const lctx_takes takes(rows.count(), 1, params->nth);
        for (int64_t take = params->ith; takes.first(take) < rows.count();
             take = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            rows.multiply(takes.first(take), takes.first(take + 1));
        }
        return true;
    }

  private:
    static size_t own_size(const ggml_tensor * op) {
        lctx_bump shared{0}, own{0};
        const byte_columns<WAY> columns(op, shared);
        const ROWS<WAY> rows(op, columns, own);
        return own.used;
    }
};

template <class WAY, template <class> class ROWS> ggml::cpu::tensor_traits * few() {
    static few_product<WAY, ROWS> p;
    return &p;
}

}  // namespace

template <template <class> class ROWS, bool EXACT> static ggml::cpu::tensor_traits * way_of(ggml_type type) {
    switch (type) {
#if LCTX_HAS_QUADS
        case GGML_TYPE_Q4_0:  return few<by_quads<block_q4_0, EXACT>, ROWS>();
        case GGML_TYPE_Q4_1:  return few<by_quads<block_q4_1, EXACT>, ROWS>();
        case GGML_TYPE_MXFP4: return few<by_quads<block_mxfp4, EXACT>, ROWS>();
#endif
        case GGML_TYPE_Q4_K: return few<by_super<block_q4_K, EXACT>, ROWS>();
        case GGML_TYPE_Q5_K: return few<by_super<block_q5_K, EXACT>, ROWS>();
        case GGML_TYPE_Q6_K: return few<by_super<block_q6_K, EXACT>, ROWS>();
        default:             return nullptr;
    }
}

ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type type, bool is_fixed) {
    return is_fixed ? way_of<matrix_rows, true>(type) : way_of<matrix_rows, false>(type);
}

ggml::cpu::tensor_traits * lctx_cpu_experts(ggml_type type, bool is_fixed) {
#if LCTX_HAS_QUADS
    if (type == GGML_TYPE_Q8_0 && !is_fixed) {
        return few<by_quads<block_q8_0, false>, expert_rows>();
    }
#endif
    return is_fixed ? way_of<expert_rows, true>(type) : way_of<expert_rows, false>(type);
}

#else

ggml::cpu::tensor_traits * lctx_cpu_experts(ggml_type, bool) {
    return nullptr;
}

ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type, bool) {
    return nullptr;
}

#endif
