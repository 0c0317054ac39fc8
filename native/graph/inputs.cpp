#include "inputs.h"

#include "../hooks.h"
#include "../ops/fixed.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>

namespace {

ggml_tensor * new_input(ggml_context * ctx, int64_t ne0, int64_t ne1, int64_t ne2, const char * name) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, ne0, ne1, ne2);
    ggml_set_input(t);
    ggml_set_name(t, name);
    return t;
}

void put(const lctx_kv_cache & cache, ggml_tensor * input, const void * data) {
    ggml_backend_tensor_set(input, data, 0, ggml_nbytes(input));
    cache.placement().work().input_bytes += (int64_t)ggml_nbytes(input);
}

// Segments of the query whose key is row end - 1: each span up to the next, the last up to the end.
void set_spans(const std::vector<lctx_row_span> & spans, int32_t end, lctx_segment * segs) {
    for (size_t i = 0; i < spans.size(); i++) {
        segs[i] = {spans[i].first, i + 1 < spans.size() ? spans[i + 1].first : end, (int32_t)i, 0};
    }
}

// Of the text, a query of a replay reads the piece that is repeated, and the first rows, where attention without a
// target goes. Each of the n segments has its part of these rows; those of different spans stay apart.
void cut_to_piece(const lctx_sequence & s, int32_t p, lctx_segment * segs, int32_t n) {
    constexpr int32_t N_SINK = 8;
    if (p < s.replay_from || s.piece_end == 0) {
        return;
    }
    const std::vector<lctx_segment> whole(segs, segs + n);
    const std::pair<int32_t, int32_t> parts[] = {
        {0, std::min(N_SINK, s.piece_first)},
        {s.piece_first, s.piece_end},
        {s.replay_from, p + 1},
    };
    std::fill_n(segs, n, lctx_segment{});
    for (const lctx_segment & span : whole) {
        for (const auto & [row0, row1] : parts) {
            const lctx_segment part = {std::max(span.row0, row0), std::min(span.row1, row1), span.angle, span.seq};
            if (part.row0 < part.row1) {
                *segs++ = part;
            }
        }
    }
}

// A graph that is built to see what it takes has no tokens of a batch (llama.cpp's ubatch_prepare_reserve): it has
// everything.
bool is_reserved(const llama_ubatch & ubatch) {
    return !ubatch.seq_id || !ubatch.seq_id[0] || ubatch.seq_id[0] == ubatch.seq_id_unq;
}

// The tiles of a ubatch; a reserved one has no tokens.
lctx_batch_tiles tiles_of(const lctx_method & method, const llama_ubatch & ubatch) {
    const uint32_t n = is_reserved(ubatch) ? 0 : ubatch.n_tokens;
    std::vector<int32_t> seq(n);
    for (uint32_t i = 0; i < n; i++) {
        seq[i] = ubatch.seq_id[i][0];
    }
    return {method, std::vector<int32_t>(ubatch.pos, ubatch.pos + n), seq};
}

const lctx_kv_cache * cache_of(const llm_graph_context & graph) {
    const auto * view = dynamic_cast<const lctx_batch_view *>(graph.mctx);
    return view ? &view->cache() : nullptr;
}

// Ask an input inside another whether it can be reused; its context is a part of theirs.
bool can_reuse_with(llm_graph_input_i & input, llm_graph_params params, const llama_memory_context_i * mctx) {
    params.mctx = mctx;
    return input.can_reuse(params);
}

// Base: llm_graph_input_attn_kv, or llm_graph_input_attn_k of latent attention.
template <class Base> class attn_input final : public Base, public lctx_has_inputs {
  public:
    attn_input(const llm_graph_context & graph, const lctx_kv_cache & cache)
        : Base(graph.hparams, graph.cparams, nullptr), lctx_has_inputs(graph, cache) {}

    void set_input(const llama_ubatch * ubatch) override { ours.set(*ubatch); }
    bool can_reuse(const llm_graph_params & params) override { return ours.can_reuse(params.ubatch); }
};

class iswa_input final : public llm_graph_input_attn_kv_iswa, public lctx_has_inputs {
  public:
    iswa_input(const llm_graph_context & graph, const lctx_kv_cache & cache, const llama_kv_cache_iswa_context * mctx)
        : llm_graph_input_attn_kv_iswa(graph.hparams, graph.cparams, mctx), lctx_has_inputs(graph, cache) {}

    void set_input(const llama_ubatch * ubatch) override {
        llm_graph_input_attn_kv_iswa::set_input(ubatch);
        ours.set(*ubatch);
    }
    bool can_reuse(const llm_graph_params & params) override {
        return llm_graph_input_attn_kv_iswa::can_reuse(params) && ours.can_reuse(params.ubatch);
    }
};

// Base: llm_graph_input_mem_hybrid, or llm_graph_input_mem_hybrid_k of latent attention.
template <class Base> class hybrid_input final : public Base {
  public:
    using Base::Base;

    void set_input(const llama_ubatch * ubatch) override {
        this->inp_attn->set_input(ubatch);
        this->inp_rs->set_input(ubatch);
    }
    bool can_reuse(const llm_graph_params & params) override {
        this->mctx = static_cast<const llama_memory_hybrid_context *>(params.mctx);
        return can_reuse_with(*this->inp_rs, params, this->mctx->get_recr()) && this->inp_attn->can_reuse(params);
    }
};

class hybrid_iswa_input final : public llm_graph_input_mem_hybrid_iswa {
  public:
    using llm_graph_input_mem_hybrid_iswa::llm_graph_input_mem_hybrid_iswa;

    void set_input(const llama_ubatch * ubatch) override {
        inp_attn->set_input(ubatch);
        inp_rs->set_input(ubatch);
    }
    bool can_reuse(const llm_graph_params & params) override {
        mctx = static_cast<const llama_memory_hybrid_iswa_context *>(params.mctx);
        return can_reuse_with(*inp_rs, params, mctx->get_recr()) && can_reuse_with(*inp_attn, params, mctx->get_attn());
    }
};

// Ours as an input of the graph, or nullptr.
template <class Base> Base * add_attn_input(const llm_graph_context & graph) {
    const lctx_kv_cache * cache = cache_of(graph);
    return cache ? static_cast<attn_input<Base> *>(
                       graph.res->add_input(std::make_unique<attn_input<Base>>(graph, *cache)))
                 : nullptr;
}

// Hybrid: llama.cpp's input; Attn: that of its attention layers.
template <class Hybrid, class Attn>
std::unique_ptr<Hybrid> make_hybrid_input(const llm_graph_context & graph, std::unique_ptr<Attn> attn,
                                          std::unique_ptr<llm_graph_input_rs> rs,
                                          const llama_memory_hybrid_context * mctx) {
    if (const lctx_kv_cache * cache = cache_of(graph)) {
        return std::make_unique<hybrid_input<Hybrid>>(graph.cparams, std::make_unique<attn_input<Attn>>(graph, *cache),
                                                      std::move(rs), mctx);
    }
    return std::make_unique<Hybrid>(graph.cparams, std::move(attn), std::move(rs), mctx);
}

}  // namespace

void lctx_add(const llm_graph_context & graph, const lctx_device_store & store, ggml_tensor * node, const char * name,
              int il) {
    ggml_backend_sched_set_tensor_backend(graph.sched, node, store.backend());
    graph.cb(node, name, il);
    ggml_build_forward_expand(graph.gf, node);
}

lctx_inputs::lctx_inputs(const llm_graph_context & graph, const lctx_kv_cache & cache) : cache(cache), graph(graph.gf) {
    const lctx_method & method = cache.method();
    cache.placement().attach(graph.sched);
    rows = new_input(graph.ctx0, 4, graph.n_tokens, 1, "lctx_rows");
    const topology now = topology_of(graph.ubatch);
    selects = now.selects;
    if (now.n_tile > 0) {
        tiles = new_input(graph.ctx0, now.n_tile, 1, 1, "lctx_tiles");
    }
    segs = new_input(graph.ctx0, 4, method.n_segment(), graph.n_tokens, "lctx_segs");
    if (method.chunks() && !method.chunks()->by_keys()) {
        chunk_rows = new_input(graph.ctx0, 4, graph.n_tokens, 1, "lctx_chunk_rows");
    }
    if (method.retain()) {
        voters = new_input(graph.ctx0, 4, graph.n_tokens, 1, "lctx_voters");
    }
    pos = new_input(graph.ctx0, (int64_t)method.n_angle() * graph.n_tokens, 1, 1, "lctx_pos");
}

void lctx_inputs::set(const llama_ubatch & ubatch) {
    const lctx_method & method = cache.method();
    const int32_t n_angle = method.n_angle();
    cache.placement().begin_graph();
    std::vector<lctx_row> row(ubatch.n_tokens);
    std::vector<int32_t> position((size_t)ubatch.n_tokens * n_angle);
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t p = ubatch.pos[i], angle0 = (int32_t)i * n_angle;
        row[i] = {p, ubatch.seq_id[i][0], angle0 + method.key_angle(), angle0 + method.near_angle()};
        method.positions(p, &position[angle0]);
        if (method.n_span() > 1) {
            const auto & spans = cache.sequences()[row[i].seq].spans;
            std::transform(spans.begin(), spans.end(), &position[angle0],
                           [&](const lctx_row_span & s) { return p + s.shift; });
            row[i].angle = angle0 + (int32_t)spans.size() - 1;
        }
    }
    if (cache.is_fixed()) {
        lctx_fix_products(graph);  // it is complete, and has not run
    }
    put(cache, rows, row.data());
    put(cache, pos, position.data());
    if (voters) {
        put(cache, voters, cache.sequences().voters().data());
    }
    set_segments(ubatch);
    if (chunk_rows) {
        set_chunk_rows(ubatch);
    }
    for (const table & t : tables_) {
        if (!t.still.empty()) {
            put(cache, t.factors, t.still.data());
        }
    }
}

void lctx_inputs::set_segments(const llama_ubatch & ubatch) {
    const lctx_method & method = cache.method();
    const int32_t n_seg = method.n_segment();
    std::vector<lctx_segment> seg((size_t)ubatch.n_tokens * n_seg);
    const lctx_batch_tiles of_batch = tiles_of(method, ubatch);
    for (size_t i = 0; i < seg.size(); i += n_seg) {
        const int32_t token = (int32_t)(i / n_seg);
        of_batch.segments(token, &seg[i]);
        if (method.n_span() > 1) {
            set_spans(cache.sequences()[ubatch.seq_id[token][0]].spans, ubatch.pos[token] + 1, &seg[i]);
        }
        if (method.reads_pieces()) {
            cut_to_piece(cache.sequences()[ubatch.seq_id[token][0]], ubatch.pos[token], &seg[i], n_seg);
        }
        for (int32_t s = 0; s < n_seg; s++) {
            seg[i + s].angle += token * method.n_angle();
            seg[i + s].seq = ubatch.seq_id[token][0];
        }
    }
    put(cache, segs, seg.data());
    if (tiles) {
        put(cache, tiles, of_batch.choosing().data());
    }
}

void lctx_inputs::set_chunk_rows(const llama_ubatch & ubatch) {
    const lctx_method & method = cache.method();
    const int32_t n_angle = method.n_angle();
    std::vector<lctx_chunk_row> row(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        row[i] = {ubatch.pos[i], ubatch.seq_id[i][0], cache.sequences().open_rows()[i],
                  (int32_t)i * n_angle + method.key_angle()};
    }
    put(cache, chunk_rows, row.data());
}

lctx_inputs::topology lctx_inputs::topology_of(const llama_ubatch & ubatch) const {
    const lctx_method & method = cache.method();
    if (!method.chunks()) {
        return {false, 0};
    }
    const lctx_batch_tiles of_batch = tiles_of(method, ubatch);
    if (cache.always_selects() || is_reserved(ubatch) || of_batch.selects()) {
        return {true, (int64_t)of_batch.choosing().size()};
    }
    return {false, 0};
}

bool lctx_inputs::can_reuse(const llama_ubatch & ubatch) const {
    const topology then = topology_of(ubatch);
    return rows->ne[1] == ubatch.n_tokens && selects == then.selects && (tiles ? tiles->ne[0] : 0) == then.n_tile;
}

const lctx_inputs::table & lctx_inputs::tables(const llm_graph_context & graph, const lctx_peeled & peeled, int il) {
    const lctx_device_store & store = cache.placement().store(il);
    for (const table & t : tables_) {
        if (t.store->buft == store.buft && lctx_same_rope(t.peeled, peeled)) {
            return t;
        }
    }
    tables_.push_back({peeled, &store, lctx_still_factors(peeled), peeled.freq_factors, nullptr});
    table & t = tables_.back();
    if (!t.still.empty()) {
        t.factors = ggml_new_tensor_1d(graph.ctx0, GGML_TYPE_F32, peeled.rope.n_dims / 2);
        ggml_set_input(t.factors);
        ggml_set_name(t.factors, "lctx_still");
    }
    t.angles = lctx_angles(graph.ctx0, pos, t.factors, peeled.rope);
    lctx_add(graph, store, t.angles, "lctx_angles", -1);
    return t;
}

llm_graph_input_attn_kv * lctx_build_attn_inp(const llm_graph_context & graph) {
    return add_attn_input<llm_graph_input_attn_kv>(graph);
}

llm_graph_input_attn_k * lctx_build_attn_inp_k(const llm_graph_context & graph) {
    return add_attn_input<llm_graph_input_attn_k>(graph);
}

std::unique_ptr<llm_graph_input_attn_kv_iswa> lctx_iswa_input(const llm_graph_context & graph,
                                                              const llama_kv_cache_iswa_context * mctx) {
    if (const lctx_kv_cache * cache = cache_of(graph)) {
        return std::make_unique<iswa_input>(graph, *cache, mctx);
    }
    return std::make_unique<llm_graph_input_attn_kv_iswa>(graph.hparams, graph.cparams, mctx);
}

std::unique_ptr<llm_graph_input_mem_hybrid> lctx_hybrid_input(const llm_graph_context & graph,
                                                              std::unique_ptr<llm_graph_input_attn_kv> attn,
                                                              std::unique_ptr<llm_graph_input_rs> rs,
                                                              const llama_memory_hybrid_context * mctx) {
    return make_hybrid_input<llm_graph_input_mem_hybrid>(graph, std::move(attn), std::move(rs), mctx);
}

std::unique_ptr<llm_graph_input_mem_hybrid_k> lctx_hybrid_k_input(const llm_graph_context & graph,
                                                                  std::unique_ptr<llm_graph_input_attn_k> attn,
                                                                  std::unique_ptr<llm_graph_input_rs> rs,
                                                                  const llama_memory_hybrid_context * mctx) {
    return make_hybrid_input<llm_graph_input_mem_hybrid_k>(graph, std::move(attn), std::move(rs), mctx);
}

std::unique_ptr<llm_graph_input_mem_hybrid_iswa> lctx_hybrid_iswa_input(
    const llm_graph_context & graph, std::unique_ptr<llm_graph_input_attn_kv_iswa> attn,
    std::unique_ptr<llm_graph_input_rs> rs, const llama_memory_hybrid_iswa_context * mctx) {
    if (cache_of(graph)) {
        return std::make_unique<hybrid_iswa_input>(graph.cparams, std::move(attn), std::move(rs), mctx);
    }
    return std::make_unique<llm_graph_input_mem_hybrid_iswa>(graph.cparams, std::move(attn), std::move(rs), mctx);
}
