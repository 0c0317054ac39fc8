#include "attention.h"

#include "../hooks.h"
#include "ggml-backend.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace {

ggml_tensor * new_input(ggml_context * ctx, int64_t ne0, int64_t ne1, int64_t ne2, const char * name) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, ne0, ne1, ne2);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

void put(const lctx_memory & memory, ggml_tensor * input, const void * data) {
    ggml_backend_tensor_set(input, data, 0, ggml_nbytes(input));
    memory.work().input_bytes += (int64_t)ggml_nbytes(input);
}

// llama.cpp asks for float accumulators in this product for the architectures that overflow half precision.
bool wants_float_product(llm_arch arch) {
    return arch == LLM_ARCH_GLM4 || arch == LLM_ARCH_GLM4_MOE || arch == LLM_ARCH_JAIS2;
}

// NORM rotation of a model that was trained with halves (NEOX): the converter has put the rows of Wq and Wk in pairs. These were
// trained with pairs.
bool has_key_pairs(llm_arch arch, int32_t rope_mode) {
    constexpr llm_arch TRAINED_IN_PAIRS[] = {LLM_ARCH_CHATGLM, LLM_ARCH_COMMAND_R, LLM_ARCH_ERNIE4_5, LLM_ARCH_ERNIE4_5_MOE, LLM_ARCH_GLM4};
    const auto * end = std::end(TRAINED_IN_PAIRS);
    return rope_mode == GGML_ROPE_TYPE_NORMAL && std::find(std::begin(TRAINED_IN_PAIRS), end, arch) == end;
}

ggml_tensor * project(const llm_graph_context & graph, ggml_tensor * cur, ggml_tensor * wo, ggml_tensor * wo_b, ggml_tensor * wo_s) {
    if (wo && wants_float_product(graph.arch)) {
        cur = graph.build_lora_mm(wo, cur);
        ggml_prec_set_acc(cur, GGML_PREC_F32);
        cur = wo_s ? ggml_mul(graph.ctx0, cur, wo_s) : cur;
    } else if (wo) {
        cur = graph.build_lora_mm(wo, cur, wo_s);
    }
    return wo_b ? ggml_add(graph.ctx0, cur, wo_b) : cur;
}

// A node of a layer runs where the rows of the layer are; the scheduler would move the pools where the weights are.
void add(const llm_graph_context & graph, const lctx_kv_store & store, ggml_tensor * node, const char * name, int il) {
    ggml_backend_sched_set_tensor_backend(graph.sched, node, store.backend());
    graph.cb(node, name, il);
    ggml_build_forward_expand(graph.gf, node);
}

}  // namespace

lctx_graph_input::lctx_graph_input(const llm_graph_context & graph, const lctx_memory_context * mctx)
    : llm_graph_input_attn_kv(graph.hparams, graph.cparams, nullptr), mctx_(mctx) {
    const lctx_method & method = memory().method();
    memory().attach(graph.sched);
    rows = new_input(graph.ctx0, 4, graph.n_tokens, 1, "lctx_rows");
    if (method.chunks()) {
        chunk_rows = new_input(graph.ctx0, 4, graph.n_tokens, 1, "lctx_chunk_rows");
    } else {
        segs = new_input(graph.ctx0, 4, method.n_segment(), graph.n_tokens, "lctx_segs");
    }
    if (method.retain()) {
        voters = new_input(graph.ctx0, 4, graph.n_tokens, 1, "lctx_voters");
    }
    pos = new_input(graph.ctx0, (int64_t)method.n_angle() * graph.n_tokens, 1, 1, "lctx_pos");
}

void lctx_graph_input::set_input(const llama_ubatch * ubatch) {
    const lctx_method & method = memory().method();
    const int32_t n_angle = method.n_angle();
    memory().begin_graph();
    std::vector<lctx_row> row(ubatch->n_tokens);
    std::vector<int32_t> position((size_t)ubatch->n_tokens * n_angle);
    for (uint32_t i = 0; i < ubatch->n_tokens; i++) {
        const int32_t p = ubatch->pos[i], angle0 = (int32_t)i * n_angle;
        row[i] = {p, ubatch->seq_id[i][0], angle0 + method.key_angle(), angle0 + method.near_angle()};
        method.positions(p, &position[angle0]);
    }
    put(memory(), rows, row.data());
    put(memory(), pos, position.data());
    if (voters) {
        put(memory(), voters, memory().voters().data());
    }
    if (segs) {
        set_segments(ubatch);
    } else {
        set_chunk_rows(ubatch);
    }
}

void lctx_graph_input::set_segments(const llama_ubatch * ubatch) {
    const lctx_method & method = memory().method();
    const int32_t n_seg = method.n_segment();
    std::vector<lctx_segment> seg((size_t)ubatch->n_tokens * n_seg);
    for (size_t i = 0; i < seg.size(); i += n_seg) {
        const int32_t token = (int32_t)(i / n_seg);
        method.segments(ubatch->pos[token], &seg[i]);
        for (int32_t s = 0; s < n_seg; s++) {
            seg[i + s].angle += token * method.n_angle();
            seg[i + s].seq = ubatch->seq_id[token][0];
        }
    }
    put(memory(), segs, seg.data());
}

void lctx_graph_input::set_chunk_rows(const llama_ubatch * ubatch) {
    const int32_t n_angle = memory().method().n_angle();
    std::vector<lctx_chunk_row> row(ubatch->n_tokens);
    for (uint32_t i = 0; i < ubatch->n_tokens; i++) {
        row[i] = {ubatch->pos[i], ubatch->seq_id[i][0], memory().open_rows()[i], (int32_t)i * n_angle};
    }
    put(memory(), chunk_rows, row.data());
}

bool lctx_graph_input::can_reuse(const llm_graph_params & params) {
    mctx_ = static_cast<const lctx_memory_context *>(params.mctx);
    return rows->ne[1] == params.ubatch.n_tokens;
}

ggml_tensor * lctx_graph_input::angles(const llm_graph_context & graph, const lctx_peeled & peeled, int il) {
    const lctx_kv_store & store = memory().store(il);
    for (const auto & [known, where, tensor] : angles_) {
        if (where == &store && lctx_same_rope(known, peeled)) {
            return tensor;
        }
    }
    ggml_tensor * tensor = lctx_angles(graph.ctx0, pos, peeled.freq_factors, peeled.rope);
    add(graph, store, tensor, "lctx_angles", -1);
    angles_.emplace_back(peeled, &store, tensor);
    return tensor;
}

llm_graph_input_attn_kv * lctx_build_attn_inp(const llm_graph_context & graph) {
    const auto * mctx = dynamic_cast<const lctx_memory_context *>(graph.mctx);
    if (!mctx) {
        return nullptr;
    }
    return static_cast<lctx_graph_input *>(graph.res->add_input(std::make_unique<lctx_graph_input>(graph, mctx)));
}

ggml_tensor * lctx_build_attn(const llm_graph_context & graph, llm_graph_input_attn_kv * inp, ggml_tensor * wo, ggml_tensor * wo_b,
                              ggml_tensor * wo_s, ggml_tensor * q_cur, ggml_tensor * k_cur, ggml_tensor * v_cur, ggml_tensor * kq_b,
                              ggml_tensor * sinks, float kq_scale, int il) {
    auto * input = dynamic_cast<lctx_graph_input *>(inp);
    if (!input) {
        return nullptr;
    }
    if (kq_b || sinks) {
        throw lctx_refusal("layer " + std::to_string(il) + " adds a bias or sinks to its attention scores, which no method supports");
    }
    const lctx_peeled q = lctx_peel_rope(q_cur, "query", il);
    const lctx_peeled k = lctx_peel_rope(k_cur, "key", il);
    if (!lctx_same_rope(q, k)) {
        throw lctx_refusal("layer " + std::to_string(il) + " rotates queries and keys differently, which no method supports");
    }
    const lctx_memory & memory = input->memory();
    for (ggml_tensor * t : {q.x, v_cur, k.x, q.pos}) {  // q.pos: an input that nothing reads would not be allocated
        ggml_build_forward_expand(graph.gf, t);
    }
    lctx_attend_params params = {};
    params.rope_mode = q.rope.mode;
    params.scale = kq_scale * q.scale * k.scale;
    params.softcap = graph.hparams.attn_soft_cap ? graph.hparams.f_attn_logit_softcapping : 0.0f;
    const lctx_chain_inputs in = {q.x, k.x, v_cur, input->rows, input->segs, input->chunk_rows, input->voters, input->angles(graph, q, il)};
    const lctx_chain chain =
        lctx_chain_layer(graph.ctx0, memory.method(), memory.layer(graph.ctx0, il), in, params, has_key_pairs(graph.arch, q.rope.mode));
    for (const lctx_link & link : chain.links) {
        add(graph, memory.store(il), link.node, link.name, il);
    }
    const int64_t n_out = v_cur->ne[0] * q.x->ne[1];
    ggml_tensor * cur = ggml_view_2d(graph.ctx0, chain.attended, n_out, q.x->ne[2], n_out * sizeof(float), 0);  // the LSE follows
    graph.cb(cur, "kqv_out", il);
    ggml_build_forward_expand(graph.gf, cur);
    return project(graph, cur, wo, wo_b, wo_s);
}
