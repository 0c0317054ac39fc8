#include "attend-cost.h"

#include "../ops/nodes.h"

namespace {

// Cells [lo, hi).
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

// Holds what the queries of one KV head read, and how many (query, row) pairs that is.
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
    std::vector<int32_t> choices;

    explicit reader(const lctx_op_ubatch & u) : u(u), held(u.layer), choices(ggml_nelements(u.segs())) {
        ggml_backend_tensor_get(u.segs(), choices.data(), 0, ggml_nbytes(u.segs()));
    }
    range cells_of(int32_t head_kv, const lctx_segment & s) {
        return held.all() ? range{s.row0, s.row1} : range{held.of(head_kv).cell(s.row0), held.of(head_kv).cell(s.row1)};
    }
    reading by(int32_t head_kv);
};

reading reader::by(int32_t head_kv) {
    const lctx_op_layer & l = u.layer;
    const auto params = lctx_params_of<lctx_attend_params>(u.node(LCTX_OP_ATTEND));
    const int64_t n_choice = params.chunk_size > 0 ? u.segs()->ne[2] : 1;
    const lctx_choices read = {choices.data(),           u.n,           (int32_t)n_choice,
                               (int32_t)u.segs()->ne[1], l.a.n_head_kv, params.tiles};
    const int64_t n_seg = read.n_expanded(params.n_run);
    const int32_t n_rep = l.a.n_head / l.a.n_head_kv;
    reading r;
    for (int64_t i = 0; i < (int64_t)u.n * n_rep; i++) {
        const int64_t head = (int64_t)head_kv * n_rep + i % n_rep, choice = head * n_choice / l.a.n_head;
        for (int64_t s = 0; s < n_seg; s++) {
            const range cells = cells_of(head_kv, lctx_expanded(read, params.n_run, params.chunk_size,
                                                                (int32_t)(i / n_rep), (int32_t)choice, (int32_t)s));
            const bool near = params.near_mask != 0 && (params.near_mask >> s & 1);
            (near ? r.near : r.far).push_back(cells);
            r.n_pair += cells.hi - cells.lo;
        }
    }
    return r;
}

}  // namespace

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
