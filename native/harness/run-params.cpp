// Reads the op_params of nodes that ggml made as native/ reads them.
#include "../ops/fixed.h"
#include "../ops/params.h"
#include "run.h"

namespace {

void read_rope(lctx_params_args & args, const lctx_graph_run & g, ggml_tensor * x, ggml_tensor * pos) {
    lctx_op_args & a = *args.op;
    ggml_tensor * node = ggml_rope_multi(g.ctx.get(), x, pos, nullptr, a.rope_dims, args.rope_sections, a.rope_mode,
                                         a.rope_n_ctx_orig, a.rope_freq_base, a.rope_freq_scale, a.rope_ext_factor,
                                         a.rope_attn_factor, a.rope_beta_fast, a.rope_beta_slow);
    const auto [rope, sections, offset] = lctx_rope_params_of(ggml_rope_set_offset(node, args.rope_offset));
    a.rope_mode = rope.mode, a.rope_dims = rope.n_dims, a.rope_n_ctx_orig = rope.n_ctx_orig;
    a.rope_freq_base = rope.freq_base, a.rope_freq_scale = rope.freq_scale;
    a.rope_ext_factor = rope.ext_factor, a.rope_attn_factor = rope.attn_factor;
    a.rope_beta_fast = rope.beta_fast, a.rope_beta_slow = rope.beta_slow;
    std::copy(sections.begin(), sections.end(), args.rope_sections);
    args.rope_offset = offset;
}

// All that ggml can set of a product.
void set_all(ggml_tensor * product) {
    ggml_prec_set_acc(product, GGML_PREC_F32);
    ggml_prec_set_src(product, GGML_PREC_Q8, 1);
}

void read_products(lctx_params_args & a, const lctx_graph_run & g, ggml_tensor * x, ggml_tensor * ids) {
    ggml_tensor * one = ggml_mul_mat(g.ctx.get(), x, x);
    ggml_tensor * with_experts = ggml_mul_mat_id(g.ctx.get(), x, x, ids);
    set_all(one);
    set_all(with_experts);
    ggml_mul_mat_set_hint(one, (ggml_op_hint)a.has_hint);
    a.has_hint = lctx_has_hint(one);
    a.is_fixed[0] = lctx_is_fixed(one);
    a.is_fixed[1] = lctx_is_fixed(with_experts);
}

void run(lctx_params_args & a) {
    lctx_require(0 <= a.concat_dim && a.concat_dim < GGML_MAX_DIMS, "concat_dim must be 0 .. 3");
    const int32_t mode = a.op->rope_mode, n_dims = a.op->rope_dims;
    lctx_require((mode & GGML_ROPE_TYPE_MROPE) && mode != GGML_ROPE_TYPE_VISION, "rope_mode must be one with sections");
    lctx_require(n_dims > 0 && n_dims % 2 == 0 && a.rope_offset >= 0,
                 "rope_dims must be even, and rope_offset not negative");
    lctx_graph_run g(lctx_backend_of(nullptr, 1), 16);
    ggml_tensor * x = g.tensor(GGML_TYPE_F32, n_dims, 2, 3);
    ggml_tensor * ids = g.tensor(GGML_TYPE_I32, 2, 3);
    read_rope(a, g, x, g.tensor(GGML_TYPE_I32, 4 * x->ne[2]));
    read_products(a, g, x, ids);
    const ggml_tensor * scaled = ggml_scale_bias(g.ctx.get(), x, a.scale_factor, a.scale_bias);
    const ggml_tensor * gate = ggml_swiglu_oai(g.ctx.get(), x, x, a.gate_alpha, a.gate_limit);
    a.scale_factor = lctx_scale_factor_of(scaled), a.scale_bias = lctx_scale_bias_of(scaled);
    a.gate_alpha = lctx_gate_alpha_of(gate), a.gate_limit = lctx_gate_limit_of(gate);
    a.norm_eps = lctx_norm_eps_of(ggml_rms_norm(g.ctx.get(), x, a.norm_eps));
    a.concat_dim = lctx_concat_dim_of(ggml_concat(g.ctx.get(), x, x, a.concat_dim));
}

}  // namespace

int32_t lctx_params_run(lctx_params_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
