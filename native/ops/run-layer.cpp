// lctx_layer_run: one layer of any method, ubatch by ubatch, through a ggml graph on the CPU backend. For tests.
#include "../firewall.h"
#include "run.h"

#include <cstdio>

namespace {

// Inputs and outputs of one ubatch; what the method does not need is nullptr.
struct step {
    int32_t first, n;
    ggml_tensor *rows, *chunk_rows, *segs, *voters, *due, *out;
};

// The tensors that all ubatches share.
struct layer {
    ggml_tensor *pos, *factors, *k, *v, *q, *k_pool, *v_pool, *near, *table, *held, *reps, *open;
};

void check(const lctx_layer_run_args & args) {
    lctx_require(args.op && args.method && args.op->k && args.op->v && args.op->q && args.op->out, "an array is missing");
    lctx_check_shapes(*args.op);
    lctx_require(args.op->n_tokens == args.op->n_rows, "every row has a query: n_tokens must be n_rows");
    lctx_require(args.n_ctx_train > 0 && args.n_ubatch > 0, "sizes must be positive");
}

void check_method(const lctx_layer_run_args & args, const lctx_method & method) {
    const lctx_chunks * c = method.chunks();
    lctx_require(c || (!args.chunks && !args.representations), "the method chooses no chunks");
    lctx_require(!c || c->minmax || args.op->head_dim_k == args.op->head_dim_v,
                 "representation=attention needs head_dim_v equal to head_dim_k; use representation=minmax");
    lctx_require(!c || !args.chunks || args.n_slot_max >= c->n_chunk, "n_slot_max is too small");
}

layer make_layer(lctx_graph_run & g, const lctx_layer_run_args & args, const lctx_method & method) {
    const lctx_op_args & a = *args.op;
    const lctx_chunks * c = method.chunks();
    const int32_t n_block = (a.n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS, near_window = method.near_window();
    const int32_t near_rows = GGML_PAD(near_window + std::min(args.n_ubatch, a.n_rows), LCTX_PAGE_ROWS);
    const int64_t n_pool = (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS;
    layer l = {};
    l.pos = g.tensor(GGML_TYPE_I32, (int64_t)a.n_rows * method.n_angle());
    l.factors = a.freq_factors ? g.tensor(GGML_TYPE_F32, a.rope_dims / 2) : nullptr;
    l.k = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv, a.n_rows);
    l.v = g.tensor(GGML_TYPE_F32, a.head_dim_v, a.n_head_kv, a.n_rows);
    l.q = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head, a.n_rows);
    l.k_pool = g.tensor((ggml_type)a.type_k, a.head_dim_k, n_pool);
    l.v_pool = g.tensor((ggml_type)a.type_v, a.head_dim_v, n_pool);
    l.near = near_window > 0 ? g.tensor((ggml_type)a.type_k, a.head_dim_k, near_rows, a.n_head_kv) : nullptr;
    l.table = g.tensor(GGML_TYPE_I32, n_block, a.n_head_kv);
    if (method.retain()) {
        l.held = g.tensor(GGML_TYPE_I32, lctx_held::size(a.n_rows), a.n_head_kv);
    }
    if (c) {
        l.reps = g.tensor(GGML_TYPE_F32, args.rep_dim, std::max(1, a.n_rows / c->chunk_size), args.n_rep);
        l.open = c->minmax ? nullptr : g.tensor(GGML_TYPE_F32, a.head_dim_k, 2 * c->chunk_size, a.n_head);
    }
    return l;
}

lctx_attend_params attend_params(const lctx_op_args & a, const lctx_method & method) {
    lctx_attend_params params = {};
    params.rope_mode = a.rope_mode;
    params.scale = a.scale;
    params.softcap = a.softcap;
    params.near_mask = method.near_mask();
    params.lse = method.retain() != nullptr;
    if (const lctx_chunks * c = method.chunks()) {
        params.chunk_size = c->chunk_size;
        params.near_from = c->near_segment();
    }
    return params;
}

// The nodes of one ubatch, in order.
step add_step(lctx_graph_run & g, const layer & l, const lctx_method & method, ggml_tensor * angles, int32_t first, int32_t n,
              std::vector<ggml_tensor *> & nodes) {
    const lctx_op_args & a = g.a;
    ggml_context * ctx = g.ctx.get();
    const lctx_retain * r = method.retain();
    const lctx_attend_params attend = attend_params(a, method);
    step s = {first, n, g.tensor(GGML_TYPE_I32, 4, n), nullptr, nullptr, nullptr, nullptr, nullptr};
    ggml_tensor * queries = lctx_tokens_of(ctx, l.q, first, n);
    ggml_tensor * stored = lctx_store(ctx, lctx_tokens_of(ctx, l.k, first, n), lctx_tokens_of(ctx, l.v, first, n), l.k_pool, l.v_pool,
                                      l.table, s.rows, angles, l.near, l.held, a.rope_mode, r ? r->score : LCTX_SCORE_LAST);
    nodes.push_back(stored);
    if (const lctx_chunks * c = method.chunks()) {
        s.chunk_rows = g.tensor(GGML_TYPE_I32, 4, n);
        const lctx_represent_params params = {LCTX_OP_REPRESENT, a.rope_mode, a.scale,           a.softcap,
                                              c->chunk_size,     c->minmax,   l.near != nullptr, a.rope_mode == GGML_ROPE_TYPE_NORMAL};
        nodes.push_back(
            lctx_represent(ctx, queries, stored, l.v_pool, l.table, s.chunk_rows, angles, l.near, l.held, l.reps, l.open, params));
        nodes.push_back(s.segs = lctx_select(ctx, queries, nodes.back(), s.chunk_rows, a.n_head_kv, *c));
    } else {
        s.segs = g.tensor(GGML_TYPE_I32, 4, method.n_segment(), n);
    }
    nodes.push_back(s.out = lctx_attend(ctx, queries, stored, l.v_pool, l.table, s.segs, angles, l.near, l.held, attend));
    if (r) {
        s.voters = g.tensor(GGML_TYPE_I32, 4, n);
        nodes.push_back(lctx_vote(ctx, s.out, s.voters, *r));
    }
    if (r && (first + n) % r->evict_every == 0) {
        s.due = g.tensor(GGML_TYPE_I32, 1);
        nodes.push_back(lctx_evict(ctx, l.k_pool, l.v_pool, l.table, l.held, s.due, l.reps, *r, attend.chunk_size));
    }
    return s;
}

// The queries of the ubatch's last chunk are kept, in the half of the ring that its number gives.
int32_t open_row(const lctx_chunks & c, const step & s, int32_t row) {
    const int32_t chunk = row / c.chunk_size, at = chunk % 2 * c.chunk_size + row % c.chunk_size;
    return chunk == (s.first + s.n - 1) / c.chunk_size ? at : ~at;
}

void fill_segments(const lctx_method & method, const step & s) {
    const int32_t n_seg = method.n_segment();
    std::vector<lctx_segment> segs((size_t)s.n * n_seg);
    for (int32_t i = 0; i < s.n; i++) {
        method.segments(s.first + i, &segs[(size_t)i * n_seg]);
        for (int32_t seg = 0; seg < n_seg; seg++) {
            segs[(size_t)i * n_seg + seg].angle += (s.first + i) * method.n_angle();
        }
    }
    lctx_fill(s.segs, segs.data());
}

void fill_step(const lctx_method & method, const step & s) {
    std::vector<lctx_row> row(s.n);
    std::vector<lctx_chunk_row> chunk_row(s.n);
    std::vector<lctx_voter> voter(s.n);
    for (int32_t i = 0; i < s.n; i++) {
        const int32_t p = s.first + i, angle0 = p * method.n_angle();
        row[i] = {p, 0, angle0 + method.key_angle(), angle0 + method.near_angle()};
        chunk_row[i] = {p, 0, method.chunks() ? open_row(*method.chunks(), s, p) : -1, angle0};
        voter[i] = {p, 0, method.retain() && method.retain()->votes(p), s.first};
    }
    lctx_fill(s.rows, row.data());
    if (s.chunk_rows) {
        lctx_fill(s.chunk_rows, chunk_row.data());
    } else {
        fill_segments(method, s);
    }
    if (s.voters) {
        lctx_fill(s.voters, voter.data());
    }
    if (s.due) {
        const int32_t last = s.first + s.n - 1;
        lctx_fill(s.due, &last);
    }
}

void fill(const layer & l, const lctx_op_args & a, const lctx_method & method) {
    std::vector<int32_t> positions((size_t)a.n_rows * method.n_angle());
    for (int32_t p = 0; p < a.n_rows; p++) {
        method.positions(p, &positions[(size_t)p * method.n_angle()]);
    }
    const std::vector<int32_t> pages = lctx_shuffled_pages(a, (int32_t)l.table->ne[0]);
    lctx_poison({l.k_pool, l.v_pool, l.near, l.reps, l.open, l.held});
    lctx_fill(l.pos, positions.data()), lctx_fill(l.k, a.k), lctx_fill(l.v, a.v), lctx_fill(l.q, a.q), lctx_fill(l.table, pages.data());
    if (l.factors) {
        lctx_fill(l.factors, a.freq_factors);
    }
    const int32_t nothing_gone[lctx_held::HEADER] = {};
    for (int64_t head = 0; l.held && head < l.held->ne[1]; head++) {
        ggml_backend_tensor_set(l.held, nothing_gone, head * l.held->nb[1], sizeof(nothing_gone));
    }
}

// The chunks that every query head of a step reads.
void read_chunks(const lctx_layer_run_args & args, const lctx_chunks & c, const step & s) {
    std::vector<lctx_segment> segs(ggml_nelements(s.segs) / 4);
    ggml_backend_tensor_get(s.segs, segs.data(), 0, ggml_nbytes(s.segs));
    const int64_t n_head = args.op->n_head, n_segment = s.segs->ne[1], n_choice = s.segs->ne[2];
    for (int64_t i = 0; i < s.n * n_head; i++) {
        int32_t * out = args.chunks + (s.first * n_head + i) * args.n_slot_max;
        const lctx_segment * first = segs.data() + (i / n_head * n_choice + i % n_head * n_choice / n_head) * n_segment;
        const std::vector<int32_t> read = lctx_chunks_of(first, n_segment, c.chunk_size);
        std::fill(std::copy(read.begin(), read.end(), out), out + args.n_slot_max, -1);
    }
}

void read_held(const lctx_layer_run_args & args, const layer & l) {
    const int32_t n_row = args.op->n_rows;
    if (!l.held && args.held) {
        std::fill_n(args.held, (size_t)args.op->n_head_kv * n_row, 1);
    }
    if (!l.held) {
        return;
    }
    std::vector<int32_t> data(lctx_held::size(n_row));
    for (int32_t head = 0; head < args.op->n_head_kv; head++) {
        ggml_backend_tensor_get(l.held, data.data(), head * l.held->nb[1], data.size() * sizeof(int32_t));
        const lctx_held held = {data.data(), n_row};
        if (args.held) {
            std::fill_n(args.held + (size_t)head * n_row, n_row, 0);
        }
        for (int32_t slot = 0; slot < n_row - held.n_gone(); slot++) {
            const size_t at = (size_t)head * n_row + held.rows()[slot];
            if (args.held) {
                args.held[at] = 1;
            }
            if (args.scores) {
                args.scores[at] = held.scores()[slot];
            }
        }
    }
}

void read(const lctx_layer_run_args & args, const layer & l, const lctx_method & method, const std::vector<step> & steps) {
    const size_t row_out = (size_t)args.op->n_head * args.op->head_dim_v;
    for (const step & s : steps) {
        ggml_backend_tensor_get(s.out, args.op->out + s.first * row_out, 0, s.n * row_out * sizeof(float));
        if (args.chunks) {
            read_chunks(args, *method.chunks(), s);
        }
    }
    if (args.representations && args.op->n_rows >= method.chunks()->chunk_size) {
        ggml_backend_tensor_get(l.reps, args.representations, 0, ggml_nbytes(l.reps));
    }
    if (args.held || args.scores) {
        read_held(args, l);
    }
}

void run(lctx_layer_run_args & args) {
    check(args);
    const lctx_op_args & a = *args.op;
    const auto method = lctx_method_create(lctx_method_parse(args.method), {args.n_ctx_train, a.n_rows});
    check_method(args, *method);
    const lctx_chunks * c = method->chunks();
    args.n_rep = !c ? 0 : c->minmax ? a.n_head_kv : a.n_head;
    args.rep_dim = c ? c->rep_dim(a.head_dim_k) : 0;
    args.n_slot = c ? c->n_chunk : 0;

    std::vector<int32_t> starts;
    for (int32_t p = 0; p < a.n_rows;) {
        starts.push_back(p);
        p = std::min({a.n_rows, p + args.n_ubatch, method->retain() ? method->retain()->border(p) + 1 : a.n_rows});
    }
    lctx_graph_run g(a, 32 + 16 * starts.size());
    const layer l = make_layer(g, args, *method);
    ggml_tensor * angles = lctx_angles(g.ctx.get(), l.pos, l.factors, lctx_rope_of(a));
    std::vector<ggml_tensor *> nodes = {angles};
    std::vector<step> steps;
    for (size_t i = 0; i < starts.size(); i++) {
        const int32_t end = i + 1 < starts.size() ? starts[i + 1] : a.n_rows;
        steps.push_back(add_step(g, l, *method, angles, starts[i], end - starts[i], nodes));
    }
    g.allocate();
    fill(l, a, *method);
    for (const step & s : steps) {
        fill_step(*method, s);
    }
    g.compute(nodes);
    read(args, l, *method, steps);
}

}  // namespace

int32_t lctx_layer_run(lctx_layer_run_args * args, char * err, size_t err_size) {
    std::string error;
    if (lctx_guard(&error, [&] { run(*args); })) {
        return LCTX_OK;
    }
    snprintf(err, err_size, "%s", error.c_str());
    return LCTX_INVALID;
}
