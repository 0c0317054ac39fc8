// Attention of one layer: peel the RoPE, chain the sub-ops. lctx_build_attn (hooks.h) is its entry.
#include "../base/architectures.h"
#include "../hooks.h"
#include "chain.h"
#include "ggml-backend.h"
#include "inputs.h"

namespace {

ggml_tensor * project(const llm_graph_context & graph, bool float_product, ggml_tensor * cur, ggml_tensor * wo,
                      ggml_tensor * wo_b, ggml_tensor * wo_s) {
    if (wo && float_product) {
        cur = graph.build_lora_mm(wo, cur);
        ggml_prec_set_acc(cur, GGML_PREC_F32);
        cur = wo_s ? ggml_mul(graph.ctx0, cur, wo_s) : cur;
    } else if (wo) {
        cur = graph.build_lora_mm(wo, cur, wo_s);
    }
    return wo_b ? ggml_add(graph.ctx0, cur, wo_b) : cur;
}

// Heads in the latent space [n_latent*n_head, n_tokens] to their own values [head_dim*n_head, n_tokens]; v_mla:
// [n_latent, head_dim, n_head].
ggml_tensor * from_latent(ggml_context * ctx, ggml_tensor * out, ggml_tensor * v_mla) {
    const int64_t n_head = v_mla->ne[2], n_tokens = out->ne[1];
    ggml_tensor * by_head = ggml_permute(ctx, ggml_reshape_3d(ctx, out, v_mla->ne[0], n_head, n_tokens), 0, 2, 1, 3);
    ggml_tensor * values = ggml_permute(ctx, ggml_mul_mat(ctx, v_mla, by_head), 0, 2, 1, 3);
    return ggml_cont_2d(ctx, values, v_mla->ne[1] * n_head, n_tokens);
}

// The query, which is rotated as its key is. inputs.keys has that afterwards: the layer's own, or that of the layer
// whose rows it reads.
lctx_peeled peel(lctx_inputs & inputs, ggml_context * ctx, ggml_tensor * q_cur, ggml_tensor * k_cur, int il) {
    const lctx_method & method = inputs.cache.method();
    const bool moves = !method.keeps_positions();
    const lctx_peeled query = lctx_peel_rope(ctx, q_cur, moves, "query", il);
    const int32_t source = inputs.cache.placement().source(il);
    if (k_cur) {
        inputs.keys[source] = lctx_peel_rope(ctx, k_cur, moves, "key", il);
    } else if (inputs.keys.count(source) == 0) {
        throw lctx_refusal("layer " + std::to_string(il) + " reads keys of layer " + std::to_string(source) +
                           ", which has stored none");
    }
    if (!lctx_same_rope(query, inputs.keys[source])) {
        throw lctx_refusal("layer " + std::to_string(il) +
                           " rotates queries and keys differently, which no method supports");
    }
    return query;
}

// Return what is subtracted from the keys of a layer that stores them; nullptr if scores may not all move by the same:
// a softcap bends them, and a sink stands among them.
ggml_tensor * center_of(const lctx_inputs & inputs, const lctx_peeled & key, const lctx_attend_params & params,
                        const ggml_tensor * sinks, int il) {
    const lctx_kv_cache & cache = inputs.cache;
    const ggml_tensor * bias = cache.placement().key_bias(il);
    if (!bias || sinks || params.softcap != 0.0f) {
        return nullptr;
    }
    return cache.placement().centers().of(cache.placement().store(il), il, bias, cache.placement().shape().head_dim_k,
                                          key.rope, lctx_still_factors(key), key.freq_factors);
}

}  // namespace

ggml_tensor * lctx_build_attn(const llm_graph_context & graph, llm_graph_input_i * inp, ggml_tensor * wo,
                              ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q_cur, ggml_tensor * k_cur,
                              ggml_tensor * v_cur, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                              float kq_scale, int il) {
    auto * input = dynamic_cast<lctx_has_inputs *>(inp);
    if (!input || !input->ours.cache.placement().serves(il)) {
        return nullptr;
    }
    if (kq_b || (sinks && sinks->type != GGML_TYPE_F32)) {
        throw lctx_refusal("layer " + std::to_string(il) +
                           " adds a bias to its attention scores, which no method supports");
    }
    lctx_inputs & inputs = input->ours;
    const lctx_kv_cache & cache = inputs.cache;
    const lctx_device_store & store = cache.placement().store(il);
    const lctx_architecture & arch = *lctx_find_architecture(graph.arch);
    if (v_cur && v_cur->ne[0] != cache.placement().shape().head_dim_v) {  // heads side by side
        v_cur = ggml_reshape_3d(graph.ctx0, v_cur, cache.placement().shape().head_dim_v, k_cur->ne[1], k_cur->ne[2]);
    }
    const lctx_peeled q = peel(inputs, graph.ctx0, q_cur, k_cur, il);
    const lctx_peeled & key = inputs.keys[cache.placement().source(il)];
    ggml_tensor * k = k_cur ? key.x : nullptr;
    if (cache.placement().shape().v_offset >= 0 && q.moved != (cache.placement().shape().v_offset > 0)) {
        throw lctx_refusal("layer " + std::to_string(il) +
                           " joins the latent and the rotated channels in a way of its own");
    }
    for (ggml_tensor * t : {q.x, v_cur, k, q.pos}) {  // q.pos: an input that nothing reads would not be allocated
        if (t) {
            ggml_build_forward_expand(graph.gf, t);
        }
    }
    lctx_attend_params params = {};
    params.rope_mode = q.rope.mode;
    params.fixed = cache.is_fixed();
    params.scale = kq_scale * q.scale * key.scale;
    params.scale *= arch.scaled_softcap ? graph.hparams.f_attn_out_scale : 1.0f;
    params.softcap = graph.hparams.attn_soft_cap || arch.scaled_softcap ? graph.hparams.f_attn_logit_softcapping : 0.0f;
    const lctx_inputs::table & tables = inputs.tables(graph, q, il);
    const lctx_chain_inputs in = {q.x,
                                  k,
                                  v_cur,
                                  inputs.rows,
                                  inputs.segs,
                                  inputs.chunk_rows,
                                  inputs.voters,
                                  tables.angles,
                                  sinks,
                                  center_of(inputs, key, params, sinks, il),
                                  inputs.selects,
                                  inputs.tiles};
    const bool key_pairs = q.rope.mode == GGML_ROPE_TYPE_NORMAL && !arch.trained_in_pairs;
    const lctx_chain chain =
        lctx_chain_layer(graph.ctx0, cache.method(), cache.placement().layer(graph.ctx0, il), in, params, key_pairs);
    for (const lctx_link & link : chain.links) {
        lctx_add(graph, store, link.node, link.name, il);
    }
    ggml_tensor * out = v_mla ? from_latent(graph.ctx0, chain.out, v_mla) : chain.out;
    graph.cb(out, "kqv_out", il);
    ggml_build_forward_expand(graph.gf, out);
    return project(graph, arch.float_product, out, wo, wo_b, wo_s);
}
