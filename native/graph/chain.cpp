#include "chain.h"

namespace {

// Represent the chunks that the batch completes, then let every head choose.
ggml_tensor * choose_chunks(ggml_context * ctx, const lctx_chunks & chunks, const lctx_layer & layer, const lctx_chain_inputs & in,
                            lctx_chain & chain, const lctx_attend_params & attend, bool key_pairs) {
    lctx_represent_params params = {};
    params.rope_mode = attend.rope_mode;
    params.scale = attend.scale;
    params.softcap = attend.softcap;
    params.chunk_size = chunks.chunk_size;
    params.minmax = chunks.minmax;
    params.from_near = layer.near != nullptr;
    params.key_pairs = key_pairs;
    ggml_tensor * reps = lctx_represent(ctx, in.q, chain.links.back().node, layer.v_pool, layer.table, in.chunk_rows, in.angles, layer.near,
                                        layer.held, layer.reps, layer.open, params);
    chain.links.push_back({"lctx_represent", reps});
    ggml_tensor * segs = lctx_select(ctx, in.q, reps, in.chunk_rows, layer.table->ne[1], chunks);
    chain.links.push_back({LCTX_SELECT_NAME, segs});
    return segs;
}

// Sub-ops of a layer for one token, with tensors that have no memory but those of the store.
lctx_chain sample(ggml_context * ctx, const llama_model & model, const lctx_memory & memory, int32_t il) {
    const lctx_method & method = memory.method();
    const lctx_layer layer = memory.layer(ctx, il);
    const auto tensor = [&](ggml_type type, int64_t n0, int64_t n1, int64_t n2) { return ggml_new_tensor_3d(ctx, type, n0, n1, n2); };
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
    in.angles = lctx_angles(ctx, tensor(GGML_TYPE_I32, method.n_angle(), 1, 1), nullptr, rope);
    lctx_chain chain = lctx_chain_layer(ctx, method, layer, in, params, false);
    chain.links.push_back({"lctx_angles", in.angles});
    if (const lctx_retain * retain = method.retain()) {
        ggml_tensor * due = tensor(GGML_TYPE_I32, layer.table->ne[2], 1, 1);
        const int32_t chunk_size = method.chunks() ? method.chunks()->chunk_size : 0;
        chain.links.push_back(
            {"lctx_evict", lctx_evict(ctx, layer.k_pool, layer.v_pool, layer.table, layer.held, due, layer.reps, *retain, chunk_size)});
    }
    return chain;
}

}  // namespace

lctx_chain lctx_chain_layer(ggml_context * ctx, const lctx_method & method, const lctx_layer & layer, const lctx_chain_inputs & in,
                            lctx_attend_params params, bool key_pairs) {
    lctx_chain chain = {};
    const lctx_retain * retain = method.retain();
    ggml_tensor * stored = lctx_store(ctx, in.k, in.v, layer.k_pool, layer.v_pool, layer.table, in.rows, in.angles, layer.near, layer.held,
                                      params.rope_mode, retain ? retain->score : LCTX_SCORE_LAST);
    chain.links.push_back({"lctx_store", stored});
    if (layer.resident) {  // before anything else that reads the pools: links.back() is what they read
        chain.links.insert(chain.links.begin(), {"lctx_store_resident", lctx_store(ctx, in.k, in.v, layer.k_resident, layer.v_resident,
                                                                                   layer.resident_table, in.rows, in.angles, nullptr,
                                                                                   nullptr, params.rope_mode, LCTX_SCORE_LAST, true)});
    }
    ggml_tensor * segs = in.segs;
    if (const lctx_chunks * chunks = method.chunks()) {
        segs = choose_chunks(ctx, *chunks, layer, in, chain, params, key_pairs);
        params.chunk_size = chunks->chunk_size;
        params.near_from = chunks->near_segment();
    }
    params.near_mask = method.near_mask();
    params.lse = retain != nullptr;
    ggml_tensor * table = layer.table;
    if (layer.resident) {
        table = lctx_fetch(ctx, segs, stored, layer.v_pool, layer.table, layer.k_resident, layer.v_resident, layer.resident,
                           layer.resident_table);
        chain.links.push_back({"lctx_fetch", table});
    }
    chain.attended = lctx_attend(ctx, in.q, stored, layer.v_pool, table, segs, in.angles, layer.near, layer.held, params, layer.k_resident,
                                 layer.v_resident);
    chain.links.push_back({"lctx_attend", chain.attended});
    if (retain) {
        chain.links.push_back({"lctx_vote", lctx_vote(ctx, chain.attended, in.voters, *retain)});
    }
    return chain;
}

std::string lctx_why_not_there(const llama_model & model, const lctx_memory & memory) {
    for (const auto & store : memory.stores()) {
        if (store->is_host) {
            continue;
        }
        const ggml_context_ptr ctx(ggml_init({64 * ggml_tensor_overhead(), nullptr, true}));
        for (const lctx_link & link : sample(ctx.get(), model, memory, memory.first_layer(*store)).links) {
            if (!ggml_backend_dev_supports_op(store->dev, link.node)) {
                return "layers are on " + store->name() + ", which cannot compute " + link.name + " for " + memory.method().full_spec() +
                       " with K " + ggml_type_name(store->k_pool->type) + " and V " + ggml_type_name(store->v_pool->type) +
                       "; use n_gpu_layers=0, or offload_kqv=False, which keeps K, V and attention on the CPU";
            }
        }
    }
    return "";
}
