// The runs of single ops share this: checked arguments, a graph on a device.
#pragma once

#include "../base/counts.h"
#include "../base/firewall.h"
#include "../base/refusal.h"
#include "../ops/ops.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "harness.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>

// Answer for a run of the C API: LCTX_OK, or LCTX_INVALID with the reason in err.
template <typename F> int32_t lctx_status_of(F && f, char * err, size_t err_size) noexcept {
    std::string error;
    if (lctx_guard(&error, f)) {
        return LCTX_OK;
    }
    snprintf(err, err_size, "%s", error.c_str());
    return LCTX_INVALID;
}

// Shapes, types and RoPE; the arrays are the caller's business.
inline void lctx_check_shapes(const lctx_op_args & a) {
    lctx_require(lctx_is_kv_type(a.type_k) && lctx_is_kv_type(a.type_v), "type_k or type_v is not a KV type");
    lctx_require(a.rope_mode == GGML_ROPE_TYPE_NORMAL || a.rope_mode == GGML_ROPE_TYPE_NEOX,
                 "rope_mode must be NORM or NEOX");
    lctx_require(a.head_dim_k > 0 && a.head_dim_v > 0 && a.n_head_kv > 0 && a.n_head > 0, "sizes must be positive");
    lctx_require(a.n_head % a.n_head_kv == 0, "n_head must be a multiple of n_head_kv");
    lctx_require(a.n_rows > 0 && a.n_tokens > 0 && a.n_threads > 0, "sizes must be positive");
    lctx_require(a.n_layer >= 0, "n_layer must not be negative");
    lctx_require(a.rope_dims > 0 && a.rope_dims % 2 == 0 && a.rope_dims <= a.head_dim_k,
                 "rope_dims must be even and at most head_dim_k");
    lctx_require(a.head_dim_k % ggml_blck_size((ggml_type)a.type_k) == 0,
                 "head_dim_k is not a multiple of the K block");
    lctx_require(a.head_dim_v % ggml_blck_size((ggml_type)a.type_v) == 0,
                 "head_dim_v is not a multiple of the V block");
    lctx_require(lctx_hadamard::fits(std::max(0, a.hadamard_k), a.head_dim_k),
                 "hadamard_k must be 32, 64, ... and divide head_dim_k");
    lctx_require(lctx_hadamard::fits(std::max(0, a.hadamard_v), a.head_dim_v),
                 "hadamard_v must be 32, 64, ... and divide head_dim_v");
}

inline lctx_hadamard lctx_hadamard_of(const lctx_op_args & a) {
    const lctx_hadamard stored =
        lctx_hadamard_of((ggml_type)a.type_k, a.head_dim_k, (ggml_type)a.type_v, a.head_dim_v, -1);
    return {a.hadamard_k < 0 ? stored.k : (uint16_t)a.hadamard_k, a.hadamard_v < 0 ? stored.v : (uint16_t)a.hadamard_v};
}

inline lctx_rope lctx_rope_of(const lctx_op_args & a) {
    return {a.rope_mode,       a.rope_dims,        a.rope_n_ctx_orig, a.rope_freq_base, a.rope_freq_scale,
            a.rope_ext_factor, a.rope_attn_factor, a.rope_beta_fast,  a.rope_beta_slow};
}

// A device at work; the graphs of a run share it.
using lctx_backend = std::shared_ptr<ggml_backend>;

// The device with this name, the CPU for nullptr. Throws lctx_refusal with the names that there are.
lctx_backend lctx_backend_of(const char * device, int32_t n_threads);

inline bool lctx_on_cpu(const lctx_backend & backend) {
    return ggml_backend_is_cpu(backend.get());
}

// Nodes in their order.
struct lctx_graph {
    ggml_context_ptr ctx;
    ggml_cgraph * graph;
};

// Tensors and nodes of one run.
struct lctx_graph_run {
    static constexpr int32_t N_WARM = 3;  // on a GPU: kernels are loaded, the graph is captured, it runs

    lctx_backend backend;
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;

    lctx_graph_run(lctx_backend backend, size_t n_tensor)
        : backend(std::move(backend)), ctx(ggml_init({n_tensor * ggml_tensor_overhead(), nullptr, true})) {}
    ggml_tensor * tensor(ggml_type type, int64_t n0, int64_t n1 = 1, int64_t n2 = 1, int64_t n3 = 1) {
        return ggml_new_tensor_4d(ctx.get(), type, n0, n1, n2, n3);
    }
    void allocate() {
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        lctx_require(buffer != nullptr, "out of memory");
    }
    size_t bytes() const { return ggml_backend_buffer_get_size(buffer.get()); }
    // Throws lctx_refusal when the device cannot run one of them.
    lctx_graph graph_of(const std::vector<ggml_tensor *> & nodes) const;
    // Microseconds of one run.
    double compute(const lctx_graph & graph) const;
    double compute(const std::vector<ggml_tensor *> & nodes) const { return compute(graph_of(nodes)); }
    // Return the microseconds of n runs; before() comes ahead of each and is not counted.
    template <typename F> std::vector<double> times(const lctx_graph & graph, int32_t n, F && before) const {
        std::vector<double> us;
        for (int32_t i = lctx_on_cpu(backend) ? 0 : -N_WARM; i < n; i++) {
            before();
            const double time = compute(graph);
            if (i >= 0) {
                us.push_back(time);
            }
        }
        return us;
    }
};

// Memory that a device allocates from now on, in addition to the buffers of graphs.
class lctx_scratch {
  public:
    explicit lctx_scratch(lctx_backend backend) : backend_(std::move(backend)), free_(free_bytes()) {}
    // tensors: the bytes of buffers since then.
    uint64_t bytes(size_t tensors) const;

  private:
    size_t free_bytes() const;

    lctx_backend backend_;
    size_t free_;
};

// Tokens [first, first + n) of a [head_dim, n_head, n_tokens] tensor.
inline ggml_tensor * lctx_tokens_of(ggml_context * ctx, ggml_tensor * t, int64_t first, int64_t n) {
    return ggml_view_3d(ctx, t, t->ne[0], t->ne[1], n, t->nb[1], t->nb[2], first * t->nb[2]);
}

// Unwritten rows must not matter: NaN bytes show it when they do
inline void lctx_poison(std::initializer_list<ggml_tensor *> tensors) {
    for (ggml_tensor * t : tensors) {
        if (t) {
            ggml_backend_tensor_memset(t, 0xff, 0, ggml_nbytes(t));
        }
    }
}

inline void lctx_fill(ggml_tensor * t, const void * data) {
    ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
}

// pages[head][block] in an order that depends on the seed, so that nothing works by luck; seed 0: as a memory hands
// them out to a prompt, in runs of eight per head.
inline std::vector<int32_t> lctx_shuffled_pages(const lctx_op_args & a, int32_t n_block) {
    constexpr int32_t RUN = 512 / LCTX_PAGE_ROWS;
    std::vector<int32_t> pages((size_t)n_block * a.n_head_kv);
    int32_t next = 0;
    for (int32_t first = 0; first < n_block; first += RUN) {
        for (int32_t head = 0; head < a.n_head_kv; head++) {
            for (int32_t block = first; block < std::min(first + RUN, n_block); block++) {
                pages[(size_t)head * n_block + block] = next++;
            }
        }
    }
    if (a.page_seed != 0) {
        std::shuffle(pages.begin(), pages.end(), std::mt19937(a.page_seed));
    }
    return pages;
}
