// lctx_step_run: the sub-ops of one ubatch at the end of a layer that holds many rows, each timed by itself. For bench
// and tests.
#include "attend-cost.h"
#include "roofline.h"

namespace {

constexpr int32_t N_FILL = 1024;
// Of *summarize* and *index*, a choice of chunks has one.
constexpr lctx_op SUB_OP[LCTX_N_STEP_OP] = {LCTX_OP_STORE,  LCTX_OP_SUMMARIZE, LCTX_OP_SELECT,
                                            LCTX_OP_ATTEND, LCTX_OP_VOTE,      LCTX_OP_EVICT};

void check(const lctx_step_run_args & args) {
    lctx_require(args.op && args.method && args.times && args.op->k && args.op->v && args.op->q && args.op->out,
                 "an array is missing");
    lctx_check_shapes(*args.op);
    lctx_require(args.op->n_tokens <= args.op->n_rows, "n_tokens must be at most n_rows: the step is the last rows");
    lctx_require(args.n_ctx_train > 0 && args.op->n_repeat > 0, "n_ctx_train and n_repeat must be positive");
    lctx_require(
        0 <= args.held_fraction && args.held_fraction <= 1 && 0 <= args.open_fraction && args.open_fraction <= 1,
        "a fraction is from 0 to 1");
}

void check_step(const lctx_step_run_args & args, const lctx_method & method, int32_t n_past) {
    const lctx_chunks * c = method.chunks();
    lctx_require(!c || !c->by_attention() || args.fill_q || n_past == 0, "representation=attention needs fill_q");
    if (const lctx_retain * r = method.retain()) {
        const int32_t most = r->border(n_past) + 1 - n_past;
        lctx_require(
            args.op->n_tokens <= most,
            ("no ubatch crosses a border of evict_every rows: n_tokens is at most " + std::to_string(most) + " there")
                .c_str());
    }
}

void fill(const lctx_step_run_args & args, const lctx_op_layer & l, int32_t n_past) {
    const lctx_op_args & a = *args.op;
    for (int32_t first = 0; first < n_past; first += N_FILL) {
        lctx_op_ubatch u(l, first, std::min(N_FILL, n_past - first));
        const size_t row = (size_t)first * a.n_head_kv;
        const float * q = args.fill_q ? args.fill_q + (size_t)first * a.n_head * a.head_dim_k : nullptr;
        u.fill(a.k + row * a.head_dim_k, a.v + row * a.head_dim_v, q);
        u.g.compute(u.prepared);
        std::vector<lctx_op> ops = {LCTX_OP_STORE, LCTX_OP_SUMMARIZE, LCTX_OP_INDEX};
        if (u.n == 1) {  // these may write a row that is alone
            ops.insert(ops.end(), {LCTX_OP_SELECT, LCTX_OP_ATTEND});
        }
        for (lctx_op op : ops) {
            if (ggml_tensor * node = u.node(op)) {
                u.g.compute({node});
            }
        }
    }
}

// Scores as votes would have left them, and the eviction after the last row that is filled.
void settle(const lctx_step_run_args & args, const lctx_op_layer & l, int32_t n_past) {
    const lctx_retain & r = *l.method.retain();
    std::mt19937 random(args.op->page_seed);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    const auto score = [&](double voted_fraction) {
        const float x = uniform(random);
        switch (r.score) {
            case LCTX_SCORE_COUNT: return (int32_t)(x * 1000.0f);
            case LCTX_SCORE_SUM:
            case LCTX_SCORE_MAX:   return lctx_held::as_score(x);
            case LCTX_SCORE_LAST:  break;
        }
        return x < voted_fraction ? n_past - 1 : lctx_held::first_score(r.score);
    };
    const auto set_scores = [&](double voted_fraction) {
        lctx_held_copy copy(l);
        for (int32_t head = 0; head < args.op->n_head_kv; head++) {
            const lctx_held held = copy.of(head);
            std::generate_n(held.scores(), n_past - held.n_gone(), [&] { return score(voted_fraction); });
        }
        copy.write_back();
    };
    lctx_graph_run g(l.g.backend, 8);
    ggml_tensor * due = g.tensor(GGML_TYPE_I32, 1);
    ggml_tensor * evicted = l.evict(g.ctx.get(), due);
    g.allocate();
    const int32_t last = n_past - 1;
    lctx_fill(due, &last);
    set_scores(args.held_fraction);
    g.compute({evicted});
    if (!r.resets) {
        set_scores(1.0 - args.open_fraction);
    }
}

// Saves what sub-ops change besides the rows they write: every repeat begins from a copy.
class saved_state {
  public:
    explicit saved_state(const lctx_op_layer & l) {
        for (ggml_tensor * t : {l.held, l.summaries, l.open}) {
            if (t) {
                copies_.emplace_back(t, std::vector<char>(ggml_nbytes(t)));
                ggml_backend_tensor_get(t, copies_.back().second.data(), 0, ggml_nbytes(t));
            }
        }
    }
    void restore() const {
        for (const auto & [tensor, copy] : copies_) {
            lctx_fill(tensor, copy.data());
        }
    }

  private:
    std::vector<std::pair<ggml_tensor *, std::vector<char>>> copies_;
};

// A layer that holds the rows before the step, and its ubatch.
struct step_layer {
    lctx_op_layer layer;
    lctx_op_ubatch ubatch;

    step_layer(const lctx_step_run_args & args, const lctx_method & method, const lctx_backend & backend)
        : layer(*args.op, method, std::max(N_FILL, args.op->n_tokens), backend),
          ubatch(layer, args.op->n_rows - args.op->n_tokens, args.op->n_tokens) {
        const lctx_op_args & a = *args.op;
        fill(args, layer, ubatch.first);
        if (method.retain() && ubatch.first > 0) {
            settle(args, layer, ubatch.first);
        }
        const size_t row = (size_t)ubatch.first * a.n_head_kv;
        ubatch.fill(a.k + row * a.head_dim_k, a.v + row * a.head_dim_v, a.q);
        ubatch.g.compute(ubatch.prepared);
    }
    size_t bytes() const { return layer.g.bytes() + ubatch.g.bytes(); }
};

// Equal layers, whose sub-ops are timed together.
class step_layers {
  public:
    step_layers(lctx_step_run_args & args, const lctx_method & method)
        : args_(args),
          backend_(lctx_backend_of(args.op->device, args.op->n_threads)),
          scratch_(backend_),
          cool_(*args.op) {
        for (int32_t i = 0; i < std::max(1, args.op->n_layer); i++) {
            layers_.push_back(std::make_unique<step_layer>(args, method, backend_));
        }
    }
    const lctx_op_ubatch & first() const { return layers_[0]->ubatch; }
    uint64_t scratch_bytes() const;
    // The rows that KV head 0 of the first layer holds of n_row.
    int32_t n_held(int32_t n_row) const;
    void run() const;

  private:
    static ggml_tensor * node_of(const lctx_op_ubatch & u, lctx_step_op op) {
        ggml_tensor * node = u.node(SUB_OP[op]);
        return node ? node : op == LCTX_STEP_SUMMARIZE ? u.node(LCTX_OP_INDEX) : nullptr;
    }
    bool has(lctx_step_op op) const { return node_of(first(), op); }
    // Time the nodes of a sub-op, when there are some.
    void time(lctx_step_op op) const;

    lctx_step_run_args & args_;
    lctx_backend backend_;
    lctx_scratch scratch_;
    mutable lctx_cooler cool_;
    std::vector<std::unique_ptr<step_layer>> layers_;
};

uint64_t step_layers::scratch_bytes() const {
    size_t tensors = 0;
    for (const auto & l : layers_) {
        tensors += l->bytes();
    }
    return scratch_.bytes(tensors);
}

int32_t step_layers::n_held(int32_t n_row) const {
    lctx_held_copy copy(layers_[0]->layer);
    return copy.all() ? n_row : n_row - copy.of(0).n_gone();
}

void step_layers::time(lctx_step_op op) const {
    const int32_t n = args_.op->n_repeat;
    double * times = args_.times + (size_t)op * n;
    if (!has(op)) {
        return;
    }
    std::vector<ggml_tensor *> nodes;
    std::vector<saved_state> states;
    for (const auto & l : layers_) {
        nodes.push_back(node_of(l->ubatch, op));
        states.emplace_back(l->layer);
    }
    const lctx_graph_run & g = first().g;
    const auto before = [&] {
        for (const saved_state & state : states) {
            state.restore();
        }
        cool_();
    };
    for (double us : g.times(g.graph_of(nodes), n, before)) {
        *times++ = us / (double)nodes.size();
    }
}

void step_layers::run() const {
    for (int op = 0; op < LCTX_STEP_ATTEND; op++) {
        time((lctx_step_op)op);
    }
    const lctx_cost cost = lctx_attend_cost(first());
    args_.attend_bytes = cost.bytes, args_.attend_flops = cost.flops;
    for (int op = LCTX_STEP_ATTEND; op < LCTX_N_STEP_OP; op++) {
        time((lctx_step_op)op);
    }
}

void run(lctx_step_run_args & args) {
    check(args);
    lctx_op_args & a = *args.op;
    const int32_t n_past = a.n_rows - a.n_tokens;
    const auto method =
        lctx_method_create(lctx_method_parse(args.method), {args.n_ctx_train, a.n_rows, a.head_dim_k, 0, false, 0});
    lctx_check_method(a, *method);
    check_step(args, *method, n_past);
    std::fill_n(args.times, (size_t)LCTX_N_STEP_OP * a.n_repeat, 0.0);
    const step_layers layers(args, *method);
    args.n_held = layers.n_held(n_past);
    layers.run();
    a.scratch_bytes = layers.scratch_bytes();
    ggml_backend_tensor_get(layers.first().node(LCTX_OP_ATTEND), a.out, 0,
                            (size_t)a.n_tokens * a.n_head * a.head_dim_v * sizeof(float));
}

}  // namespace

int32_t lctx_step_run(lctx_step_run_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
