// *index* of rows that are stored: their keys once more, in few bits a channel. A warp takes a row and KV head.
#include "index.h"
#include "kernels.h"

namespace {

constexpr int WARPS = 4;

template <int BITS> __global__ void index_rows(lctx_index_args a) {
    lctx_begin();
    lctx_let_next_begin();
    const int64_t job = (int64_t)blockIdx.x * WARPS + lctx_warp();
    if (job >= (int64_t)a.n_rows * a.n_head_kv) {
        return;
    }
    const lctx_row at = a.rows[job / a.n_head_kv];
    const auto head = (int)(job % a.n_head_kv);
    const lctx_cells cells(a.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (!cells.all() && cells.row(cell) != at.row) {
        return;  // it has left
    }
    float * key = (float *)lctx_shared() + lctx_warp() * a.index.head_dim;
    index_key<BITS>(a.cache, a.index, a.hadamard_k, cell, head, at.seq, key);
}

template <int BITS> void launch(const lctx_cuda_queue & queue, const lctx_index_args & args) {
    const dim3 grid((unsigned)lctx_div_up((int64_t)args.n_rows * args.n_head_kv, WARPS));
    const size_t n_shared = WARPS * args.index.head_dim * sizeof(float);
    lctx_launch(index_rows<BITS>, grid, WARPS * LCTX_WARP, n_shared, queue.stream, args);
}

}  // namespace

void lctx_cuda_index(const lctx_cuda_queue & queue, const lctx_index_args & args) {
    args.index.bits == 1 ? launch<1>(queue, args) : launch<2>(queue, args);
}
