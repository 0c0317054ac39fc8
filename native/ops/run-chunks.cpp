// lctx_chunk_run: one layer of a method that chooses chunks, ubatch by ubatch, through a ggml graph on the CPU backend. For tests.
#include "../firewall.h"
#include "run.h"

#include <cstdio>

namespace {

// Nodes of one ubatch.
struct step {
    int32_t first, n;
    ggml_tensor *rows, *chunk_rows, *segs, *out;
};

void check(const lctx_chunk_run_args & args) {
    lctx_require(args.op && args.method && args.op->k && args.op->v && args.op->q && args.op->out, "an array is missing");
    lctx_check_shapes(*args.op);
    lctx_require(args.op->n_tokens == args.op->n_rows, "every row has a query: n_tokens must be n_rows");
    lctx_require(args.n_ctx_train > 0 && args.n_ubatch > 0, "sizes must be positive");
}

// The queries of the ubatch's last chunk are kept, in the half of the ring that its number gives.
int32_t open_row(const lctx_chunks & c, const step & s, int32_t row) {
    const int32_t chunk = row / c.chunk_size, at = chunk % 2 * c.chunk_size + row % c.chunk_size;
    return chunk == (s.first + s.n - 1) / c.chunk_size ? at : ~at;
}

void fill_step(const lctx_method & method, const step & s) {
    std::vector<lctx_row> row(s.n);
    std::vector<lctx_chunk_row> chunk_row(s.n);
    for (int32_t i = 0; i < s.n; i++) {
        const int32_t p = s.first + i, angle0 = p * method.n_angle();
        row[i] = {p, 0, angle0 + method.key_angle(), angle0 + method.near_angle()};
        chunk_row[i] = {p, 0, open_row(*method.chunks(), s, p), angle0};
    }
    lctx_fill(s.rows, row.data());
    lctx_fill(s.chunk_rows, chunk_row.data());
}

// The chunks that every query head of a step reads.
void read_chunks(const lctx_chunk_run_args & args, const lctx_chunks & c, const step & s) {
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

void run(lctx_chunk_run_args & args) {
    check(args);
    const lctx_op_args & a = *args.op;
    const auto method = lctx_method_create(lctx_method_parse(args.method), {args.n_ctx_train, a.n_rows});
    lctx_require(method->chunks(), "the method chooses no chunks");
    const lctx_chunks & c = *method->chunks();
    lctx_require(c.minmax || a.head_dim_k == a.head_dim_v,
                 "representation=attention needs head_dim_v equal to head_dim_k; use representation=minmax");
    lctx_require(!args.chunks || args.n_slot_max >= c.n_chunk, "n_slot_max is too small");
    const int32_t n_block = (a.n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS, n_step = (a.n_rows + args.n_ubatch - 1) / args.n_ubatch;
    const int32_t n_complete = a.n_rows / c.chunk_size, near_window = method->near_window();
    const int32_t near_rows = GGML_PAD(near_window + std::min(args.n_ubatch, a.n_rows), LCTX_PAGE_ROWS);
    args.n_rep = c.minmax ? a.n_head_kv : a.n_head;
    args.rep_dim = c.rep_dim(a.head_dim_k);
    args.n_slot = c.n_chunk;

    lctx_graph_run g(a, 32 + 12 * (size_t)n_step);
    ggml_context * ctx = g.ctx.get();
    ggml_tensor * pos = g.tensor(GGML_TYPE_I32, (int64_t)a.n_rows * method->n_angle());
    ggml_tensor * factors = a.freq_factors ? g.tensor(GGML_TYPE_F32, a.rope_dims / 2) : nullptr;
    ggml_tensor * k = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv, a.n_rows);
    ggml_tensor * v = g.tensor(GGML_TYPE_F32, a.head_dim_v, a.n_head_kv, a.n_rows);
    ggml_tensor * q = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head, a.n_rows);
    ggml_tensor * k_pool = g.tensor((ggml_type)a.type_k, a.head_dim_k, (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS);
    ggml_tensor * v_pool = g.tensor((ggml_type)a.type_v, a.head_dim_v, (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS);
    ggml_tensor * near = near_window > 0 ? g.tensor((ggml_type)a.type_k, a.head_dim_k, near_rows, a.n_head_kv) : nullptr;
    ggml_tensor * table = g.tensor(GGML_TYPE_I32, n_block, a.n_head_kv);
    ggml_tensor * reps = g.tensor(GGML_TYPE_F32, args.rep_dim, std::max(1, n_complete), args.n_rep);
    ggml_tensor * open = c.minmax ? nullptr : g.tensor(GGML_TYPE_F32, a.head_dim_k, 2 * c.chunk_size, a.n_head);

    const lctx_represent_params represent = {LCTX_OP_REPRESENT, a.rope_mode, a.scale,         a.softcap,
                                             c.chunk_size,      c.minmax,    near != nullptr, a.rope_mode == GGML_ROPE_TYPE_NORMAL};
    const lctx_attend_params attend = {LCTX_OP_ATTEND, a.rope_mode, a.scale, a.softcap, 0, 0, c.chunk_size, c.near_segment()};
    ggml_tensor * angles = lctx_angles(ctx, pos, factors, lctx_rope_of(a));
    std::vector<ggml_tensor *> nodes = {angles};
    std::vector<step> steps;
    for (int32_t first = 0; first < a.n_rows; first += args.n_ubatch) {
        step s = {first, std::min(args.n_ubatch, a.n_rows - first), nullptr, nullptr, nullptr, nullptr};
        s.rows = g.tensor(GGML_TYPE_I32, 4, s.n);
        s.chunk_rows = g.tensor(GGML_TYPE_I32, 4, s.n);
        ggml_tensor * queries = lctx_tokens_of(ctx, q, first, s.n);
        ggml_tensor * stored = lctx_store(ctx, lctx_tokens_of(ctx, k, first, s.n), lctx_tokens_of(ctx, v, first, s.n), k_pool, v_pool,
                                          table, s.rows, angles, near, a.rope_mode);
        ggml_tensor * represented = lctx_represent(ctx, queries, stored, v_pool, table, s.chunk_rows, angles, near, reps, open, represent);
        s.segs = lctx_select(ctx, queries, represented, s.chunk_rows, a.n_head_kv, c);
        s.out = lctx_attend(ctx, queries, stored, v_pool, table, s.segs, angles, near, attend);
        nodes.insert(nodes.end(), {stored, represented, s.segs, s.out});
        steps.push_back(s);
    }
    g.allocate();

    std::vector<int32_t> positions((size_t)a.n_rows * method->n_angle());
    for (int32_t p = 0; p < a.n_rows; p++) {
        method->positions(p, &positions[(size_t)p * method->n_angle()]);
    }
    const std::vector<int32_t> pages = lctx_shuffled_pages(a, n_block);
    lctx_poison({k_pool, v_pool, near, reps, open});
    lctx_fill(pos, positions.data()), lctx_fill(k, a.k), lctx_fill(v, a.v), lctx_fill(q, a.q), lctx_fill(table, pages.data());
    if (factors) {
        lctx_fill(factors, a.freq_factors);
    }
    for (const step & s : steps) {
        fill_step(*method, s);
    }
    g.compute(nodes);

    const size_t row_out = (size_t)a.n_head * a.head_dim_v;
    for (const step & s : steps) {
        ggml_backend_tensor_get(s.out, a.out + s.first * row_out, 0, s.n * row_out * sizeof(float));
        if (args.chunks) {
            read_chunks(args, c, s);
        }
    }
    if (args.representations && n_complete > 0) {
        ggml_backend_tensor_get(reps, args.representations, 0, ggml_nbytes(reps));
    }
}

}  // namespace

int32_t lctx_chunk_run(lctx_chunk_run_args * args, char * err, size_t err_size) {
    std::string error;
    if (lctx_guard(&error, [&] { run(*args); })) {
        return LCTX_OK;
    }
    snprintf(err, err_size, "%s", error.c_str());
    return LCTX_INVALID;
}
