// *summarize*: what a query compares itself with to find a chunk, of keys as they are stored; computed when the chunk's
// last row is stored.
#include "channels.h"
#include "kernels.h"

namespace {

constexpr int THREADS = 256;
constexpr int SHARE = 16;  // tokens that a block looks through for those which complete a chunk

// The tokens of [from, end), at most 32, that complete a chunk, as bits; all lanes of a warp come here.
__device__ uint32_t completing(const lctx_summarize_args & a, int32_t from, int32_t end) {
    const int32_t t = from + lctx_lane();
    return lctx_ballot(t < lctx_min(end, a.n_tokens) && (a.rows[t].row + 1) % a.params.chunk_size == 0);
}

// A block per SHARE tokens and KV head.
__global__ void __launch_bounds__(THREADS, 2) summarize(lctx_summarize_args a) {
    lctx_begin();
    lctx_let_next_begin();
    const int32_t from = (int)blockIdx.x * SHARE;
    for (uint32_t rest = completing(a, from, from + SHARE); rest; rest &= rest - 1) {
        const lctx_completed c(a, from + __ffs((int)rest) - 1, (int)blockIdx.y);
        const lctx_channels channels(a, c);
        channels.compute();
        channels.put();
    }
}

}  // namespace

void lctx_cuda_summarize(const lctx_cuda_queue & queue, const lctx_summarize_args & args) {
    const dim3 grid((unsigned)lctx_div_up(args.n_tokens, SHARE), args.n_head_kv);
    lctx_launch(summarize, grid, THREADS, lctx_channels::shared(args, THREADS), queue.stream, args);
}
