// lctx_flash_run: the attention of lctx_op_run as llama.cpp does it, through a ggml graph. For tests and bench.
//
// The cache is llama_kv_cache's for flash attention: rows of all heads, one per token; the graph that of
// llm_graph_context::build_attn_mha.
#include "roofline.h"

#include <cmath>
namespace {

constexpr int32_t N_KV_STEP = 256;  // llama.cpp attends to a multiple of this many cells
constexpr int32_t N_FILL = 1024;

void check(const lctx_op_args & a) {
    lctx_check_shapes(a);
    lctx_require(a.k && a.v && a.q && a.k_pos && a.seg_rows && a.seg_pos && a.out, "an array is missing");
    lctx_require(a.n_seg == 1 && a.near_rows == 0 && !a.lse,
                 "flash attention has one segment per query, no near ring and no lse");
    for (int32_t i = 0; i < a.n_tokens; i++) {
        lctx_require(
            0 <= a.seg_rows[2 * i] && a.seg_rows[2 * i] < a.seg_rows[2 * i + 1] && a.seg_rows[2 * i + 1] <= a.n_rows,
            "a segment is empty or outside the rows");
    }
}

// Inputs of a rotation.
struct rotation {
    ggml_tensor *x, *pos, *factors, *rotated;

    rotation(lctx_graph_run & g, const lctx_op_args & a, int32_t n_head, int32_t n) {
        const lctx_rope r = lctx_rope_of(a);
        x = g.tensor(GGML_TYPE_F32, a.head_dim_k, n_head, n);
        pos = g.tensor(GGML_TYPE_I32, n);
        factors = a.freq_factors ? g.tensor(GGML_TYPE_F32, a.rope_dims / 2) : nullptr;
        rotated = ggml_rope_ext(g.ctx.get(), x, pos, factors, r.n_dims, r.mode, r.n_ctx_orig, r.freq_base, r.freq_scale,
                                r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow);
    }
    void fill(const lctx_op_args & a, const float * rows, const int32_t * positions) const {
        lctx_fill(x, rows), lctx_fill(pos, positions);
        if (factors) {
            lctx_fill(factors, a.freq_factors);
        }
    }
};

ggml_tensor * copy_rows(ggml_context * ctx, ggml_tensor * rows, ggml_tensor * cache, int32_t first) {
    ggml_tensor * flat = ggml_reshape_2d(ctx, rows, rows->ne[0] * rows->ne[1], rows->ne[2]);
    return ggml_cpy(ctx, flat, ggml_view_2d(ctx, cache, flat->ne[0], flat->ne[1], cache->nb[1], first * cache->nb[1]));
}

// The cache of one layer, and the node that attends to it.
struct flash_layer {
    ggml_tensor *k_cache, *v_cache, *out;

    flash_layer(lctx_graph_run & g, const lctx_op_args & a, ggml_tensor * q, ggml_tensor * mask);
    void fill(const lctx_backend & backend, const lctx_op_args & a) const;

  private:
    void fill_rows(const lctx_backend & backend, const lctx_op_args & a, int32_t first, int32_t n) const;
};

void flash_layer::fill_rows(const lctx_backend & backend, const lctx_op_args & a, int32_t first, int32_t n) const {
    lctx_graph_run g(backend, 16);
    const rotation k(g, a, a.n_head_kv, n);
    ggml_tensor * v = g.tensor(GGML_TYPE_F32, a.head_dim_v, a.n_head_kv, n);
    ggml_tensor * k_copied = copy_rows(g.ctx.get(), k.rotated, k_cache, first);
    ggml_tensor * v_copied = copy_rows(g.ctx.get(), v, v_cache, first);
    g.allocate();
    k.fill(a, a.k + (size_t)first * a.n_head_kv * a.head_dim_k, a.k_pos + first);
    lctx_fill(v, a.v + (size_t)first * a.n_head_kv * a.head_dim_v);
    g.compute({k.rotated, k_copied, v_copied});
}

void flash_layer::fill(const lctx_backend & backend, const lctx_op_args & a) const {
    for (ggml_tensor * cache : {k_cache, v_cache}) {
        ggml_backend_tensor_memset(cache, 0, 0,
                                   ggml_nbytes(cache));  // as llama.cpp does: cells that the mask hides are read
    }
    for (int32_t first = 0; first < a.n_rows; first += N_FILL) {
        fill_rows(backend, a, first, std::min(N_FILL, a.n_rows - first));
    }
}

// [head_dim, n_kv, n_head] of a cache of whole rows
ggml_tensor * heads_of(ggml_context * ctx, ggml_tensor * cache, int32_t head_dim, int32_t n_head) {
    const size_t head_size = ggml_row_size(cache->type, head_dim);
    return ggml_permute(ctx, ggml_view_3d(ctx, cache, head_dim, n_head, cache->ne[1], head_size, cache->nb[1], 0), 0, 2,
                        1, 3);
}

flash_layer::flash_layer(lctx_graph_run & g, const lctx_op_args & a, ggml_tensor * q, ggml_tensor * mask) {
    ggml_context * ctx = g.ctx.get();
    k_cache = g.tensor((ggml_type)a.type_k, (int64_t)a.head_dim_k * a.n_head_kv, mask->ne[0]);
    v_cache = g.tensor((ggml_type)a.type_v, (int64_t)a.head_dim_v * a.n_head_kv, mask->ne[0]);
    out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), heads_of(ctx, k_cache, a.head_dim_k, a.n_head_kv),
                              heads_of(ctx, v_cache, a.head_dim_v, a.n_head_kv), mask, a.scale, 0.0f, a.softcap);
    ggml_prec_set_acc(out, GGML_PREC_F32);
}

void fill_mask(const lctx_op_args & a, ggml_tensor * mask) {
    std::vector<ggml_fp16_t> data(ggml_nelements(mask), ggml_fp32_to_fp16(-INFINITY));
    for (int32_t i = 0; i < a.n_tokens; i++) {
        ggml_fp16_t * row = data.data() + i * mask->ne[0];
        std::fill(row + a.seg_rows[2 * i], row + a.seg_rows[2 * i + 1], ggml_fp32_to_fp16(0.0f));
    }
    lctx_fill(mask, data.data());
}

void run(lctx_op_args & a) {
    check(a);
    const int32_t n_layer = std::max(1, a.n_layer);
    lctx_graph_run g(lctx_backend_of(a.device, a.n_threads), 16 + 8 * (size_t)n_layer);
    const lctx_scratch scratch(g.backend);
    ggml_tensor * mask = g.tensor(GGML_TYPE_F16, GGML_PAD(a.n_rows, N_KV_STEP), a.n_tokens);
    const rotation q(g, a, a.n_head, a.n_tokens);
    std::vector<flash_layer> layers;
    std::vector<ggml_tensor *> outs;
    for (int32_t i = 0; i < n_layer; i++) {
        layers.emplace_back(g, a, q.rotated, mask);
        outs.push_back(layers.back().out);
    }
    g.allocate();

    for (const flash_layer & layer : layers) {
        layer.fill(g.backend, a);
    }
    fill_mask(a, mask);
    q.fill(a, a.q, a.seg_pos);
    g.compute({q.rotated});
    lctx_time_attend(a, g, outs);
    // the CUDA backend keeps f16 copies of K and V after the result
    const size_t behind =
        ggml_backend_buft_get_alloc_size(ggml_backend_get_default_buffer_type(g.backend.get()), outs[0]);
    a.scratch_bytes = scratch.bytes(g.bytes()) + behind - ggml_nbytes(outs[0]);
    ggml_backend_tensor_get(outs[0], a.out, 0, ggml_nbytes(outs[0]));
}

}  // namespace

int32_t lctx_flash_run(lctx_op_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
