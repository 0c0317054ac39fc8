// One op on rows of floats.
#include "../weights/rowwise.h"
#include "run.h"

namespace {

void run(lctx_rowwise_args & a) {
    lctx_require(a.n > 0 && a.n_rows > 0 && a.n_threads > 0, "sizes must be positive");
    lctx_graph_run g(lctx_backend_of(nullptr, a.n_threads), 3);
    ggml_tensor * rows = g.tensor(GGML_TYPE_F32, a.n, a.n_rows);
    ggml_tensor * others = g.tensor(GGML_TYPE_F32, a.is_gate ? a.n : 1, a.n_rows);
    ggml_tensor * out =
        a.is_gate ? ggml_swiglu_oai(g.ctx.get(), rows, others, a.alpha, a.limit) : ggml_mul(g.ctx.get(), rows, others);
    g.allocate();
    lctx_fill(rows, a.a);
    lctx_fill(others, a.b);
    lctx_poison({out});
    a.is_ours = lctx_cpu_rowwise(out) != nullptr;
    g.compute({out});
    ggml_backend_tensor_get(out, a.out, 0, ggml_nbytes(out));
}

}  // namespace

int32_t lctx_rowwise_run(lctx_rowwise_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
