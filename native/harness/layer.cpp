#include "layer.h"

#include "../graph/rope.h"

#include <numeric>

namespace {

// The queries of the ubatch's last chunk are kept, in the half of the ring that its number gives.
int32_t open_row(const lctx_chunks & c, const lctx_op_ubatch & u, int32_t row) {
    const int32_t chunk = row / c.chunk_size, at = chunk % 2 * c.chunk_size + row % c.chunk_size;
    return chunk == (u.first + u.n - 1) / c.chunk_size ? at : ~at;
}

}  // namespace

void lctx_check_method(const lctx_op_args & a, const lctx_method & method) {
    const lctx_chunks * c = method.chunks();
    lctx_require(
        !c || !c->by_attention() || a.head_dim_k == a.head_dim_v,
        "representation=attention needs head_dim_v equal to head_dim_k; use another representation and position");
}

lctx_op_layer::lctx_op_layer(const lctx_op_args & a, const lctx_method & method, int32_t n_ubatch,
                             const lctx_backend & backend)
    : lctx_layer(), a(a), method(method), g(backend, 16), factors() {
    const lctx_chunks * c = method.chunks();
    const int32_t n_block = (a.n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS, near_window = method.near_window();
    const int64_t n_pool = (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS;
    k_pool = g.tensor((ggml_type)a.type_k, a.head_dim_k, n_pool);
    v_pool = g.tensor((ggml_type)a.type_v, a.head_dim_v, n_pool);
    table = g.tensor(GGML_TYPE_I32, n_block, a.n_head_kv);
    hadamard = lctx_hadamard_of(a);
    if (a.freq_factors) {
        factors = g.tensor(GGML_TYPE_F32, a.rope_dims / 2);
    }
    if (near_window > 0) {
        near =
            g.tensor((ggml_type)a.type_k, a.head_dim_k, GGML_PAD(near_window + n_ubatch, LCTX_PAGE_ROWS), a.n_head_kv);
    }
    if (method.retain()) {
        held = g.tensor(GGML_TYPE_I32, lctx_held::size(a.n_rows), a.n_head_kv);
    }
    if (c && c->by_keys()) {
        index = g.tensor(GGML_TYPE_I8, lctx_index_shape{c->key_bits(), a.head_dim_k}.row_size(), n_pool);
    } else if (c) {
        summaries = g.tensor(lctx_summary_type(c->representation, a.head_dim_k, (ggml_type)a.type_k),
                             c->summary_dim(a.head_dim_k), std::max(1, a.n_rows / c->chunk_size),
                             c->by_attention() ? a.n_head : a.n_head_kv);
        open = !c->by_attention() ? nullptr : g.tensor(GGML_TYPE_F32, a.head_dim_k, 2 * c->chunk_size, a.n_head);
    }
    g.allocate();
    lctx_poison({k_pool, v_pool, index, near, summaries, open, held});
    lctx_fill(table, lctx_shuffled_pages(a, n_block).data());
    if (factors) {
        lctx_fill(factors, a.freq_factors);
    }
    if (held) {
        ggml_backend_tensor_memset(held, 0, 0, a.n_head_kv * lctx_held::HEADER * sizeof(int32_t));  // nothing gone
    }
}

ggml_tensor * lctx_op_layer::evict(ggml_context * ctx, ggml_tensor * due, ggml_tensor * budgets) const {
    return lctx_evict_layer(ctx, *this, due, budgets, *method.retain(), method.chunks());
}

lctx_held_copy::lctx_held_copy(const lctx_op_layer & layer) : layer_(layer) {
    if (layer.held) {
        data_.resize(ggml_nelements(layer.held));
        ggml_backend_tensor_get(layer.held, data_.data(), 0, ggml_nbytes(layer.held));
    }
}

lctx_held lctx_held_copy::of(int32_t head_kv) {
    return lctx_held::of(data_.data(), layer_.held->ne[1], head_kv, layer_.a.n_rows);
}

void lctx_held_copy::write_back() const {
    lctx_fill(layer_.held, data_.data());
}

lctx_op_ubatch::lctx_op_ubatch(const lctx_op_layer & layer, int32_t first, int32_t n)
    : layer(layer), first(first), n(n), g(layer.g.backend, 48), pos(), due(), budgets(), in() {
    add_inputs();
    add_nodes();
    g.allocate();
}

void lctx_op_ubatch::add_inputs() {
    const lctx_op_args & a = layer.a;
    const lctx_method & method = layer.method;
    pos = g.tensor(GGML_TYPE_I32, (int64_t)n * method.n_angle());
    in.k = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv, n);
    in.v = g.tensor(GGML_TYPE_F32, a.head_dim_v, a.n_head_kv, n);
    in.q = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head, n);
    in.rows = g.tensor(GGML_TYPE_I32, 4, n);
    in.segs = g.tensor(GGML_TYPE_I32, 4, method.n_segment(), n);
    if (layer.summaries) {
        in.chunk_rows = g.tensor(GGML_TYPE_I32, 4, n);
    }
    const lctx_batch_tiles of_batch = tiles();
    in.selects = layer.always_selects || of_batch.selects();
    if (in.selects && !of_batch.choosing().empty()) {
        in.tiles = g.tensor(GGML_TYPE_I32, (int64_t)of_batch.choosing().size());
    }
    if (method.retain()) {
        in.voters = g.tensor(GGML_TYPE_I32, 4, n);
    }
    if (a.center) {
        in.center = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv);
    }
    if (method.retain() && (first + n) % method.retain()->evict_every == 0) {
        due = g.tensor(GGML_TYPE_I32, 1);
        budgets = method.retain()->own_budgets() ? g.tensor(GGML_TYPE_I32, a.n_head_kv) : nullptr;
    }
}

void lctx_op_ubatch::add_nodes() {
    const lctx_op_args & a = layer.a;
    ggml_context * ctx = g.ctx.get();
    lctx_attend_params params = {};
    params.rope_mode = a.rope_mode;
    params.scale = a.scale;
    params.softcap = a.softcap;
    params.fixed = (int16_t)a.fixed;
    const lctx_rope rope = lctx_rope_of(a);
    in.angles = lctx_angles(ctx, pos, layer.factors, rope);
    prepared.push_back(in.angles);
    nodes = prepared;
    for (const lctx_link & link :
         lctx_chain_layer(ctx, layer.method, layer, in, params, a.rope_mode == GGML_ROPE_TYPE_NORMAL).links) {
        nodes.push_back(link.node);
    }
    if (due) {
        nodes.push_back(layer.evict(ctx, due, budgets));
    }
}

lctx_batch_tiles lctx_op_ubatch::tiles() const {
    std::vector<int32_t> rows(n);
    std::iota(rows.begin(), rows.end(), first);
    return {layer.method, rows, std::vector<int32_t>(n, 0)};
}

ggml_tensor * lctx_op_ubatch::node(lctx_op op) const {
    const auto found = std::find_if(nodes.begin(), nodes.end(), [&](const ggml_tensor * n) {
        return n->op == GGML_OP_LCTX && n->op_params[0] == op;
    });
    return found == nodes.end() ? nullptr : *found;
}

void lctx_op_ubatch::fill(const float * k_rows, const float * v_rows, const float * q_rows) {
    const lctx_method & method = layer.method;
    std::vector<int32_t> positions((size_t)n * method.n_angle());
    std::vector<lctx_row> row(n);
    std::vector<lctx_chunk_row> chunk_row(n);
    std::vector<lctx_voter> voter(n);
    for (int32_t i = 0; i < n; i++) {
        const int32_t p = first + i, angle0 = i * method.n_angle();
        method.positions(p, &positions[angle0]);
        row[i] = {p, 0, angle0 + method.key_angle(), angle0 + method.near_angle()};
        chunk_row[i] = {p, 0, method.chunks() ? open_row(*method.chunks(), *this, p) : -1, angle0 + method.key_angle()};
        voter[i] = {p, 0, method.retain() && (method.retain()->votes(p) || p >= layer.replay_from), first};
    }
    lctx_fill(pos, positions.data()), lctx_fill(in.rows, row.data()), lctx_fill(in.k, k_rows), lctx_fill(in.v, v_rows);
    if (q_rows) {
        lctx_fill(in.q, q_rows);
    }
    if (in.chunk_rows) {
        lctx_fill(in.chunk_rows, chunk_row.data());
    }
    fill_segments();
    if (in.voters) {
        lctx_fill(in.voters, voter.data());
    }
    if (in.center) {
        lctx_fill(in.center, layer.a.center);
    }
    if (due) {
        const int32_t last = first + n - 1;
        lctx_fill(due, &last);
    }
    if (budgets) {
        lctx_fill(budgets, std::vector<int32_t>(layer.a.n_head_kv, method.retain()->budget).data());
    }
}

void lctx_op_ubatch::fill_segments() const {
    const lctx_method & method = layer.method;
    const int32_t n_seg = method.n_segment();
    std::vector<lctx_segment> filled((size_t)n * n_seg);
    const lctx_batch_tiles of_batch = tiles();
    if (in.tiles) {
        lctx_fill(in.tiles, of_batch.choosing().data());
    }
    for (int32_t i = 0; i < n; i++) {
        of_batch.segments(i, &filled[(size_t)i * n_seg]);
        for (int32_t s = 0; s < n_seg; s++) {
            filled[(size_t)i * n_seg + s].angle += i * method.n_angle();
        }
    }
    lctx_fill(in.segs, filled.data());
}
