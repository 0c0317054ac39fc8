#include "chain.h"

namespace {

// Summarize the chunks that the batch completes, where they are compared by summaries.
ggml_tensor * summarize(ggml_context * ctx, const lctx_chunks & chunks, const lctx_layer & layer,
                        const lctx_chain_inputs & in, ggml_tensor * stored, lctx_chain & chain,
                        const lctx_attend_params & attend, bool key_pairs) {
    if (!in.k) {
        return layer.summaries;
    }
    lctx_summarize_params params = {};
    params.rope_mode = attend.rope_mode;
    params.scale = attend.scale;
    params.softcap = attend.softcap;
    params.chunk_size = chunks.chunk_size;
    params.representation = chunks.representation;
    params.key_pairs = key_pairs;
    params.hadamard = attend.hadamard;
    ggml_tensor * summaries = lctx_summarize(ctx, in.q, stored, layer.v_pool, layer.table, in.chunk_rows, in.angles,
                                             layer.held, layer.summaries, layer.open, params);
    chain.links.push_back({"lctx_summarize", summaries});
    return summaries;
}

// The keys of the batch once more in few bits.
ggml_tensor * index(ggml_context * ctx, const lctx_chunks & chunks, const lctx_layer & layer,
                    const lctx_chain_inputs & in, ggml_tensor * stored, lctx_chain & chain) {
    if (!in.k) {
        return layer.index;
    }
    ggml_tensor * indexed =
        lctx_index(ctx, stored, layer.table, in.rows, layer.held, layer.index, chunks.key_bits(), layer.hadamard.k);
    lctx_leave_rows(stored, indexed);
    chain.links.push_back({"lctx_index", indexed});
    return indexed;
}

// Sub-ops of a layer for one token, with tensors that have no memory but those of the store.
lctx_chain sample(ggml_context * ctx, const llama_model & model, const lctx_kv_cache & cache, int32_t il) {
    const lctx_method & method = cache.method();
    const lctx_layer layer = cache.placement().layer(ctx, il);
    const auto tensor = [&](ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
        return ggml_new_tensor_3d(ctx, type, n0, n1, n2);
    };
    lctx_attend_params params = {};
    params.rope_mode = model.hparams.rope_type;
    params.scale = 1.0f;
    lctx_rope rope = {};
    rope.mode = params.rope_mode;
    rope.n_dims = (int32_t)model.hparams.n_rot(il);
    rope.freq_base = rope.freq_scale = rope.attn_factor = 1.0f;

    lctx_chain_inputs in = {};
    in.q = tensor(GGML_TYPE_F32, layer.k_pool->ne[0], model.hparams.n_head(il), 1);
    in.k = tensor(GGML_TYPE_F32, layer.k_pool->ne[0], layer.table->ne[1], 1);
    in.v = tensor(GGML_TYPE_F32, layer.v_pool->ne[0], layer.table->ne[1], 1);
    in.rows = tensor(GGML_TYPE_I32, 4, 1, 1);
    in.chunk_rows = tensor(GGML_TYPE_I32, 4, 1, 1);
    in.voters = tensor(GGML_TYPE_I32, 4, 1, 1);
    in.segs = tensor(GGML_TYPE_I32, 4, method.n_segment(), 1);
    in.selects = method.chunks() != nullptr;
    in.angles = lctx_angles(ctx, tensor(GGML_TYPE_I32, method.n_angle(), 1, 1), nullptr, rope);
    lctx_chain chain = lctx_chain_layer(ctx, method, layer, in, params, false);
    chain.links.push_back({"lctx_angles", in.angles});
    if (const lctx_retain * retain = method.retain()) {
        ggml_tensor * due = tensor(GGML_TYPE_I32, layer.table->ne[2], 1, 1);
        ggml_tensor * budgets =
            retain->own_budgets() ? tensor(GGML_TYPE_I32, layer.table->ne[1], layer.table->ne[2], 1) : nullptr;
        chain.links.push_back({"lctx_evict", lctx_evict_layer(ctx, layer, due, budgets, *retain, method.chunks())});
    }
    return chain;
}

}  // namespace

namespace {

// Write the rows of the batch; what reads the pools takes the result as its source.
ggml_tensor * store(ggml_context * ctx, const lctx_method & method, const lctx_layer & layer,
                    const lctx_chain_inputs & in, int32_t rope_mode, lctx_chain & chain) {
    const lctx_retain * retain = method.retain();
    if (layer.staging) {  // before anything else that reads the pools
        chain.links.push_back(
            {"lctx_store_staged", lctx_store(ctx, in.k, in.v, layer.k_staged, layer.v_staged, layer.staging_table,
                                             in.rows, in.angles, nullptr, nullptr, in.center, rope_mode,
                                             LCTX_SCORE_LAST, layer.hadamard, method.chunks()->chunk_size)});
    }
    ggml_tensor * stored =
        lctx_store(ctx, in.k, in.v, layer.k_pool, layer.v_pool, layer.table, in.rows, in.angles, layer.near, layer.held,
                   in.center, rope_mode, retain ? retain->score : LCTX_SCORE_LAST, layer.hadamard);
    chain.links.push_back({"lctx_store", stored});
    return stored;
}

// A sink is one more key, whose value is zero (gpt-oss, arXiv 2508.10925): the output shrinks by its share of the
// softmax, and the LSE, which *vote* reads, counts it. In place, so that *vote* finds both where *attend* left them.
ggml_tensor * add_sinks(ggml_context * ctx, ggml_tensor * attended, ggml_tensor * out, ggml_tensor * sinks,
                        int64_t n_head, lctx_chain & chain) {
    const int64_t n_tokens = out->ne[1], head_dim = out->ne[0] / n_head;
    ggml_tensor * lse = ggml_view_2d(ctx, attended, n_head, n_tokens, n_head * sizeof(float), ggml_nbytes(out));
    ggml_tensor * lead = ggml_sub(ctx, lse, sinks);
    ggml_tensor * gate = ggml_reshape_3d(ctx, ggml_sigmoid(ctx, lead), 1, n_head, n_tokens);
    ggml_tensor * heads = ggml_reshape_3d(ctx, out, head_dim, n_head, n_tokens);
    ggml_tensor * scaled = ggml_mul_inplace(ctx, heads, gate);
    chain.links.push_back({"lctx_sink_gate", gate});
    chain.links.push_back({"lctx_sink_out", scaled});
    chain.links.push_back({"lctx_sink_lse", ggml_cpy(ctx, ggml_add(ctx, ggml_softplus(ctx, lead), sinks), lse)});
    return ggml_reshape_2d(ctx, scaled, out->ne[0], n_tokens);
}

}  // namespace

lctx_chain lctx_chain_layer(ggml_context * ctx, const lctx_method & method, const lctx_layer & layer,
                            const lctx_chain_inputs & in, lctx_attend_params params, bool key_pairs) {
    lctx_chain chain = {};
    const lctx_retain * retain = in.k ? method.retain() : nullptr;
    const bool is_single = in.k && in.k->ne[2] == 1;
    params.hadamard = layer.hadamard;
    ggml_tensor * stored = in.k ? store(ctx, method, layer, in, params.rope_mode, chain) : layer.k_pool;
    ggml_tensor * segs = in.segs;
    const lctx_chunks * chunks = method.chunks();
    if (chunks) {
        ggml_tensor * compared = layer.index ? index(ctx, *chunks, layer, in, stored, chain)
                                             : summarize(ctx, *chunks, layer, in, stored, chain, params, key_pairs);
        if (in.selects) {
            segs = lctx_select(ctx, in.q, compared, in.rows, in.segs, in.angles, layer.table, layer.held, in.tiles,
                               *chunks, params.scale, params.rope_mode, method.near_mask());
            if (layer.index && is_single) {
                lctx_leave_rows(compared, segs);
            }
            chain.links.push_back({LCTX_SELECT_NAME, segs});
            params.chunk_size = chunks->chunk_size;
            params.n_run = chunks->n_whole();
            params.tiles = lctx_tiles_of(segs);
        }
    }
    params.near_mask = method.near_mask();
    params.lse = retain || in.sinks;
    ggml_tensor * table = layer.table;
    if (layer.staging) {
        table = lctx_fetch(ctx, segs, stored, layer.v_pool, layer.table, layer.k_staged, layer.v_staged, layer.staging,
                           layer.staging_table, layer.k_transit, layer.v_transit, params.chunk_size, params.n_run,
                           params.tiles, (int32_t)in.q->ne[2]);
        chain.links.push_back({"lctx_fetch", table});
    }
    ggml_tensor * k_far = layer.k_transit ? layer.k_transit : stored;
    ggml_tensor * v_far = layer.v_transit ? layer.v_transit : layer.v_pool;
    ggml_tensor * attended = lctx_attend(ctx, in.q, k_far, v_far, table, segs, in.angles, layer.near, layer.held,
                                         params, layer.k_staged, layer.v_staged);
    if (is_single && !chunks && !layer.near && !retain && !params.fixed) {  // nothing else reads the new row
        lctx_leave_rows(stored, attended);
    }
    chain.links.push_back({"lctx_attend", attended});
    const int64_t n_out = layer.v_pool->ne[0] * in.q->ne[1];
    chain.out = ggml_view_2d(ctx, attended, n_out, in.q->ne[2], n_out * sizeof(float), 0);  // the LSE follows
    if (in.sinks) {
        chain.out = add_sinks(ctx, attended, chain.out, in.sinks, in.q->ne[1], chain);
    }
    if (retain) {
        chain.links.push_back({"lctx_vote", lctx_vote(ctx, attended, in.voters, *retain)});
    }
    return chain;
}

std::string lctx_why_not_there(const llama_model & model, const lctx_kv_cache & cache) {
    for (const auto & store : cache.placement().stores()) {
        if (store->is_host) {
            continue;
        }
        const ggml_context_ptr ctx(ggml_init({64 * ggml_tensor_overhead(), nullptr, true}));
        for (const lctx_link & link : sample(ctx.get(), model, cache, cache.placement().first_layer(*store)).links) {
            if (!ggml_backend_dev_supports_op(store->dev, link.node)) {
                return "layers are on " + store->name() + ", which cannot compute " + link.name + " for " +
                       cache.method().full_spec() + " with K " + ggml_type_name(store->k_pool->type) + " and V " +
                       ggml_type_name(store->v_pool->type) +
                       "; use n_gpu_layers=0, or offload_kqv=False, which keeps K, V and attention on the CPU";
            }
        }
    }
    return "";
}
