// One product of a weight with columns.
#include "../cpu/multiply.h"
#include "run.h"

namespace {

void run(lctx_multiply_args & a) {
    const ggml_type type = (ggml_type)a.type;
    lctx_require(a.type >= 0 && a.type < GGML_TYPE_COUNT && ggml_is_quantized(type), "type is no quantized one");
    lctx_require(a.k_dim > 0 && a.n_rows > 0 && a.n_columns > 0 && a.n_threads > 0, "sizes must be positive");
    lctx_require(a.k_dim % ggml_blck_size(type) == 0, "k_dim is no multiple of the block");
    lctx_graph_run g(lctx_backend_of(nullptr, a.n_threads), 3);
    ggml_tensor * weight = g.tensor(type, a.k_dim, a.n_rows);
    ggml_tensor * x = g.tensor(GGML_TYPE_F32, a.k_dim, a.n_columns);
    ggml_tensor * out = ggml_mul_mat(g.ctx.get(), weight, x);
    g.allocate();
    lctx_fill(weight, a.weight);
    lctx_fill(x, a.x);
    lctx_poison({out});
    a.is_ours = lctx_cpu_multiply(out) != nullptr;
    const std::vector<double> us = g.times(g.graph_of({out}), std::max(1, a.n_repeat), [] {});
    a.us = *std::min_element(us.begin(), us.end());
    ggml_backend_tensor_get(out, a.out, 0, ggml_nbytes(out));
}

}  // namespace

int32_t lctx_multiply_run(lctx_multiply_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
