// *store*: write rows of K and V of the tokens of a batch, and with them those of the index.
#include "new-rows.h"

namespace {

constexpr int WARPS = 4;

// A warp per token, KV head and what is stored.
template <int BITS> __global__ void store(lctx_new_rows r) {
    lctx_begin();
    lctx_let_next_begin();
    const int64_t job = (int64_t)blockIdx.x * WARPS + lctx_warp();
    const int n_head = r.store.n_head_kv;
    if (job < (int64_t)r.store.n_tokens * n_head) {
        float * channels = (float *)lctx_shared() + lctx_warp() * r.n_channel();
        put_new<BITS>(r, (int)blockIdx.y, (int)(job / n_head), (int)(job % n_head), channels);
    }
}

template <int BITS> void launch(const lctx_cuda_queue & queue, const lctx_new_rows & rows) {
    const int64_t n = (int64_t)rows.store.n_tokens * rows.store.n_head_kv;
    const dim3 grid((unsigned)lctx_div_up(n, WARPS), (unsigned)rows.n_stored());
    const size_t n_shared = WARPS * rows.n_channel() * sizeof(float);
    lctx_launch(store<BITS>, grid, WARPS * LCTX_WARP, n_shared, queue.stream, rows);
}

}  // namespace

void lctx_cuda_store(const lctx_cuda_queue & queue, const lctx_new_rows & rows) {
    const int bits = rows.index.bits;
    bits == 0 ? launch<0>(queue, rows) : bits == 1 ? launch<1>(queue, rows) : launch<2>(queue, rows);
}
