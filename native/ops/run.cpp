// lctx_op_run: store rows and attend once, through a ggml graph on the CPU backend. For tests and bench.
#include "../firewall.h"
#include "../lctx.h"
#include "../methods/method.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ops.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

namespace {

void require(bool ok, const char * what) {
    if (!ok) {
        throw lctx_refusal(what);
    }
}

void check(const lctx_op_args & a) {
    require(a.k && a.v && a.q && a.k_pos && a.seg_rows && a.seg_pos && a.out, "an array is missing");
    require(lctx_is_kv_type(a.type_k) && lctx_is_kv_type(a.type_v), "type_k or type_v is no KV type");
    require(a.rope_mode == GGML_ROPE_TYPE_NORMAL || a.rope_mode == GGML_ROPE_TYPE_NEOX, "rope_mode must be NORM or NEOX");
    require(a.head_dim_k > 0 && a.head_dim_v > 0 && a.n_head_kv > 0 && a.n_head > 0, "sizes must be positive");
    require(a.n_head % a.n_head_kv == 0, "n_head must be a multiple of n_head_kv");
    require(a.n_rows > 0 && a.n_tokens > 0 && a.n_seg > 0 && a.n_threads > 0, "sizes must be positive");
    require(a.rope_dims > 0 && a.rope_dims % 2 == 0 && a.rope_dims <= a.head_dim_k, "rope_dims must be even and at most head_dim_k");
    require(a.head_dim_k % ggml_blck_size((ggml_type)a.type_k) == 0, "head_dim_k is no multiple of the K block");
    require(a.head_dim_v % ggml_blck_size((ggml_type)a.type_v) == 0, "head_dim_v is no multiple of the V block");
    require(a.near_rows % LCTX_PAGE_ROWS == 0 && (a.near_rows > 0 || a.near_mask == 0), "near_rows must be a multiple of 64");
    require(a.near_rows == 0 || a.k_near_pos, "a near ring needs k_near_pos");
    for (int32_t i = 0; i < a.n_tokens * a.n_seg; i++) {
        require(0 <= a.seg_rows[2 * i] && a.seg_rows[2 * i] <= a.seg_rows[2 * i + 1] && a.seg_rows[2 * i + 1] <= a.n_rows,
                "a segment is outside the rows");
    }
}

struct graph_run {
    const lctx_op_args & a;
    ggml_backend_ptr backend;
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;

    explicit graph_run(const lctx_op_args & args) : a(args), backend(ggml_backend_cpu_init()) {
        ggml_backend_cpu_set_n_threads(backend.get(), a.n_threads);
        const size_t n_tensor = 32 + 4 * (size_t)(a.n_rows / LCTX_PAGE_ROWS + 1);
        ctx.reset(ggml_init({n_tensor * ggml_tensor_overhead() + 3 * ggml_graph_overhead_custom(n_tensor, false), nullptr, true}));
    }
    ggml_tensor * tensor(ggml_type type, int64_t n0, int64_t n1 = 1, int64_t n2 = 1, int64_t n3 = 1) {
        return ggml_new_tensor_4d(ctx.get(), type, n0, n1, n2, n3);
    }
    // Shortest of n runs of the nodes, in microseconds.
    double compute(const std::vector<ggml_tensor *> & nodes, int32_t n = 1) {
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), nodes.size(), false);
        for (ggml_tensor * node : nodes) {
            node->flags |= GGML_TENSOR_FLAG_COMPUTE;
            ggml_graph_add_node(graph, node);
        }
        double best = std::numeric_limits<double>::infinity();
        for (int32_t i = 0; i < n; i++) {
            const int64_t t0 = ggml_time_us();
            require(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS, "the graph failed");
            best = std::min(best, (double)(ggml_time_us() - t0));
        }
        return best;
    }
};

// Tokens [first, first + n) of a [head_dim, n_head, n_tokens] tensor.
ggml_tensor * tokens_of(ggml_context * ctx, ggml_tensor * t, int64_t first, int64_t n) {
    return ggml_view_3d(ctx, t, t->ne[0], t->ne[1], n, t->nb[1], t->nb[2], first * t->nb[2]);
}

// Pages in an order that depends on the seed, so that nothing works by luck.
std::vector<int32_t> shuffled_pages(const lctx_op_args & a, int32_t n_block) {
    std::vector<int32_t> pages((size_t)n_block * a.n_head_kv);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(a.page_seed));
    return pages;
}

void run(lctx_op_args & a) {
    check(a);
    graph_run g(a);
    const lctx_rope rope = {a.rope_mode,       a.rope_dims,        a.rope_n_ctx_orig, a.rope_freq_base, a.rope_freq_scale,
                            a.rope_ext_factor, a.rope_attn_factor, a.rope_beta_fast,  a.rope_beta_slow};
    const int32_t n_block = (a.n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS;
    const int32_t n_near = a.near_rows > 0 ? a.n_rows : 0;
    const int32_t n_query_angle = a.n_tokens * a.n_seg;

    // inputs
    ggml_tensor * pos = g.tensor(GGML_TYPE_I32, a.n_rows + n_near + n_query_angle);
    ggml_tensor * factors = a.freq_factors ? g.tensor(GGML_TYPE_F32, a.rope_dims / 2) : nullptr;
    ggml_tensor * k = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv, a.n_rows);
    ggml_tensor * v = g.tensor(GGML_TYPE_F32, a.head_dim_v, a.n_head_kv, a.n_rows);
    ggml_tensor * q = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head, a.n_tokens);
    ggml_tensor * k_pool = g.tensor((ggml_type)a.type_k, a.head_dim_k, (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS);
    ggml_tensor * v_pool = g.tensor((ggml_type)a.type_v, a.head_dim_v, (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS);
    ggml_tensor * near = n_near ? g.tensor((ggml_type)a.type_k, a.head_dim_k, a.near_rows, a.n_head_kv, 1) : nullptr;
    ggml_tensor * table = g.tensor(GGML_TYPE_I32, n_block, a.n_head_kv, 1);
    ggml_tensor * rows = g.tensor(GGML_TYPE_I32, 4, a.n_rows);
    ggml_tensor * segs = g.tensor(GGML_TYPE_I32, 4, a.n_seg, a.n_tokens);

    // nodes
    ggml_context * ctx = g.ctx.get();
    lctx_attend_params params = {LCTX_OP_ATTEND, a.rope_mode, a.scale, a.softcap, (uint32_t)a.near_mask, a.lse != nullptr};
    ggml_tensor * angles = lctx_angles(ctx, pos, factors, rope);
    std::vector<ggml_tensor *> stored;
    const int32_t n_step = n_near ? a.near_rows : a.n_rows;  // a store never meets a ring row twice
    for (int32_t r = 0; r < a.n_rows; r += n_step) {
        const int32_t n = std::min(n_step, a.n_rows - r);
        ggml_tensor * step_rows = ggml_view_2d(ctx, rows, 4, n, rows->nb[1], r * rows->nb[1]);
        stored.push_back(
            lctx_store(ctx, tokens_of(ctx, k, r, n), tokens_of(ctx, v, r, n), k_pool, v_pool, table, step_rows, angles, near, a.rope_mode));
    }
    ggml_tensor * out = lctx_attend(ctx, q, stored.back(), v_pool, table, segs, angles, near, params);
    g.buffer.reset(ggml_backend_alloc_ctx_tensors(ctx, g.backend.get()));
    require(g.buffer != nullptr, "out of memory");

    // data
    std::vector<int32_t> positions(a.k_pos, a.k_pos + a.n_rows);
    positions.insert(positions.end(), a.k_near_pos, a.k_near_pos + n_near);
    positions.insert(positions.end(), a.seg_pos, a.seg_pos + n_query_angle);
    std::vector<lctx_row> row(a.n_rows);
    for (int32_t i = 0; i < a.n_rows; i++) {
        row[i] = {i, 0, i, n_near ? a.n_rows + i : i};
    }
    std::vector<lctx_segment> seg(n_query_angle);
    for (int32_t i = 0; i < n_query_angle; i++) {
        seg[i] = {a.seg_rows[2 * i], a.seg_rows[2 * i + 1], a.n_rows + n_near + i, 0};
    }
    const std::vector<int32_t> pages = shuffled_pages(a, n_block);
    // unwritten rows must not matter: NaN bytes show it when they do
    for (ggml_tensor * t : {k_pool, v_pool, near, out}) {
        if (t) {
            ggml_backend_tensor_memset(t, 0xff, 0, ggml_nbytes(t));
        }
    }
    const auto set = [](ggml_tensor * t, const void * data) { ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t)); };
    set(pos, positions.data()), set(k, a.k), set(v, a.v), set(q, a.q);
    set(table, pages.data()), set(rows, row.data()), set(segs, seg.data());
    if (factors) {
        set(factors, a.freq_factors);
    }

    g.compute({angles});
    a.store_us = g.compute(stored);
    a.attend_us = g.compute({out}, std::max(1, a.n_repeat));
    const size_t n_out = (size_t)a.n_tokens * a.n_head * a.head_dim_v;
    ggml_backend_tensor_get(out, a.out, 0, n_out * sizeof(float));
    if (a.lse) {
        ggml_backend_tensor_get(out, a.lse, n_out * sizeof(float), (size_t)a.n_tokens * a.n_head * sizeof(float));
    }
}

}  // namespace

int32_t lctx_op_run(lctx_op_args * args, char * err, size_t err_size) {
    std::string error;
    if (lctx_guard(&error, [&] { run(*args); })) {
        return LCTX_OK;
    }
    snprintf(err, err_size, "%s", error.c_str());
    return LCTX_INVALID;
}
