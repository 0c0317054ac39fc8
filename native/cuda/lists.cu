// *attend* of tiles whose tokens share a list of chunks: a block of threads has one query head of a tile, so that its
// columns are tokens, and all of them read the rows of the list.
#include "lists.h"

#include "dense.h"

namespace {

LCTX_HD int n_group_most(const lctx_attend_args & a) {
    return a.params.tiles.n_shared * groups_of_chunk(a);
}

// The columns of a tile whose tokens share a list: a query head of N tokens.
template <int N> struct list_columns {
    static constexpr bool LISTED = true;
    static constexpr size_t MEMORY = 0;
    const lctx_attend_args & a;
    const lctx_choices choices;
    const int tile, head_, head_kv, token0;

    __device__ explicit list_columns(const lctx_attend_args & a)
        : a(a),
          choices(a.choices()),
          tile((int)blockIdx.y),
          head_((int)blockIdx.x % a.n_head),
          head_kv(head_ / (a.n_head / a.n_head_kv)),
          token0((int)blockIdx.x / a.n_head * N) {}
    LCTX_HD static int n_part(const lctx_attend_args & a) { return a.params.tiles.n_given; }
    LCTX_HD static int n_group(const lctx_attend_args & a) { return n_group_most(a); }
    __device__ constexpr int n_column() const { return N; }
    __device__ int head(int) const { return head_; }
    __device__ int token(int column) const { return choices.firsts()[tile] + token0 + column; }
    __device__ lctx_segment segment(int column, int seg) const { return choices.given(tile, token0 + column)[seg]; }
    __device__ const int32_t * list() const { return choices.list(tile, head_kv); }
    __device__ const char * query(int column) const {
        return a.q + head_ * a.q_head_stride + token(column) * a.q_token_stride;
    }
};

template <typename S> __global__ void __launch_bounds__(THREADS, 2)
    attend_lists(const lctx_attend_args a, const lctx_partial_states partial) {
    lctx_begin();
    if constexpr (S::HAS_CODE) {
        dense_reader<S, list_columns<S::COLUMNS>> r(a, list_columns<S::COLUMNS>(a), {(int)blockIdx.z, partial.n_split});
        r.run();
        r.write(partial);
    }
}

}  // namespace

// Not where a head has evicted rows: what is left of a chunk has any length and begins in any cell, so its rows are not
// groups. Nor where shared memory has no room: for the longest lists, and for rows of f32 on small GPUs.
bool lctx_cuda_reads_lists(const lctx_cuda_device & device, const lctx_attend_args & args) {
    return args.params.tiles.size == TILE && args.params.chunk_size % GROUP == 0 && !args.cache.held.data &&
           shared_size<list_columns>(args) <= device.max_shared;
}

int lctx_cuda_list_splits(const lctx_cuda_device & device, const lctx_attend_args & args) {
    if (args.params.tiles.n_tile == 0) {
        return 1;
    }
    int n_block = 0;
    with_shape(args, [&](auto s) { n_block = args.params.tiles.n_token() / decltype(s)::COLUMNS * args.n_head; });
    constexpr int LEAST = 8;  // groups of a part: less does not pay for a start and a merge
    return lctx_max(1, lctx_min(2 * device.n_multiprocessor / n_block, n_group_most(args) / LEAST));
}

void lctx_cuda_attend_lists(const lctx_cuda_queue & queue, const lctx_attend_args & args) {
    const lctx_partial_states partial = {lctx_cuda_list_splits(queue.device, args), (float *)queue.work};
    with_shape(args, [&](auto s) {
        using S = decltype(s);
        const dim3 grid(args.n_head * TILE / S::COLUMNS, args.params.tiles.n_tile, partial.n_split);
        with_stages<S, list_columns>(queue.device, args, [&](auto s) {
            using STAGED = decltype(s);
            const size_t size = n_shared<STAGED, list_columns<S::COLUMNS>>(args);
            lctx_launch(attend_lists<STAGED>, grid, THREADS, size, queue.stream, args, partial);
        });
    });
}
