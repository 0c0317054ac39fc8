#include "costs.h"

#include "../ops/nodes.h"

namespace {

// Slots [lo, hi).
struct range {
    int32_t lo, hi;
};

// Ranges that cover the same cells, each once, ascending.
std::vector<range> merged(std::vector<range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const range & a, const range & b) { return a.lo < b.lo; });
    std::vector<range> out;
    for (const range & r : ranges) {
        if (!out.empty() && r.lo <= out.back().hi) {
            out.back().hi = std::max(out.back().hi, r.hi);
        } else if (r.lo < r.hi) {
            out.push_back(r);
        }
    }
    return out;
}

double n_cell(const std::vector<range> & ranges) {
    double n = 0.0;
    for (const range & r : merged(ranges)) {
        n += r.hi - r.lo;
    }
    return n;
}

double key_size(const lctx_op_args & a) {
    return (double)ggml_row_size((ggml_type)a.type_k, a.head_dim_k);
}

double value_size(const lctx_op_args & a) {
    return (double)ggml_row_size((ggml_type)a.type_v, a.head_dim_v);
}

// What the queries of one KV head read, and how many (query, row) pairs that is.
struct reading {
    std::vector<range> far, near;
    double n_pair = 0.0;

    std::vector<range> all() const {
        std::vector<range> both = far;
        both.insert(both.end(), near.begin(), near.end());
        return both;
    }
};

// Copies of what says which rows are read.
struct reader {
    const lctx_op_ubatch & u;
    lctx_held_copy held;
    std::vector<lctx_segment> segs;

    explicit reader(const lctx_op_ubatch & u) : u(u), held(u.layer), segs(ggml_nelements(u.segs()) / 4) {
        ggml_backend_tensor_get(u.segs(), segs.data(), 0, ggml_nbytes(u.segs()));
    }
    range cells_of(int32_t head_kv, const lctx_segment & s) {
        return held.all() ? range{s.row0, s.row1} : range{held.of(head_kv).cell(s.row0), held.of(head_kv).cell(s.row1)};
    }
    reading by(int32_t head_kv);
};

reading reader::by(int32_t head_kv) {
    const lctx_op_layer & l = u.layer;
    const auto params = lctx_params_of<lctx_attend_params>(u.node(LCTX_OP_ATTEND));
    const int64_t n_seg = u.segs()->ne[1], n_choice = params.chunk_size > 0 ? u.segs()->ne[2] : 1;
    const int32_t n_rep = l.a.n_head / l.a.n_head_kv;
    reading r;
    for (int64_t i = 0; i < (int64_t)u.n * n_rep; i++) {
        const int64_t head = (int64_t)head_kv * n_rep + i % n_rep, choice = head * n_choice / l.a.n_head;
        for (int64_t s = 0; s < n_seg; s++) {
            const range cells = cells_of(head_kv, segs[(i / n_rep * n_choice + choice) * n_seg + s]);
            const bool near = params.near_mask != 0 && (params.near_mask >> s & 1);
            (near ? r.near : r.far).push_back(cells);
            r.n_pair += cells.hi - cells.lo;
        }
    }
    return r;
}

}  // namespace

lctx_cost lctx_store_cost(const lctx_op_ubatch & u) {
    const lctx_op_args & a = u.layer.a;
    const double n_key_copy = u.layer.near ? 2.0 : 1.0;
    const double row = sizeof(float) * (double)(a.head_dim_k + a.head_dim_v) + n_key_copy * key_size(a) + value_size(a);
    return {(double)u.n * a.n_head_kv * row, 3.0 * n_key_copy * u.n * a.n_head_kv * a.rope_dims};
}

lctx_cost lctx_summarize_cost(const lctx_op_ubatch & u) {
    const lctx_op_args & a = u.layer.a;
    const lctx_chunks & c = *u.layer.method.chunks();
    if (c.by_keys()) {
        return {(double)u.n * a.n_head_kv * (key_size(a) + (double)u.layer.index->nb[1]), 4.0 * u.n * a.n_head_kv * a.head_dim_k};
    }
    const double size = c.chunk_size, n_chunk = (u.first + u.n) / c.chunk_size - u.first / c.chunk_size;
    const double summary_bytes = n_chunk * (double)u.layer.summaries->ne[2] * (double)u.layer.summaries->nb[1];
    if (!c.by_attention()) {
        return {n_chunk * size * a.n_head_kv * key_size(a) + summary_bytes, 2.0 * n_chunk * size * a.n_head_kv * a.head_dim_k};
    }
    const double queries = (double)u.n * a.n_head * a.head_dim_k * sizeof(float);
    const double per_head = size * size * 2.0 * (a.head_dim_k + a.head_dim_v) + size * 4.0 * a.head_dim_k;
    return {n_chunk * size * a.n_head_kv * (key_size(a) + value_size(a)) + summary_bytes + queries, n_chunk * a.n_head * per_head};
}

lctx_cost lctx_select_cost(const lctx_op_ubatch & u) {
    const lctx_op_args & a = u.layer.a;
    const lctx_chunks & c = *u.layer.method.chunks();
    std::vector<lctx_segment> given(c.n_given());
    u.layer.method.segments(u.first + u.n - 1, given.data());
    double n_row = 0.0;  // that the last query compares
    for (int32_t i = c.n_run; i < c.n_given(); i++) {
        n_row += std::max(0, given[i].row1 - given[i].row0);
    }
    const double n_query = (double)a.n_head * u.n;
    if (c.by_keys()) {
        return {n_row * (double)u.layer.index->nb[1] * a.n_head_kv, 2.0 * n_row * a.head_dim_k * n_query};
    }
    const double n = n_row / c.chunk_size;
    return {n * (double)u.layer.summaries->nb[1] * (double)u.layer.summaries->ne[2], 2.0 * n * (double)u.layer.summaries->ne[0] * n_query};
}

lctx_cost lctx_attend_cost(const lctx_op_ubatch & u) {
    const lctx_op_args & a = u.layer.a;
    lctx_cost cost = {};
    reader read(u);
    for (int32_t head = 0; head < a.n_head_kv; head++) {
        const reading r = read.by(head);
        cost.bytes += (n_cell(r.far) + n_cell(r.near)) * key_size(a) + n_cell(r.all()) * value_size(a);
        cost.flops += r.n_pair * 2.0 * (a.head_dim_k + a.head_dim_v);
    }
    return cost;
}

lctx_cost lctx_vote_cost(const lctx_op_ubatch & u) {
    const lctx_op_args & a = u.layer.a;
    const lctx_retain & retain = *u.layer.method.retain();
    lctx_cost cost = {};
    reader read(u);
    for (int32_t head = 0; head < a.n_head_kv; head++) {
        const lctx_held held = read.held.of(head);
        double n_open = 0.0, n_seen = 0.0;
        for (const range & r : merged(read.by(head).all())) {
            n_seen += r.hi - r.lo;
            for (int32_t cell = r.lo; cell < r.hi; cell++) {
                n_open += !retain.one_vote_is_enough() || retain.is_open(held.rows()[cell], held.scores()[cell], retain.border(u.first));
            }
        }
        cost.bytes += n_open * key_size(a) + n_seen * 2.0 * sizeof(int32_t);
        cost.flops += n_open * 2.0 * a.head_dim_k * u.n * (a.n_head / a.n_head_kv);
    }
    return cost;
}

lctx_cost lctx_evict_cost(const lctx_op_ubatch & u, const std::vector<std::vector<int32_t>> & before) {
    const lctx_op_args & a = u.layer.a;
    double n_held = 0.0, n_moved = 0.0;
    lctx_held_copy copy(u.layer);
    for (int32_t head = 0; head < a.n_head_kv; head++) {
        const std::vector<int32_t> & rows = before[head];
        const lctx_held held = copy.of(head);
        const int32_t n_left = u.first + u.n - held.n_gone();
        const auto first = std::mismatch(held.rows(), held.rows() + n_left, rows.begin()).first;
        n_held += (double)rows.size();
        n_moved += (double)(held.rows() + n_left - first);
    }
    return {2.0 * n_moved * (key_size(a) + value_size(a)) + n_held * 2.0 * sizeof(int32_t), 0.0};
}
