// *attend* of the tokens of a prompt whose heads read the same runs. A block of threads has tokens and heads of one KV
// head. Quantized rows are converted once, for all tiles that read the text.
#include "runs.h"

#include "dense.h"

namespace {

// The rows that most of a batch reads: of one sequence.
struct text {
    int32_t seq, row0, row1;
};

// Quantized rows of that text, of some KV heads, that were converted before.
struct halves {
    uint16_t *k = nullptr, *v = nullptr;  // [head][cell][channels]; nullptr: none
    text * of = nullptr;
    int32_t n_cell = 0, first_head = 0;

    __device__ uint16_t * row(uint16_t * rows, int head_kv, int32_t cell, int n_dim) const {
        return rows + ((size_t)(head_kv - first_head) * n_cell + cell) * n_dim;
    }
};

// What a column reads, and its query.
struct run_column {
    const lctx_segment * segs;
    const char * q;
};

// The columns of a tile whose heads read the same runs. Each of them may read more than one sequence.
template <int N> struct run_columns {
    static constexpr bool LISTED = false;
    static constexpr size_t MEMORY = N * sizeof(run_column);  // shared
    const lctx_attend_args & a;
    const halves & converted;
    const int head_kv;
    const lctx_cuda_tile tile;
    run_column * of = nullptr;

    __device__ run_columns(const lctx_attend_args & a, const halves & converted)
        : a(a),
          converted(converted),
          head_kv(converted.first_head + (int)blockIdx.y),
          tile(a, lctx_cuda_tiling(a, N), (int)blockIdx.x, head_kv) {}
    // Tell all threads of the block which they are.
    __device__ void write(char * memory) {
        of = (run_column *)memory;
        for (int c = (int)threadIdx.x; c < n_column(); c += THREADS) {
            of[c] = {lctx_cuda_lists{a}.of(tile.index(c), 0),
                     a.q + head(c) * a.q_head_stride + token(c) * a.q_token_stride};
        }
        __syncthreads();
    }
    LCTX_HD static int n_part(const lctx_attend_args & a) { return a.n_seg; }
    LCTX_HD static int n_group(const lctx_attend_args &) { return 0; }
    __device__ int n_column() const { return tile.n_column(); }
    __device__ int head(int column) const { return tile.head(column); }
    __device__ int token(int column) const { return tile.token(column); }
    __device__ const char * query(int column) const { return of[column].q; }
    __device__ lctx_segment segment(int column, int seg) const {
        return column < n_column() ? of[column].segs[seg] : lctx_segment{0, 0, 0, -1};
    }
    // The sequence after `seq`, INT_MAX: none. The lanes of a warp together.
    __device__ int next_sequence(int seq) const {
        int next = INT_MAX;
        for (int c = lctx_lane(); c < n_column(); c += LCTX_WARP) {
            for (int i = 0; i < a.n_seg; i++) {
                const lctx_segment s = segment(c, i);
                next = s.row0 < s.row1 && s.seq > seq ? lctx_min(next, s.seq) : next;
            }
        }
        return lctx_warp_min(next);
    }
    __device__ bool is_converted() const { return converted.k; }
    __device__ const char * converted_key(int cell) const {
        return (const char *)converted.row(converted.k, head_kv, cell, a.head_dim_k);
    }
    __device__ const char * converted_value(int cell) const {
        return (const char *)converted.row(converted.v, head_kv, cell, a.head_dim_v);
    }
};

// With converted rows, tiles that read nothing else are the ones that read halves; the others are left to bytes.
template <typename S> __global__ void __launch_bounds__(THREADS, 2)
    attend_runs(const lctx_attend_args a, const lctx_partial_states partial, const halves converted) {
    lctx_begin();
    if constexpr (S::HAS_CODE) {
        dense_reader<S, run_columns<S::COLUMNS>> r(a, {a, converted}, {(int)blockIdx.z, partial.n_split});
        r.columns.write(r.columns_memory());
        if (converted.of) {
            const int seq = converted.of->seq;
            const bool is_text = r.columns.next_sequence(-1) == seq && r.columns.next_sequence(seq) == INT_MAX;
            if (is_text != S::F16) {
                return;
            }
        }
        r.run();
        r.write(partial);
    }
}

// ---- quantized rows, converted once for all tiles ----

// One block of threads.
__global__ void find_text(const lctx_attend_args a, text * to) {
    lctx_begin();
    lctx_let_next_begin();
    const lctx_cuda_lists lists = {a};
    const int n_alone = a.choices().n_alone(), seq = lists.of(n_alone / 2, 0)->seq;
    int lo = INT_MAX, hi = 0;
    for (int i = (int)threadIdx.x; i < n_alone * a.n_seg; i += THREADS) {
        const lctx_segment s = lists.of(i / a.n_seg, 0)[i % a.n_seg];
        if (s.seq == seq && s.row0 < s.row1) {
            lo = lctx_min(lo, s.row0), hi = lctx_max(hi, s.row1);
        }
    }
    lo = lctx_warp_min(lo), hi = -lctx_warp_min(-hi);
    int * of_warps = (int *)lctx_shared();
    if (lctx_lane() == 0) {
        of_warps[2 * lctx_warp()] = lo, of_warps[2 * lctx_warp() + 1] = hi;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < WARPS; warp++) {
            lo = lctx_min(lo, of_warps[2 * warp]), hi = lctx_max(hi, of_warps[2 * warp + 1]);
        }
        *to = {seq, lo < hi ? lo : 0, lo < hi ? hi : 0};
    }
}

// Cells [lo, hi) of a head, whole blocks of elements by a thread each.
__device__ void convert(const lctx_pool_args & pool, const lctx_table_args & table, int head_kv, int seq, int lo,
                        int hi, int n_dim, uint16_t * to) {
    lctx_cuda_with_rows(pool.type, [&](auto of_type) {
        using T = decltype(of_type);
        const int n_block = n_dim / T::BLOCK;
        for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < (int64_t)(hi - lo) * n_block;
             i += (int64_t)gridDim.x * THREADS) {
            const int cell = lo + (int)(i / n_block), block = (int)(i % n_block);
            const char * from = lctx_pool_at(pool, lctx_pool_row(table, cell, head_kv, seq)) + block * T::SIZE;
            uint16_t * row = to + (size_t)cell * n_dim + block * T::BLOCK;
            if constexpr (T::BLOCK == 32) {
                T::each_halves(from, [&](int first, const uint4 & x) { *(uint4 *)(row + first) = x; });
            } else {
                *(uint4 *)row = T::halves(from, 0);
            }
        }
    });
}

// Blocks of threads: some for each of the heads.
__global__ void convert_text(const lctx_attend_args a, const halves converted) {
    lctx_begin();
    const text of = *converted.of;
    const int head_kv = converted.first_head + (int)blockIdx.y;
    const lctx_cells cells(a.cache, head_kv, of.seq);
    const int lo = cells.cell(of.row0), hi = cells.cell(of.row1);
    convert(a.cache.k_pool, a.cache.table, head_kv, of.seq, lo, hi, a.head_dim_k,
            converted.row(converted.k, head_kv, 0, a.head_dim_k));
    convert(a.cache.v_pool, a.cache.table, head_kv, of.seq, lo, hi, a.head_dim_v,
            converted.row(converted.v, head_kv, 0, a.head_dim_v));
}

// How runs are read, by shapes only: in how many parts, and of how many KV heads rows are converted at a time.
struct run_plan {
    int n_tile, n_split;
    int n_converted;  // heads; 0: none
    int32_t n_cell;   // of a head, at most

    run_plan(const lctx_cuda_device & device, const lctx_attend_args & a) {
        with_shape(a, [&](auto s) { n_tile = lctx_cuda_tiling(a, decltype(s)::COLUMNS).n_tile(); });
        n_cell = (int32_t)(a.cache.table.head_stride << a.cache.table.shift);
        const size_t of_head = (size_t)n_cell * (a.head_dim_k + a.head_dim_v) * sizeof(uint16_t);
        n_converted = pays(a) ? (int)lctx_min<size_t>(device.most_scratch / of_head, a.n_head_kv) : 0;
        n_split = lctx_cuda_splits(device, a, n_tile * (n_converted > 0 ? n_converted : a.n_head_kv), 2);
    }
    // Where several tiles would unpack what is the same. Not for near keys, and values that are channels of keys.
    bool pays(const lctx_attend_args & a) const {
        constexpr int LEAST_TILES = 4;
        const auto in_few_bits = [](ggml_type type) { return ggml_is_quantized(type) || type == GGML_TYPE_F16; };
        const ggml_type k = a.cache.k_pool.type, v = a.cache.v_pool.type;
        return n_tile >= LEAST_TILES && in_few_bits(k) && in_few_bits(v) && (k != v || k != GGML_TYPE_F16) &&
               a.params.near_mask == 0 && !lctx_values_in_keys(a.cache);
    }
    size_t states_size(const lctx_attend_args & a) const {
        return lctx_div_up(lctx_partial_states::size(a, n_split), ALIGN) * ALIGN;
    }
    size_t rows_size(int n_dim) const { return (size_t)n_converted * n_cell * n_dim * sizeof(uint16_t); }
    size_t size(const lctx_attend_args & a) const {
        const size_t of_rows = rows_size(a.head_dim_k) + rows_size(a.head_dim_v);
        return states_size(a) + (n_converted > 0 ? ALIGN + of_rows : 0);
    }
    halves converted(const lctx_attend_args & a, char * work) const {
        char * k = work + states_size(a) + ALIGN;
        return {(uint16_t *)k, (uint16_t *)(k + rows_size(a.head_dim_k)), (text *)(k - ALIGN), n_cell, 0};
    }

    static constexpr size_t ALIGN = 256;
};

template <typename S> void launch_runs(const lctx_cuda_queue & queue, const lctx_attend_args & args,
                                       const run_plan & plan, const halves & converted, int n_head) {
    const lctx_partial_states partial = {plan.n_split, (float *)queue.work};
    const dim3 grid(plan.n_tile, n_head, plan.n_split);
    with_stages<S, run_columns>(queue.device, args, [&](auto s) {
        using STAGED = decltype(s);
        const size_t size = n_shared<STAGED, run_columns<S::COLUMNS>>(args);
        lctx_launch(attend_runs<STAGED>, grid, THREADS, size, queue.stream, args, partial, converted);
    });
}

template <int DIM> void launch_converted(const lctx_cuda_queue & queue, const lctx_attend_args & args,
                                         const run_plan & plan, halves converted) {
    constexpr int BLOCKS = 8;  // of a multiprocessor
    lctx_launch(find_text, dim3(1), THREADS, 2 * WARPS * sizeof(int), queue.stream, args, converted.of);
    for (int first = 0; first < args.n_head_kv; first += plan.n_converted) {
        converted.first_head = first;
        const int n_head = lctx_min(plan.n_converted, args.n_head_kv - first);
        const dim3 grid(BLOCKS * queue.device.n_multiprocessor / n_head + 1, n_head);
        lctx_launch(convert_text, grid, THREADS, 0, queue.stream, args, converted);
        launch_runs<shape<DIM, true>>(queue, args, plan, converted, n_head);
    }
}

}  // namespace

// Not where a head has evicted rows and near keys, which stand in a ring one by one. Nor for few tokens: these may be
// one of each sequence, which read different rows, and attend.cu has more rows on their way.
bool lctx_cuda_reads_runs(const lctx_cuda_device & device, const lctx_attend_args & args) {
    constexpr int LEAST_TOKENS = 17;
    const bool in_groups = !args.cache.held.data || args.params.near_mask == 0;
    return args.params.chunk_size == 0 && in_groups && args.choices().n_alone() >= LEAST_TOKENS &&
           shared_size<run_columns>(args) <= device.max_shared;
}

size_t lctx_cuda_runs_wsize(const lctx_cuda_device & device, const lctx_attend_args & args) {
    return run_plan(device, args).size(args);
}

void lctx_cuda_attend_runs(const lctx_cuda_queue & queue, const lctx_attend_args & args) {
    const run_plan plan(queue.device, args);
    halves rest;
    if (plan.n_converted > 0) {
        const halves converted = plan.converted(args, queue.work);
        rest.of = converted.of;
        lctx_cuda_with_width(lctx_max(args.head_dim_k, args.head_dim_v),
                             [&](auto width) { launch_converted<decltype(width)::DIM>(queue, args, plan, converted); });
    }
    with_shape(args, [&](auto s) { launch_runs<decltype(s)>(queue, args, plan, rest, args.n_head_kv); });
    lctx_cuda_finish_attend(queue, args, {plan.n_split, (float *)queue.work});
}
