// Products of quantized weights with many columns: rows of weights become bytes once (panel.h), then meet all columns (bytes.h).
#include "multiply.h"

#include "bytes.h"
#include "ggml-backend.h"
#include "parts.h"
#include "straight.h"
#include "takes.h"
#include "traits.h"

#if LCTX_HAS_BYTES

namespace {

constexpr int64_t PANEL_BYTES = 256 << 10;  // of the weights that a thread has as bytes: they stay in the second-level cache
constexpr int64_t MAX_PANEL = 4;
constexpr int64_t N_TAKE = 4;  // at least, of a thread: threads differ in speed

// The buffers of one product of n_columns columns.
template <class W> struct plan {
    int64_t k_dim, n_rows, n_columns, n_tile;
    int64_t max_panel, n_panel;  // panels for which a thread has room, and that it takes at once
    int64_t n_chunk;             // such takes

    plan(const ggml_tensor * op, int n_threads)
        : k_dim(op->src[0]->ne[0]),
          n_rows(op->src[0]->ne[1]),
          n_columns(op->src[1]->ne[1]),
          n_tile((n_columns + LCTX_TILE - 1) / LCTX_TILE) {
        const int64_t all = (n_rows + LCTX_VL - 1) / LCTX_VL;
        max_panel = std::clamp<int64_t>(PANEL_BYTES / (LCTX_VL * k_dim), 1, MAX_PANEL);
        n_panel = std::clamp<int64_t>(all / (N_TAKE * n_threads), 1, max_panel);
        n_chunk = (all + n_panel - 1) / n_panel;
    }
    lctx_columns columns(lctx_parts & at) const {
        const size_t n_sum = k_dim / W::GROUP * LCTX_TILE;
        return {at.take<int8_t>(k_dim * LCTX_TILE), at.take<float>(k_dim / W::N * LCTX_TILE),
                W::HAS_MIN ? nullptr : at.take<int32_t>(n_sum), W::HAS_MIN ? at.take<float>(n_sum) : nullptr};
    }
    lctx_panel panel(lctx_parts & at) const {
        const size_t n_scale = k_dim / W::GROUP * LCTX_VL;
        return {at.take<uint8_t>(k_dim * LCTX_VL), at.take<float>(n_scale), W::HAS_MIN ? at.take<float>(n_scale) : nullptr,
                lctx_int_scales<W> ? at.take<int16_t>(2 * n_scale) : nullptr};
    }
    size_t columns_size() const {
        lctx_parts at{0};
        columns(at);
        return at.used;
    }
    size_t panel_size() const {
        lctx_parts at{0};
        panel(at);
        return at.used;
    }
    size_t size(int n_threads) const { return LCTX_PART_ALIGN + n_tile * columns_size() + n_threads * max_panel * panel_size(); }
};

template <class W, int NC = 4>
void multiply_columns(const lctx_panel & p, const lctx_columns & x, int64_t k_dim, int n, int n_rows, float * out, int64_t out_row) {
    if constexpr (NC < LCTX_TILE) {
        if (n > NC) {
            return multiply_columns<W, NC + 4>(p, x, k_dim, n, n_rows, out, out_row);
        }
    }
    lctx_multiply_tile<W, NC>(p, x, k_dim, n, n_rows, out, out_row);
}

// With so few columns there is a way without panels.
template <class W> constexpr int64_t STRAIGHT_COLUMNS = 0;

// Rows [first, end) of a weight with such columns.
template <class W> void multiply_straight(const ggml_tensor *, const lctx_columns &, int64_t, int64_t) {}

#if LCTX_HAS_STRAIGHT
template <> constexpr int64_t STRAIGHT_COLUMNS<lctx_weight<GGML_TYPE_Q8_0>> = LCTX_STRAIGHT_COLUMNS;

template <>
void multiply_straight<lctx_weight<GGML_TYPE_Q8_0>>(const ggml_tensor * op, const lctx_columns & x, int64_t first, int64_t end) {
    const ggml_tensor * w = op->src[0];
    const int64_t n_columns = op->src[1]->ne[1], out_row = op->nb[1] / sizeof(float);
    static constexpr decltype(&lctx_multiply_four<1>) BY_COLUMNS[LCTX_STRAIGHT_COLUMNS] = {lctx_multiply_four<1>, lctx_multiply_four<2>,
                                                                                           lctx_multiply_four<3>};
    for (int64_t row = first; row < end; row += LCTX_STRAIGHT_ROWS) {
        const block_q8_0 * rows[LCTX_STRAIGHT_ROWS];
        for (int r = 0; r < LCTX_STRAIGHT_ROWS; r++) {
            rows[r] = (const block_q8_0 *)((const char *)w->data + std::min(row + r, end - 1) * w->nb[1]);
        }
        const int n_rows = (int)std::min<int64_t>(LCTX_STRAIGHT_ROWS, end - row);
        BY_COLUMNS[n_columns - 1](rows, w->ne[0] / QK8_0, x, n_rows, (float *)op->data + row, out_row);
    }
}
#endif

template <class W> class product : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = plan<W>(op, n_threads).size(n_threads);
        return true;
    }
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const plan<W> p(op, params->nth);
        const uintptr_t base = GGML_PAD((uintptr_t)params->wdata, LCTX_PART_ALIGN);
        quantize(params, op, p, base);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        if (p.n_columns <= STRAIGHT_COLUMNS<W>) {
            const lctx_takes takes(p.n_rows, LCTX_STRAIGHT_ROWS, params->nth);
            for (int64_t take = params->ith; takes.first(take) < p.n_rows; take = ggml_threadpool_chunk_add(params->threadpool, 1)) {
                multiply_straight<W>(op, columns(p, base, 0), takes.first(take), takes.first(take + 1));
            }
            return true;
        }
        for (int64_t chunk = params->ith; chunk < p.n_chunk; chunk = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            multiply(op, p, base, base + p.n_tile * p.columns_size() + params->ith * p.max_panel * p.panel_size(), chunk);
        }
        return true;
    }

  private:
    static lctx_columns columns(const plan<W> & p, uintptr_t base, int64_t tile) {
        lctx_parts at{base + tile * p.columns_size()};
        return p.columns(at);
    }
    static void quantize(const ggml_compute_params * params, const ggml_tensor * op, const plan<W> & p, uintptr_t base) {
        const ggml_tensor * x = op->src[1];
        const int64_t n_block = p.k_dim / W::N;
        for (int64_t i = params->ith; i < p.n_tile * n_block; i += params->nth) {
            const int64_t tile = i / n_block, first = tile * LCTX_TILE;
            lctx_fill_columns<W>(columns(p, base, tile), (const char *)x->data + first * x->nb[1], x->nb[1],
                                 (int)std::min<int64_t>(LCTX_TILE, p.n_columns - first), i % n_block * W::N);
        }
    }
    static void multiply(const ggml_tensor * op, const plan<W> & p, uintptr_t base, uintptr_t own, int64_t chunk) {
        const ggml_tensor * w = op->src[0];
        const int64_t out_row = op->nb[1] / sizeof(float), first_row = chunk * p.n_panel * LCTX_VL;
        lctx_parts at{own};
        lctx_panel panels[MAX_PANEL];
        const int64_t n = std::min<int64_t>(p.n_panel, (p.n_rows - first_row + LCTX_VL - 1) / LCTX_VL);
        for (int64_t i = 0; i < n; i++) {
            const int64_t row = first_row + i * LCTX_VL;
            panels[i] = p.panel(at);
            lctx_fill_panel<W>(panels[i], (const char *)w->data + row * w->nb[1], w->nb[1], (int)std::min<int64_t>(LCTX_VL, p.n_rows - row),
                               p.k_dim);
        }
        for (int64_t tile = 0; tile < p.n_tile; tile++) {
            const lctx_columns x = columns(p, base, tile);
            const int64_t column = tile * LCTX_TILE;
            for (int64_t i = 0; i < n; i++) {
                const int64_t row = first_row + i * LCTX_VL;
                multiply_columns<W>(panels[i], x, p.k_dim, (int)std::min<int64_t>(LCTX_TILE, p.n_columns - column),
                                    (int)std::min<int64_t>(LCTX_VL, p.n_rows - row), (float *)op->data + column * out_row + row, out_row);
            }
        }
    }
};

template <ggml_type TYPE> ggml::cpu::tensor_traits * panels() {
    static product<lctx_weight<TYPE>> p;
    return &p;
}

struct entry {
    ggml_type type;
    int64_t min_columns;  // from which on panels are the faster way
    bool with_dpbusd;     // only where the CPU has it: ggml's products by maddubs are as fast, or a byte has eight bits
    ggml::cpu::tensor_traits * (*panels)();
};

constexpr int64_t AFTER_FEW_32 = std::max<int64_t>(LCTX_FEW_COLUMNS_32 + 1, 4);
constexpr int64_t AFTER_FEW_256 = std::max<int64_t>(LCTX_FEW_COLUMNS_256 + 1, 8);

constexpr entry PRODUCTS[] = {
    {GGML_TYPE_Q4_0, AFTER_FEW_32, true, panels<GGML_TYPE_Q4_0>},
    {GGML_TYPE_Q4_1, AFTER_FEW_32, false, panels<GGML_TYPE_Q4_1>},
    {GGML_TYPE_Q8_0, 1, true, panels<GGML_TYPE_Q8_0>},
    {GGML_TYPE_Q5_0, 4, true, panels<GGML_TYPE_Q5_0>},
    {GGML_TYPE_Q5_1, 4, false, panels<GGML_TYPE_Q5_1>},
    {GGML_TYPE_Q4_K, AFTER_FEW_256, false, panels<GGML_TYPE_Q4_K>},
    {GGML_TYPE_Q5_K, AFTER_FEW_256, false, panels<GGML_TYPE_Q5_K>},
    {GGML_TYPE_Q6_K, AFTER_FEW_256, false, panels<GGML_TYPE_Q6_K>},
};

// Whether a product is that of a weight in memory with columns of floats.
bool is_plain(const ggml_tensor * op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    return w->buffer && ggml_backend_buffer_is_host(w->buffer) && w->nb[0] == ggml_type_size(w->type) && x->type == GGML_TYPE_F32 &&
           x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
}

// Of one matrix.
bool fits(const ggml_tensor * op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    return w->ne[2] * w->ne[3] == 1 && x->ne[2] * x->ne[3] == 1 && is_plain(op);
}

bool has_few_columns(const ggml_tensor * op) {
    const ggml_tensor * x = op->src[1];
    return x->ne[1] * x->ne[2] <= LCTX_EXPERT_COLUMNS && op->src[0]->ne[3] * x->ne[3] == 1 && is_plain(op);
}

}  // namespace

ggml::cpu::tensor_traits * lctx_cpu_multiply(const ggml_tensor * op) {
    if (op->op == GGML_OP_MUL_MAT_ID) {
        return has_few_columns(op) ? lctx_cpu_experts(op->src[0]->type) : nullptr;
    }
    if (op->op != GGML_OP_MUL_MAT) {
        return nullptr;
    }
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    for (const entry & e : PRODUCTS) {
        if (w->type == e.type && (LCTX_FULL_BYTES || !e.with_dpbusd) && fits(op)) {
            return x->ne[1] >= e.min_columns ? e.panels() : lctx_cpu_few(e.type);
        }
    }
    return nullptr;
}

bool lctx_cpu_keeps_plain(const ggml_tensor * op) {
    const ggml_type type = op->src[0]->type;     // Q4_K of experts stays plain too: ggml has tiles for them
    const bool one = op->op == GGML_OP_MUL_MAT;  // and no experts
    if (type == GGML_TYPE_Q4_K) {
        return LCTX_FULL_BYTES || (one && LCTX_FEW_COLUMNS_256 > 0);
    }
    return type == GGML_TYPE_Q4_0 && one && LCTX_FULL_BYTES && LCTX_FEW_COLUMNS_32 > 0;
}

#else

ggml::cpu::tensor_traits * lctx_cpu_multiply(const ggml_tensor *) {
    return nullptr;
}

bool lctx_cpu_keeps_plain(const ggml_tensor *) {
    return false;
}

#endif
