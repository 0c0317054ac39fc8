// One product of a weight, or of the weights of experts, with columns.
#include "../ops/fixed.h"
#include "../weights/multiply.h"
#include "run.h"

namespace {

void check(const lctx_multiply_args & a) {
    const ggml_type type = (ggml_type)a.type;
    lctx_require(a.type >= 0 && a.type < GGML_TYPE_COUNT && ggml_type_size(type) > 0, "type is none of ggml's");
    lctx_require(a.k_dim > 0 && a.n_rows > 0 && a.n_columns > 0 && a.n_threads > 0, "sizes must be positive");
    lctx_require(a.k_dim % ggml_blck_size(type) == 0, "k_dim is not a multiple of the block");
    if (a.n_expert > 0) {
        lctx_require(a.n_used > 0 && (a.n_own == 1 || a.n_own == a.n_used), "n_own must be 1 or n_used");
        const auto exists = [&](int32_t id) { return id >= 0 && id < a.n_expert; };
        lctx_require(std::all_of(a.ids, a.ids + (size_t)a.n_columns * a.n_used, exists),
                     "ids must be those of experts");
    }
}

void run(lctx_multiply_args & a) {
    check(a);
    lctx_graph_run g(lctx_backend_of(nullptr, a.n_threads), 4);
    const int64_t n_own = std::max(1, a.n_own);
    ggml_tensor * weight = g.tensor((ggml_type)a.type, a.k_dim, a.n_rows, std::max(1, a.n_expert));
    ggml_tensor *x = nullptr, *ids = nullptr, *out = nullptr;
    if (a.n_expert > 0) {
        x = g.tensor(GGML_TYPE_F32, a.k_dim, n_own, a.n_columns);
        ids = g.tensor(GGML_TYPE_I32, a.n_used, a.n_columns);
        out = ggml_mul_mat_id(g.ctx.get(), weight, x, ids);
    } else {
        x = g.tensor(GGML_TYPE_F32, a.k_dim, a.n_columns);
        out = ggml_mul_mat(g.ctx.get(), weight, x);
    }
    g.allocate();
    const lctx_graph graph = g.graph_of({out});
    if (a.fixed) {
        lctx_fix_products(graph.graph);
    }
    lctx_fill(weight, a.weight);
    lctx_fill(x, a.x);
    if (ids) {
        lctx_fill(ids, a.ids);
    }
    lctx_poison({out});
    a.is_ours = lctx_cpu_multiply(out) || lctx_cpu_dots(out);
    const std::vector<double> us = g.times(graph, std::max(1, a.n_repeat), [] {});
    a.us = *std::min_element(us.begin(), us.end());
    ggml_backend_tensor_get(out, a.out, 0, ggml_nbytes(out));
}

}  // namespace

int32_t lctx_multiply_run(lctx_multiply_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
