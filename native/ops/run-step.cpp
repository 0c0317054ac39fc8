// lctx_step_run: the sub-ops of one ubatch at the end of a layer that holds many rows, each timed by itself. For bench and tests.
#include "costs.h"
#include "roofline.h"

namespace {

constexpr int32_t N_FILL = 1024;

void check(const lctx_step_run_args & args) {
    lctx_require(args.op && args.method && args.times && args.op->k && args.op->v && args.op->q && args.op->out, "an array is missing");
    lctx_check_shapes(*args.op);
    lctx_require(args.op->n_tokens <= args.op->n_rows, "n_tokens must be at most n_rows: the step is the last rows");
    lctx_require(args.n_ctx_train > 0 && args.op->n_repeat > 0, "n_ctx_train and n_repeat must be positive");
    lctx_require(0 <= args.held_share && args.held_share <= 1 && 0 <= args.open_share && args.open_share <= 1, "a share is from 0 to 1");
}

void check_step(const lctx_step_run_args & args, const lctx_method & method, int32_t n_past) {
    const lctx_chunks * c = method.chunks();
    lctx_require(!c || c->minmax || args.fill_q || n_past == 0, "representation=attention needs fill_q");
    if (const lctx_retain * r = method.retain()) {
        const int32_t most = r->border(n_past) + 1 - n_past;
        lctx_require(args.op->n_tokens <= most,
                     ("no ubatch crosses a border of evict_every rows: n_tokens is at most " + std::to_string(most) + " there").c_str());
    }
}

void fill(const lctx_step_run_args & args, const lctx_op_layer & l, int32_t n_past) {
    const lctx_op_args & a = *args.op;
    for (int32_t first = 0; first < n_past; first += N_FILL) {
        lctx_op_ubatch u(l, first, std::min(N_FILL, n_past - first));
        const size_t row = (size_t)first * a.n_head_kv;
        const float * q = args.fill_q ? args.fill_q + (size_t)first * a.n_head * a.head_dim_k : nullptr;
        u.fill(a.k + row * a.head_dim_k, a.v + row * a.head_dim_v, q);
        u.g.compute({u.angles, u.stored});
        if (u.represented) {
            u.g.compute({u.represented});
        }
    }
}

// Scores as votes would have left them, and the eviction after the last row that is filled.
void settle(const lctx_step_run_args & args, const lctx_op_layer & l, int32_t n_past) {
    const lctx_retain & r = *l.method.retain();
    std::mt19937 random(args.op->page_seed);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    const auto score = [&](double voted_share) {
        const float x = uniform(random);
        switch (r.score) {
            case LCTX_SCORE_COUNT: return (int32_t)(x * 1000.0f);
            case LCTX_SCORE_SUM:   return lctx_held::as_score(x);
            case LCTX_SCORE_LAST:  break;
        }
        return x < voted_share ? n_past - 1 : lctx_held::first_score(r.score);
    };
    const auto set_scores = [&](double voted_share) {
        for (int32_t head = 0; head < args.op->n_head_kv; head++) {
            const lctx_held held = l.held_of(head);
            std::generate_n(held.scores(), n_past - held.n_gone(), [&] { return score(voted_share); });
        }
    };
    lctx_graph_run g(args.op->n_threads, 8);
    ggml_tensor * due = g.tensor(GGML_TYPE_I32, 1);
    ggml_tensor * evicted = lctx_evict(g.ctx.get(), l.k_pool, l.v_pool, l.table, l.held, due, l.reps, r, l.attend_params().chunk_size);
    g.allocate();
    const int32_t last = n_past - 1;
    lctx_fill(due, &last);
    set_scores(args.held_share);
    g.compute({evicted});
    if (!r.resets) {
        set_scores(1.0 - args.open_share);
    }
}

// What sub-ops change besides the rows they write: every repeat begins from a copy.
class saved_state {
  public:
    explicit saved_state(const lctx_op_layer & l) {
        for (ggml_tensor * t : {l.held, l.reps, l.open}) {
            if (t) {
                copies_.emplace_back(t, std::vector<char>((char *)t->data, (char *)t->data + ggml_nbytes(t)));
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

std::vector<std::vector<int32_t>> rows_held(const lctx_op_ubatch & u) {
    std::vector<std::vector<int32_t>> rows;
    for (int32_t head = 0; u.layer.held && head < u.layer.a.n_head_kv; head++) {
        const lctx_held held = u.layer.held_of(head);
        rows.emplace_back(held.rows(), held.rows() + u.first + u.n - held.n_gone());
    }
    return rows;
}

// Time the node of a sub-op, when there is one.
void time_node(lctx_step_run_args & args, lctx_op_ubatch & u, lctx_step_op op, ggml_tensor * node, lctx_cooler & cool) {
    const int32_t n = args.op->n_repeat;
    double * times = args.times + (size_t)op * n;
    std::fill_n(times, n, 0.0);
    if (!node) {
        return;
    }
    const saved_state state(u.layer);
    const std::vector<double> us = u.g.times(u.g.graph_of({node}), n, [&] { state.restore(), cool(); });
    std::copy(us.begin(), us.end(), times);
}

void set_cost(lctx_step_run_args & args, lctx_step_op op, const lctx_cost & cost) {
    args.bytes[op] = cost.bytes;
    args.flops[op] = cost.flops;
}

void run_step(lctx_step_run_args & args, lctx_op_ubatch & u) {
    lctx_cooler cool(*args.op);
    const auto time = [&](lctx_step_op op, ggml_tensor * node, auto && cost) {
        set_cost(args, op, node ? cost(u) : lctx_cost{});
        time_node(args, u, op, node, cool);
    };
    u.g.compute({u.angles});
    time(LCTX_STEP_STORE, u.stored, lctx_store_cost);
    time(LCTX_STEP_REPRESENT, u.represented, lctx_represent_cost);
    time(LCTX_STEP_SELECT, u.represented ? u.segs : nullptr, lctx_select_cost);
    time(LCTX_STEP_ATTEND, u.out, lctx_attend_cost);
    time(LCTX_STEP_VOTE, u.voted, lctx_vote_cost);
    const std::vector<std::vector<int32_t>> before = rows_held(u);
    time_node(args, u, LCTX_STEP_EVICT, u.evicted, cool);
    set_cost(args, LCTX_STEP_EVICT, u.evicted ? lctx_evict_cost(u, before) : lctx_cost{});
}

void run(lctx_step_run_args & args) {
    check(args);
    const lctx_op_args & a = *args.op;
    const int32_t n_past = a.n_rows - a.n_tokens;
    const auto method = lctx_method_create(lctx_method_parse(args.method), {args.n_ctx_train, a.n_rows});
    lctx_check_method(a, *method);
    check_step(args, *method, n_past);
    const lctx_op_layer l(a, *method, std::max(N_FILL, a.n_tokens));
    fill(args, l, n_past);
    if (method->retain() && n_past > 0) {
        settle(args, l, n_past);
    }
    args.n_held = l.held ? n_past - l.held_of(0).n_gone() : n_past;
    lctx_op_ubatch u(l, n_past, a.n_tokens);
    const size_t row = (size_t)n_past * a.n_head_kv;
    u.fill(a.k + row * a.head_dim_k, a.v + row * a.head_dim_v, a.q);
    run_step(args, u);
    ggml_backend_tensor_get(u.out, a.out, 0, (size_t)a.n_tokens * a.n_head * a.head_dim_v * sizeof(float));
}

}  // namespace

int32_t lctx_step_run(lctx_step_run_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
