// Products of quantized weights with many columns: rows of weights become bytes once (panel.h), then meet all columns
// (bytes.h).
#include "multiply.h"

#include "../ops/fixed.h"
#include "ggml-backend.h"
#include "straight.h"
#include "takes.h"
#include "tiles.h"
#include "traits.h"

#if LCTX_HAS_BYTES

namespace {

constexpr int64_t PANEL_BYTES =
    256 << 10;  // of the weights that a thread has as bytes: they stay in the second-level cache
constexpr int64_t MAX_PANEL = 4;
constexpr int64_t N_TAKE = 4;  // at least, of a thread: threads differ in speed

// The buffers of a product of the columns of some tiles.
template <class W> struct plan {
    int64_t k_dim, n_rows;
    int64_t max_panel, n_panel;  // panels for which a thread has room, and that it takes at once
    int64_t n_chunk;             // such takes of a matrix

    plan(const ggml_tensor * op, int n_threads) : k_dim(op->src[0]->ne[0]), n_rows(op->src[0]->ne[1]) {
        const int64_t all = (n_rows + LCTX_VL - 1) / LCTX_VL;
        max_panel = std::clamp<int64_t>(PANEL_BYTES / (LCTX_VL * k_dim), 1, MAX_PANEL);
        n_panel = std::clamp<int64_t>(all / (N_TAKE * n_threads), 1, max_panel);
        n_chunk = (all + n_panel - 1) / n_panel;
    }
    lctx_column_bytes columns(lctx_bump & at) const {
        const size_t n_sum = k_dim / W::GROUP * LCTX_TILE;
        return {at.take<int8_t>(k_dim * LCTX_TILE), at.take<float>(k_dim / W::N * LCTX_TILE),
                W::HAS_MIN ? nullptr : at.take<int32_t>(n_sum), W::HAS_MIN ? at.take<float>(n_sum) : nullptr};
    }
    lctx_panel panel(lctx_bump & at) const {
        const size_t n_scale = k_dim / W::GROUP * LCTX_VL;
        return {at.take<uint8_t>(k_dim * LCTX_VL), at.take<float>(n_scale),
                W::HAS_MIN ? at.take<float>(n_scale) : nullptr,
                lctx_int_scales<W> ? at.take<int32_t>(n_scale) : nullptr,
                lctx_int_scales<W> && W::HAS_MIN ? at.take<float>(k_dim / W::N * LCTX_VL) : nullptr};
    }
    size_t columns_size() const {
        lctx_bump at{0};
        columns(at);
        return at.used;
    }
    size_t panel_size() const {
        lctx_bump at{0};
        panel(at);
        return at.used;
    }
};

template <class W> void multiply_columns(const lctx_panel & p, const lctx_column_bytes & x, int64_t k_dim, int n_rows,
                                         const lctx_tile_ends & ends, int64_t row) {
    const auto by = ends.n > LCTX_HALF_TILE ? lctx_multiply_tile<W, LCTX_TILE>
                    : ends.n > 1            ? lctx_multiply_tile<W, LCTX_HALF_TILE>
                                            : lctx_multiply_tile<W, 1>;
    by(p, x, k_dim, n_rows, ends, row);
}

// With so few columns there is a way without panels.
template <class W> constexpr int64_t STRAIGHT_COLUMNS = 0;

// Rows [first, end) of a matrix with such columns.
template <class W> void multiply_straight(const ggml_tensor *, const char *, const lctx_column_bytes &,
                                          const lctx_tile_ends &, int64_t, int64_t) {}

#if LCTX_HAS_STRAIGHT
template <> constexpr int64_t STRAIGHT_COLUMNS<lctx_weight<GGML_TYPE_Q8_0>> = LCTX_STRAIGHT_COLUMNS;

template <> void multiply_straight<lctx_weight<GGML_TYPE_Q8_0>>(const ggml_tensor * w, const char * matrix,
                                                                const lctx_column_bytes & x,
                                                                const lctx_tile_ends & ends, int64_t first,
                                                                int64_t end) {
    static constexpr decltype(&lctx_multiply_four<1>) BY_COLUMNS[LCTX_STRAIGHT_COLUMNS] = {
        lctx_multiply_four<1>, lctx_multiply_four<2>, lctx_multiply_four<3>};
    for (int64_t row = first; row < end; row += LCTX_STRAIGHT_ROWS) {
        const block_q8_0 * rows[LCTX_STRAIGHT_ROWS];
        for (int r = 0; r < LCTX_STRAIGHT_ROWS; r++) {
            rows[r] = (const block_q8_0 *)(matrix + std::min(row + r, end - 1) * w->nb[1]);
        }
        const int n_rows = (int)std::min<int64_t>(LCTX_STRAIGHT_ROWS, end - row);
        BY_COLUMNS[ends.n - 1](rows, w->ne[0] / QK8_0, x, n_rows, ends, row);
    }
}
#endif

// The work buffer: the columns of all tiles, and for each thread what MATRICES keeps and its panels.
template <class W, class MATRICES> class product : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        const plan<W> p(op, n_threads);
        lctx_bump own{0};
        const MATRICES m(op, own);
        size =
            LCTX_BUMP_ALIGN + m.max_tile() * p.columns_size() + n_threads * (own.used + p.max_panel * p.panel_size());
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const plan<W> p(op, params->nth);
        const uintptr_t base = GGML_PAD((uintptr_t)params->wdata, LCTX_BUMP_ALIGN);
        lctx_bump counted{0};
        const size_t n_shared = MATRICES(op, counted).max_tile() * p.columns_size();
        lctx_bump own{base + n_shared + params->ith * (counted.used + p.max_panel * p.panel_size())};
        const MATRICES m(op, own);
        m.sort();
        const bool is_straight = m.most_columns() <= STRAIGHT_COLUMNS<W>;
        quantize(params, m, p, base, is_straight ? 1 : LCTX_HALF_TILE);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        if (is_straight) {
            multiply_straight(params, op->src[0], m, p, base);
            return true;
        }
        for (int64_t i = params->ith; i < m.n_matrix() * p.n_chunk;
             i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            multiply(op->src[0], m, m.matrix(i / p.n_chunk), p, base, own.base + own.used, i % p.n_chunk);
        }
        return true;
    }

  private:
    static lctx_column_bytes columns(const plan<W> & p, uintptr_t base, int64_t tile) {
        lctx_bump at{base + tile * p.columns_size()};
        return p.columns(at);
    }
    // unit: columns that are multiplied together at least.
    static void quantize(const ggml_compute_params * params, const MATRICES & m, const plan<W> & p, uintptr_t base,
                         int unit) {
        const int64_t n_block = p.k_dim / W::N;
        lctx_tile_ends ends;
        for (int64_t i = params->ith, known = -1; i < m.n_tile() * n_block; i += params->nth) {
            const int64_t tile = i / n_block;
            if (tile != known) {
                ends = m.tile(tile);
                known = tile;
            }
            lctx_fill_columns<W>(columns(p, base, tile), ends, (ends.n + unit - 1) / unit * unit, i % n_block * W::N);
        }
    }
    // Every matrix has a tile at most: threads take rows of all of them, one after the other.
    static void multiply_straight(const ggml_compute_params * params, const ggml_tensor * weight, const MATRICES & m,
                                  const plan<W> & p, uintptr_t base) {
        const lctx_takes takes(m.n_tile() * p.n_rows, LCTX_STRAIGHT_ROWS, params->nth);
        const auto straight = [&](int64_t tile, int64_t row, int64_t end) {
            ::multiply_straight<W>(weight, m.matrix_of(tile).rows, columns(p, base, tile), m.tile(tile), row, end);
        };
        const int64_t n_row = m.n_tile() * p.n_rows;
        for (int64_t take = params->ith; takes.first(take) < n_row;
             take = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            lctx_each_tile(takes.first(take), takes.first(take + 1), p.n_rows, straight);
        }
    }
    static void multiply(const ggml_tensor * weight, const MATRICES & m, const lctx_matrix & w, const plan<W> & p,
                         uintptr_t base, uintptr_t own, int64_t chunk) {
        if (w.first == w.end) {
            return;
        }
        const size_t row_size = weight->nb[1];
        const auto first_row = [&](int64_t i) { return (chunk * p.n_panel + i) * LCTX_VL; };
        const auto n_rows = [&](int64_t i) { return (int)std::min<int64_t>(LCTX_VL, p.n_rows - first_row(i)); };
        if (w.first + 1 == w.end && m.tile(w.first).n <= STRAIGHT_COLUMNS<W>) {
            return ::multiply_straight<W>(weight, w.rows, columns(p, base, w.first), m.tile(w.first), first_row(0),
                                          std::min(p.n_rows, first_row(p.n_panel)));
        }
        lctx_bump at{own};
        lctx_panel panels[MAX_PANEL];
        const int64_t n = std::min<int64_t>(p.n_panel, (p.n_rows - first_row(0) + LCTX_VL - 1) / LCTX_VL);
        for (int64_t i = 0; i < n; i++) {
            panels[i] = p.panel(at);
            lctx_fill_panel<W>(panels[i], w.rows + first_row(i) * row_size, row_size, n_rows(i), p.k_dim);
        }
        for (int64_t tile = w.first; tile < w.end; tile++) {
            const lctx_column_bytes x = columns(p, base, tile);
            const lctx_tile_ends ends = m.tile(tile);
            for (int64_t i = 0; i < n; i++) {
                multiply_columns<W>(panels[i], x, p.k_dim, n_rows(i), ends, first_row(i));
            }
        }
    }
};

template <ggml_type TYPE, class MATRICES = lctx_one_matrix> ggml::cpu::tensor_traits * panels() {
    static product<lctx_weight<TYPE>, MATRICES> p;
    return &p;
}

struct entry {
    ggml_type type;
    int64_t min_columns;  // from which on panels are the faster way
    bool with_dpbusd;     // only where the CPU has it: ggml's products by maddubs are as fast, or a byte has eight bits
    ggml::cpu::tensor_traits * (*panels)(), *(*expert_panels)();
};

template <ggml_type TYPE> constexpr entry entry_of(int64_t min_columns, bool with_dpbusd) {
    return {TYPE, min_columns, with_dpbusd, panels<TYPE, lctx_one_matrix>, panels<TYPE, lctx_expert_matrices>};
}

constexpr int64_t AFTER_FEW_32 = std::max<int64_t>(LCTX_FEW_COLUMNS_32 + 1, 4);
constexpr int64_t AFTER_FEW_256 = std::max<int64_t>(LCTX_FEW_COLUMNS_256 + 1, 8);
// Columns of an expert, on the average, from which on panels are the faster way: than those of multiply-few.cpp, and
// than ggml's where a type has none.
constexpr int64_t AFTER_FEW_OF_EXPERT = 8, AFTER_GGML_OF_EXPERT = 3;

constexpr entry PRODUCTS[] = {
    entry_of<GGML_TYPE_Q4_0>(AFTER_FEW_32, true),
    entry_of<GGML_TYPE_Q4_1>(AFTER_FEW_32, false),
    entry_of<GGML_TYPE_MXFP4>(AFTER_FEW_32, true),
    entry_of<GGML_TYPE_Q8_0>(1, true),
    entry_of<GGML_TYPE_Q5_0>(4, true),
    entry_of<GGML_TYPE_Q5_1>(4, false),
    entry_of<GGML_TYPE_Q4_K>(AFTER_FEW_256, false),
    entry_of<GGML_TYPE_Q5_K>(AFTER_FEW_256, false),
    entry_of<GGML_TYPE_Q6_K>(AFTER_FEW_256, false),
};

// Return whether a product is that of weights in memory with columns of floats.
bool is_plain(const ggml_tensor * op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    return w->buffer && ggml_backend_buffer_is_host(w->buffer) && w->nb[0] == ggml_type_size(w->type) &&
           w->ne[3] * x->ne[3] == 1 && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) &&
           op->nb[0] == sizeof(float);
}

// Panels have one order of sums for any number of columns.
ggml::cpu::tensor_traits * way_of_matrix(const entry & e, const ggml_tensor * op) {
    if (op->src[0]->ne[2] * op->src[1]->ne[2] != 1) {
        return nullptr;
    }
    ggml::cpu::tensor_traits * few = lctx_cpu_few(e.type, lctx_is_fixed(op));
    const bool by_panels = op->src[1]->ne[1] >= e.min_columns || (lctx_is_fixed(op) && !few);
    return by_panels ? e.panels() : few;
}

ggml::cpu::tensor_traits * way_of_experts(const entry & e, const ggml_tensor * op) {
    const ggml_tensor * ids = op->src[2];
    ggml::cpu::tensor_traits * few = lctx_cpu_experts(e.type, lctx_is_fixed(op));
    const int64_t least = few ? AFTER_FEW_OF_EXPERT : AFTER_GGML_OF_EXPERT;
    const bool by_panels = ids->ne[0] * ids->ne[1] >= least * op->src[0]->ne[2] || (lctx_is_fixed(op) && !few);
    return by_panels ? e.expert_panels() : few;
}

}  // namespace

ggml::cpu::tensor_traits * lctx_cpu_multiply(const ggml_tensor * op) {
    if (op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) {
        return nullptr;
    }
    for (const entry & e : PRODUCTS) {
        if (op->src[0]->type == e.type && (LCTX_FULL_BYTES || !e.with_dpbusd) && is_plain(op)) {
            return op->op == GGML_OP_MUL_MAT ? way_of_matrix(e, op) : way_of_experts(e, op);
        }
    }
    return nullptr;
}

bool lctx_cpu_keeps_plain(const ggml_tensor * op) {
    const ggml_type type = op->src[0]->type;
    if (type == GGML_TYPE_Q4_K) {
        return true;
    }
    return (type == GGML_TYPE_Q4_0 || type == GGML_TYPE_MXFP4) && LCTX_FULL_BYTES;
}

#else

ggml::cpu::tensor_traits * lctx_cpu_multiply(const ggml_tensor *) {
    return nullptr;
}

bool lctx_cpu_keeps_plain(const ggml_tensor *) {
    return false;
}

#endif
