// lctx_layer_run: one layer of any method, ubatch by ubatch, through ggml graphs. For tests.
#include "../memory/budgets.h"
#include "layer.h"

namespace {

void check(const lctx_layer_run_args & args) {
    lctx_require(args.op && args.method && args.op->k && args.op->v && args.op->q && args.op->out,
                 "an array is missing");
    lctx_check_shapes(*args.op);
    lctx_require(args.op->n_tokens == args.op->n_rows, "every row has a query: n_tokens must be n_rows");
    lctx_require(args.n_ctx_train > 0 && args.n_ubatch > 0, "sizes must be positive");
    lctx_require(args.n_text >= 0 && args.n_text < args.op->n_rows && args.fraction >= 0 && args.fraction <= 1,
                 "there is no such text or fraction");
    lctx_require(args.op->n_layer <= 1,
                 "lctx_layer_run has one layer: n_layer is for lctx_flash_run and lctx_step_run");
}

void check_chunks(const lctx_layer_run_args & args, const lctx_chunks * c, int32_t n_read) {
    lctx_require(c || (!args.chunks && !args.summaries), "the method chooses no chunks");
    lctx_require(!c || !args.chunks || args.n_read_max >= n_read, "n_read_max is too small");
}

// The chunks that every query head of a ubatch reads.
void read_chunks(const lctx_layer_run_args & args, const lctx_op_ubatch & u) {
    std::vector<int32_t> choices(ggml_nelements(u.segs()));
    ggml_backend_tensor_get(u.segs(), choices.data(), 0, ggml_nbytes(u.segs()));
    const int64_t n_head = args.op->n_head;
    for (int64_t i = 0; i < u.n * n_head; i++) {
        int32_t * out = args.chunks + (u.first * n_head + i) * args.n_read_max;
        const std::vector<int32_t> read =
            lctx_chunks_read(u.segs(), choices.data(), (int32_t)(i / n_head), (int32_t)(i % n_head));
        std::fill(std::copy(read.begin(), read.end(), out), out + args.n_read_max, -1);
    }
}

void read_held(const lctx_layer_run_args & args, const lctx_op_layer & l) {
    const int32_t n_row = args.op->n_rows, n_held_row = args.n_text > 0 ? args.n_text : n_row;
    lctx_held_copy copy(l);
    if (copy.all()) {
        std::fill_n(args.held, args.held ? (size_t)args.op->n_head_kv * n_row : 0, 1);
        return;
    }
    for (int32_t head = 0; head < args.op->n_head_kv; head++) {
        const lctx_held held = copy.of(head);
        if (args.held) {
            std::fill_n(args.held + (size_t)head * n_row, n_row, 0);
        }
        for (int32_t cell = 0; cell < n_held_row - held.n_gone(); cell++) {
            const size_t at = (size_t)head * n_row + held.rows()[cell];
            if (args.held) {
                args.held[at] = 1;
            }
            if (args.scores) {
                args.scores[at] = held.scores()[cell];
            }
        }
    }
}

// Return for every head the entries that it may evict after row p.
std::vector<lctx_contender> contenders(const lctx_op_layer & l, int32_t p) {
    const lctx_chunks * c = l.method.chunks();
    std::vector<lctx_contender> all;
    lctx_held_copy copy(l);
    for (int32_t head = 0; head < l.a.n_head_kv; head++) {
        const lctx_held held = copy.of(head);
        all.emplace_back(*l.method.retain(), c ? c->chunk_size : 0, p, held.rows(), held.scores(),
                         p + 1 - held.n_gone());
    }
    return all;
}

// The nodes of a ubatch; what heads may keep is known after its votes.
void compute(const lctx_op_layer & l, const lctx_op_ubatch & u) {
    if (!u.budgets || !l.method.retain()->adaptive) {
        u.g.compute(u.nodes);
        return;
    }
    u.g.compute(std::vector<ggml_tensor *>(u.nodes.begin(), u.nodes.end() - 1));
    std::vector<lctx_contender> heads = contenders(l, u.first + u.n - 1);
    lctx_fill(u.budgets, lctx_layer_budgets(heads, *l.method.retain()).data());
    u.g.compute({u.nodes.back()});
}

// Take the replay back and compress the text.
void compress(const lctx_layer_run_args & args, const lctx_op_layer & l) {
    lctx_graph_run g(l.g.backend, 8);
    ggml_tensor * due = g.tensor(GGML_TYPE_I32, 1);
    ggml_tensor * budgets = g.tensor(GGML_TYPE_I32, l.a.n_head_kv);
    ggml_tensor * evicted = l.evict(g.ctx.get(), due, budgets);
    g.allocate();
    const int32_t last = args.n_text - 1;
    std::vector<lctx_contender> heads = contenders(l, last);
    lctx_fill(due, &last);
    lctx_fill(budgets, lctx_text_budgets(heads, args.fraction, args.n_text).data());
    g.compute({evicted});
}

void run_ubatch(const lctx_layer_run_args & args, const lctx_op_layer & l, int32_t first, int32_t n) {
    const lctx_op_args & a = *args.op;
    lctx_op_ubatch u(l, first, n);
    const size_t row_kv = (size_t)first * a.n_head_kv, row = (size_t)first * a.n_head;
    u.fill(a.k + row_kv * a.head_dim_k, a.v + row_kv * a.head_dim_v, a.q + row * a.head_dim_k);
    compute(l, u);
    ggml_backend_tensor_get(u.node(LCTX_OP_ATTEND), a.out + row * a.head_dim_v, 0,
                            (size_t)n * a.n_head * a.head_dim_v * sizeof(float));
    if (args.chunks) {
        read_chunks(args, u);
    }
}

void run(lctx_layer_run_args & args) {
    check(args);
    const lctx_op_args & a = *args.op;
    const auto method =
        lctx_method_create(lctx_method_parse(args.method), {args.n_ctx_train, a.n_rows, a.head_dim_k, 0, false, 0});
    const lctx_chunks * c = method->chunks();
    lctx_check_method(a, *method);
    check_chunks(args, c, method->n_read());
    const bool waits = method->retain() && method->retain()->waits();
    lctx_require(waits == (args.n_text > 0), "a text and its replay are for a rule that waits for them");
    lctx_op_layer l(a, *method, std::min(args.n_ubatch, a.n_rows), lctx_backend_of(a.device, a.n_threads));
    l.replay_from = waits ? args.n_text : l.replay_from;
    l.always_selects = args.chunks != nullptr;
    args.n_summary = l.summaries ? (int32_t)l.summaries->ne[2] : 0;
    args.summary_dim = l.summaries ? (int32_t)l.summaries->ne[0] : 0;
    args.n_read = method->n_read();
    for (int32_t p = 0; p < a.n_rows;) {
        const int32_t end =
            std::min({a.n_rows, p + args.n_ubatch, method->retain() ? method->retain()->border(p) + 1 : a.n_rows});
        run_ubatch(args, l, p, end - p);
        p = end;
    }
    if (waits) {
        compress(args, l);
    }
    if (args.summaries && l.summaries && a.n_rows >= c->chunk_size) {
        std::vector<char> rows(ggml_nbytes(l.summaries));
        ggml_backend_tensor_get(l.summaries, rows.data(), 0, rows.size());
        if (l.summaries->type == GGML_TYPE_F32) {  // has no to_float
            memcpy(args.summaries, rows.data(), rows.size());
        } else {
            ggml_get_type_traits(l.summaries->type)->to_float(rows.data(), args.summaries, ggml_nelements(l.summaries));
        }
    }
    if (args.held || args.scores) {
        read_held(args, l);
    }
}

}  // namespace

int32_t lctx_layer_run(lctx_layer_run_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
