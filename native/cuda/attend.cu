// *attend* on the tensor cores of what decode.cu, lists.cu and runs.cu leave: few tokens, chunks of each token, and
// near keys of heads that evict. A block of threads is a tile of columns of one KV head, and a split of what it reads.
// Rows become f16 in shared memory; the next rows are on their way while these are read.
// Partial states are merged by a second kernel.
#include "blocks.h"
#include "decode.h"
#include "expand.h"
#include "hadamard.h"
#include "lists.h"
#include "runs.h"

namespace {

// Those of a warp; wide ones leave no registers for them.
template <typename S> using queries = lctx_cuda_queries<S::WARP_DIM, S::WARP_DIM <= 144, lctx_cuda_padded<S::STRIDE>>;
template <typename S> using flash = lctx_cuda_flash<S::WARP_DIM, S::WARP_ROWS, lctx_cuda_padded<S::STRIDE>>;

// The queries of a tile, turned to the positions from which they look at an item; scores are base 2 without softcap.
// Columns that read nothing of it keep what they had: their scores are not used.
template <typename S> __device__ void load_queries(const lctx_attend_args & a, const lctx_cuda_tile & t,
                                                   const typename S::memory & m, int buffer, uint16_t * to) {
    const float scale = a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale * LCTX_LOG2_E;
    const auto reads = [&](int c) { return m.lo[buffer][c] < m.hi[buffer][c]; };
    const int32_t * angle = m.angle[buffer];
    if (a.params.hadamard.k != 0) {
        for (int c = lctx_warp(); c < t.n_column(); c += S::THREADS / LCTX_WARP) {
            if (reads(c)) {
                lctx_put_query<S::DIM>(a, t.token(c), t.head(c), angle[c], scale, to + c * S::STRIDE);
            }
        }
        return;
    }
    for (int i = (int)threadIdx.x; i < t.n_column() * S::DIM / 2; i += S::THREADS) {
        const int c = i / (S::DIM / 2), d = i % (S::DIM / 2) * 2;
        if (!reads(c)) {
            continue;
        }
        float x[2] = {};
        if (d < a.head_dim_k) {
            const float * q = (const float *)(a.q + t.head(c) * a.q_head_stride + t.token(c) * a.q_token_stride);
            const float * cs = a.angles + (size_t)angle[c] * a.n_dims;
            x[0] = scale * lctx_rotated(q, d, cs, a.n_dims, a.params.rope_mode);
            x[1] = scale * lctx_rotated(q, d + 1, cs, a.n_dims, a.params.rope_mode);
        }
        *(uint32_t *)(to + c * S::STRIDE + d) = lctx_pack_limited(x[0], x[1]);
    }
}

// The states of the warps that share columns become one; thread by dimensions.
template <typename S> __device__ void merge_warps(const lctx_attend_args & a, const lctx_cuda_tile & t,
                                                  const lctx_partial_states & partial, int split, const flash<S> & f,
                                                  float * states) {
    float * mine = states + lctx_warp() * S::COLUMNS * S::STATE;
    f.each_result([&](int c, int d, float m, float l, float o0, float o1) {
        float * to = mine + c * S::STATE;
        to[2 + d] = o0, to[3 + d] = o1;
        if (d == 0) {
            to[0] = m, to[1] = l;
        }
    });
    __syncthreads();
    for (int i = (int)threadIdx.x; i < t.n_column() * S::DIM / 2; i += S::THREADS) {
        const int c = i / (S::DIM / 2), d = i % (S::DIM / 2) * 2;
        const float * of_column = states + c * S::STATE;
        const lctx_attend_state s = lctx_merge_states(of_column, S::ROW_WARPS, S::COLUMNS * S::STATE, d);
        partial.write(a, split, t.token(c), t.head(c), d, s);
    }
}

// Groups of 16 rows, from row `first` on, that any column of this warp reads: bit n of the n-th.
template <typename S>
__device__ uint32_t groups_read(const typename S::memory & m, int buffer, int column0, int row0, int first) {
    constexpr int N = S::WARP_ROWS / 16;
    const lctx_cuda_item & item = m.item[buffer];
    if (item.by_chunk) {
        uint32_t groups = 0;
        lctx_unrolled<N>(
            [&](int n) { groups |= m.piece[buffer][row0 / 16 + n].columns >> column0 & 0xffff ? 1u << n : 0; });
        return groups;
    }
    first += row0;
    if (first >= item.all_lo && first + S::WARP_ROWS <= item.all_hi) {
        return (1u << N) - 1;
    }
    const int c = column0 + lctx_lane() % 16, lo = m.lo[buffer][c], hi = m.hi[buffer][c];
    uint32_t groups = 0;
    lctx_unrolled<N>([&](int n) {
        const int begin = lctx_max(lo, first + 16 * n), end = lctx_min(hi, first + 16 * n + 16);
        groups |= lctx_ballot(begin < end) ? 1u << n : 0;
    });
    return groups;
}

// Scores of what a column does not read of the pieces: none.
template <typename S> __device__ void mask_pieces(const typename S::memory & m, int buffer, flash<S> & f) {
    lctx_unrolled<S::WARP_ROWS / 16>([&](int n) {
        const lctx_cuda_piece & piece = m.piece[buffer][S::row0() / 16 + n];
        const uint32_t columns = (uint32_t)(piece.columns >> (S::column0() + f.column(0)));  // bits 0 and 8
        int lo[2], hi[2];
        lctx_unrolled<2>([&](int i) { lo[i] = piece.lo, hi[i] = columns >> 8 * i & 1 ? piece.hi : 0; });
        f.each_score_of(n, [&](float & s, int i, int row) { s = row >= lo[i] && row < hi[i] ? s : -INFINITY; });
    });
}

// A block of rows: what no column of a warp reads, that warp leaves out. factor: of weights, by which values were
// divided.
template <typename S> __device__ void attend_block(const lctx_attend_args & a, const typename S::memory & m, int buffer,
                                                   int first, const queries<S> & q, const uint16_t * k,
                                                   const uint16_t * v, float factor, float * sums, flash<S> & f) {
    constexpr uint32_t ALL = (1u << S::WARP_ROWS / 16) - 1;
    const int column0 = S::column0(), row0 = S::row0(), at = row0 * S::STRIDE + S::dim0();
    const lctx_cuda_item & item = m.item[buffer];
    const uint32_t groups = groups_read<S>(m, buffer, column0, row0, first);
    if (groups == 0) {
        return;
    }
    if (groups == ALL) {
        f.scores(q, k + at);
    } else {
        f.scores(q, k + at, groups);
    }
    if constexpr (S::WIDE) {
        f.template add_warps<S::DIM_WARPS>(sums);  // all of them are here: they have the same columns and rows
    }
    if (a.params.softcap != 0.0f) {
        f.each_score([&](float & s, int, int) { s = LCTX_LOG2_E * a.params.softcap * lctx_tanh(s); });
    }
    if (item.by_chunk) {
        mask_pieces<S>(m, buffer, f);
    } else if (first < item.all_lo || first + S::ROWS > item.all_hi) {
        int lo[2], hi[2];
        lctx_unrolled<2>([&](int i) {
            const int c = column0 + f.column(i);
            lo[i] = m.lo[buffer][c] - first - row0, hi[i] = m.hi[buffer][c] - first - row0;
        });
        f.each_score([&](float & s, int i, int row) { s = row >= lo[i] && row < hi[i] ? s : -INFINITY; });
    }
    f.softmax();
    if (factor != 1.0f) {
        f.each_score([&](float & weight, int, int) { weight *= factor; });
    }
    f.weigh(v + at, groups);
}

// The end of the blocks of a run, from `block` on, that all columns read whole, without anything to mask or to scale;
// 0: this is none.
template <typename S> __device__ int whole_end(const lctx_attend_args & a, const lctx_cuda_item & item, int block) {
    const bool whole = !item.by_chunk && !item.near && block * S::ROWS >= item.all_lo && a.head_dim_k == S::DIM &&
                       a.head_dim_v == S::DIM;
    const bool halves = a.cache.v_pool.type != GGML_TYPE_F32 && a.cache.v_pool.type != GGML_TYPE_BF16;
    return whole && halves && a.params.softcap == 0.0f ? item.all_hi / S::ROWS : 0;
}

// The blocks after `now` as long as the two that come after each are of the same kind: what most of a long text is,
// without questions. `now` is on its way, and for st.ahead == 2 the one after it. Returns how many were read.
template <typename S, bool F16>
__device__ __forceinline__ int attend_whole(const lctx_attend_reader<S, F16> & r, const lctx_cuda_item & item,
                                            int block, int step, int i, const queries<S> & q, flash<S> & f) {
    const lctx_attend_args & a = r.a;
    const int n = (whole_end<S>(a, item, block) - 1 - block) / step - 1;  // block + (n + 1) step is the last
    const auto page_of = [&](int b) { return lctx_page_of(a.cache.table, b * S::ROWS, r.t.head_kv, item.seq); };
    const int ahead = block + r.st.ahead * step, at = S::row0() * S::STRIDE + S::dim0();
    int32_t page = n > 0 ? page_of(ahead) : 0;
    for (int k = 0; k < n; k++) {
        const size_t row = lctx_row_in(a.cache.table, page, (ahead + k * step) * S::ROWS);
        page = page_of(ahead + lctx_min(k + 1, n - 1) * step);  // asked for before it is needed
        r.st.wait();
        __syncthreads();
        if constexpr (!F16) {
            r.unpack_whole(i + k);
            __syncthreads();
        }
        r.fetch_whole(row, i + k + r.st.ahead);
        f.scores(q, r.k_tile(i + k) + at);
        f.softmax();
        f.weigh(r.v_tile(i + k) + at);
    }
    return lctx_max(n, 0);
}

template <typename S, bool F16> __global__ void __launch_bounds__(S::THREADS, 2)
    attend(const lctx_attend_args a, const lctx_attend_stages st, const lctx_partial_states partial,
           const lctx_cuda_plan plan, int first) {
    lctx_begin();
    const int side = (int)blockIdx.x, head_kv = (int)blockIdx.y;
    const lctx_cuda_tile t(a, lctx_cuda_tiling(a, S::COLUMNS), first + side, head_kv);
    char * shared = lctx_shared();
    const lctx_attend_reader<S, F16> r = {a, t, shared, st};
    uint16_t * q = (uint16_t *)r.end();
    float * sums = (float *)((char *)q + S::QUERIES);
    auto & m = *(typename S::memory *)((char *)sums + S::SUMS);

    for (int c = (int)threadIdx.x; c < S::COLUMNS; c += S::THREADS) {
        m.turned[c] = -1;  // no angle
    }
    if (threadIdx.x < 2) {
        m.most[threadIdx.x] = 0;
    }
    __syncthreads();
    flash<S> f;
    f.clear();
    queries<S> mine;
    lctx_attend_walker<S> walk = {a, t, m, {(int)blockIdx.z, partial.n_split}, nullptr, 0};
    if (plan.data) {
        walk.pieces = plan.pieces(side, head_kv), walk.n_chunk_block = plan.count(side, head_kv) / S::PIECES;
    }
    const auto fetch = [&](lctx_attend_cursor p, int i) {
        if (p.valid) {
            r.fetch(m, p, i);
        }
        lctx_copy_end_group();  // one group for every number
    };
    lctx_attend_cursor now = walk.next({LCTX_CUDA_ITEMS - 1, 0, false, 0}), next = now;
    if (now.valid) {
        next = walk.next(now);
    }
    for (int i = 0; i < lctx_max(st.ahead, 1); i++) {
        lctx_attend_cursor to = now;
        if (i > 0) {
            to = next;
        }
        fetch(to, i);
    }
    for (int i = 0, loaded = -1; now.valid; i++) {
        if constexpr (S::DIM <= 128) {  // wider ones have no registers for it
            if (now.buffer == loaded && st.ahead > 0) {
                const int n = attend_whole<S, F16>(r, m.item[now.buffer], now.block, partial.n_split, i, mine, f);
                if (n > 0) {
                    i += n;
                    now = walk.at(now.buffer, now.block + n * partial.n_split);
                    next = walk.at(now.buffer, now.block + partial.n_split);
                }
            }
        }
        const lctx_attend_cursor after =
            next.valid ? walk.next(next) : next;  // looked up while blocks are on their way
        st.wait();
        __syncthreads();  // the block is here, and no thread still reads the one before
        const bool turns = now.buffer != loaded && m.item[now.buffer].turns;
        loaded = now.buffer;
        if (turns) {
            load_queries<S>(a, t, m, now.buffer, q);
        }
        float factor = 1.0f;
        if constexpr (!F16) {
            factor = r.unpack(now, i, m);
        } else if (turns) {
            __syncthreads();
        }
        if (turns) {
            mine.take(q + S::column0() * S::STRIDE + S::dim0());
        }
        if (st.ahead > 0) {
            lctx_attend_cursor to = next;
            if (st.ahead == 2) {
                to = after;
            }
            fetch(to, i + st.ahead);
        }
        attend_block<S>(a, m, now.buffer, now.block * S::ROWS, mine, r.k_tile(i), r.v_tile(i), factor, sums, f);
        if (st.ahead == 0) {
            __syncthreads();
            fetch(next, i + 1);
        }
        now = next, next = after;
    }
    f.finish();
    if constexpr (S::ROW_WARPS > 1) {
        __syncthreads();
        merge_warps<S>(a, t, partial, (int)blockIdx.z, f, (float *)shared);
    } else {
        const int column0 = S::column0(), dim0 = S::dim0();
        f.each_result([&](int c, int d, float m, float l, float o0, float o1) {
            if (column0 + c < t.n_column()) {
                partial.write(a, (int)blockIdx.z, t.token(column0 + c), t.head(column0 + c), dim0 + d, {m, l, o0, o1});
            }
        });
    }
}

// The states of all splits become the result, by a block of threads: what states are weighed with is computed by a
// thread for each, so that no thread waits for one after the other. factors: [n_split] in shared memory.
__device__ void merge_splits(const lctx_attend_args & a, const lctx_partial_states & partial, int token, int head,
                             float * factors) {
    const float * states = partial.of(a, 0, token, head);
    const size_t stride = lctx_partial_states::n_float(a);
    float m = -INFINITY, l = 0.0f;
    for (int i = lctx_lane(); i < partial.n_split; i += LCTX_WARP) {
        m = fmaxf(m, states[i * stride]);
    }
    m = lctx_warp_max(m);
    for (int i = lctx_lane(); i < partial.n_split; i += LCTX_WARP) {
        const float * s = states + i * stride;
        const float factor = s[1] != 0.0f ? lctx_exp2(s[0] - m) : 0.0f;
        l += s[1] * factor;
        if (lctx_warp() == 0) {
            factors[i] = factor;
        }
    }
    l = lctx_warp_sum(l);
    __syncthreads();
    for (int d = 2 * (int)threadIdx.x; d < a.head_dim_v; d += 2 * (int)blockDim.x) {
        float o0 = 0.0f, o1 = 0.0f;
        for (int i = 0; i < partial.n_split; i++) {
            const float * o = states + i * stride + 2 + d;
            o0 += o[0] * factors[i], o1 += o[1] * factors[i];
        }
        lctx_partial_states{1, nullptr}.write(a, 0, token, head, d, {m, l, o0, o1});
    }
}

// A block of threads for a (token, head). of_lists: states of tokens that share a list of chunks.
__global__ void merge(const lctx_attend_args a, const lctx_partial_states alone, const lctx_partial_states of_lists) {
    lctx_begin();
    lctx_let_next_begin();
    const int token = (int)blockIdx.x / a.n_head, head = (int)blockIdx.x % a.n_head;
    const size_t at = (size_t)token * a.n_head + head;
    lctx_partial_states partial = alone;
    if (!a.choices().is_alone(token)) {
        partial = of_lists;
    }
    if (partial.n_split > 1) {
        merge_splits(a, partial, token, head, (float *)lctx_shared());
    }
    __syncthreads();
    if (a.params.hadamard.v != 0 && lctx_warp() == 0) {
        lctx_transform_row(a.dst + at * a.head_dim_v, a.head_dim_v, a.params.hadamard.v);
    }
}

// The output of values that were transformed, where there is nothing to merge. One warp for a (token, head).
__global__ void transform_back(const lctx_attend_args a) {
    lctx_begin();
    lctx_let_next_begin();
    lctx_transform_row(a.dst + (size_t)blockIdx.x * a.head_dim_v, a.head_dim_v, a.params.hadamard.v);
}

// Parts of a tile.
template <typename S> int n_split(const lctx_cuda_device & device, const lctx_attend_args & a) {
    return lctx_cuda_splits(device, a, lctx_cuda_tiling(a, S::COLUMNS).n_tile() * a.n_head_kv, 2);
}

// Tiles of a KV head at a time: their plans are in the work buffer together.
template <typename S> int n_side(const lctx_cuda_device & device, const lctx_attend_args & a) {
    const int n_tile = lctx_cuda_tiling(a, S::COLUMNS).n_tile();
    return lctx_cuda_plan::has_chunks(a) ? lctx_min(n_tile, (int)lctx_div_up(2 * device.n_multiprocessor, a.n_head_kv))
                                         : n_tile;
}

// Bytes of the partial states, after which the plans stand.
template <typename S> size_t partial_size(const lctx_cuda_device & device, const lctx_attend_args & a) {
    const int most = lctx_max(n_split<S>(device, a), lctx_cuda_list_splits(device, a));
    return lctx_div_up(lctx_partial_states::size(a, most), 256) * 256;
}

template <typename S> lctx_cuda_plan plan_of(const lctx_cuda_device & device, const lctx_attend_args & a, char * work) {
    return {a, S::COLUMNS, S::PIECES, n_side<S>(device, a), work + partial_size<S>(device, a)};
}

template <typename S, bool F16> void launch(const lctx_cuda_queue & queue, const lctx_attend_args & a) {
    const lctx_attend_stages st = lctx_attend_stages::of<S, F16>(queue.device, a);
    const lctx_partial_states partial = {n_split<S>(queue.device, a), (float *)queue.work};
    lctx_cuda_plan plan = plan_of<S>(queue.device, a, queue.work);
    const int n_tile = lctx_cuda_tiling(a, S::COLUMNS).n_tile();
    for (int first = 0; first < n_tile; first += plan.n_tile) {
        plan.n_tile = lctx_min(plan.n_tile, n_tile - first);
        if (plan.data) {
            lctx_cuda_make_plans(queue, a, plan, S::COLUMNS, first);
        }
        const dim3 grid(plan.n_tile, a.n_head_kv, partial.n_split);
        lctx_launch(attend<S, F16>, grid, S::THREADS, st.template n_shared<S>(), queue.stream, a, st, partial, plan,
                    first);
    }
    lctx_cuda_finish_attend(queue, a, partial);
}

// f(shape) with the shape of these arguments.
template <typename F> void with_shape(const lctx_attend_args & a, F && f) {
    lctx_cuda_with_width(lctx_max(a.head_dim_k, a.head_dim_v), [&](auto width) {
        constexpr int DIM = decltype(width)::DIM;
        return DIM <= 256 && !lctx_cuda_tiling::is_few(a) ? f(lctx_attend_shape<DIM, (DIM > 256)>())
                                                          : f(lctx_attend_shape<DIM, true>());
    });
}

}  // namespace

void lctx_cuda_finish_attend(const lctx_cuda_queue & queue, const lctx_attend_args & a,
                             const lctx_partial_states & partial) {
    const dim3 grid(a.n_tokens * a.n_head);
    const lctx_partial_states of_lists = {lctx_cuda_list_splits(queue.device, a), partial.data};
    if (lctx_max(partial.n_split, of_lists.n_split) > 1) {
        const size_t n_shared = lctx_max(partial.n_split, of_lists.n_split) * sizeof(float);
        lctx_launch(merge, grid, 2 * LCTX_WARP, n_shared, queue.stream, a, partial, of_lists);
    } else if (a.params.hadamard.v != 0) {
        lctx_launch(transform_back, grid, LCTX_WARP, 0, queue.stream, a);
    }
}

size_t lctx_cuda_attend_wsize(const lctx_cuda_device & device, const lctx_attend_args & args) {
    const size_t expanded = lctx_expanded_size(args);
    if (expanded > 0 && !lctx_cuda_reads_lists(device, args)) {
        return expanded + lctx_cuda_attend_wsize(device, lctx_expanded_args(args, nullptr));
    }
    if (args.choices().n_alone() == 0) {
        return lctx_partial_states::size(args, lctx_cuda_list_splits(device, args));
    }
    if (lctx_cuda_decodes(args)) {
        return lctx_cuda_decode_wsize(device, args);
    }
    if (lctx_cuda_reads_runs(device, args)) {
        return lctx_cuda_runs_wsize(device, args);
    }
    size_t size = 0;
    with_shape(args, [&](auto s) {
        using S = decltype(s);
        size = partial_size<S>(device, args) + plan_of<S>(device, args, nullptr).size(args);
    });
    return size;
}

void lctx_cuda_attend(const lctx_cuda_queue & queue, const lctx_attend_args & args) {
    if (args.params.tiles.n_tile > 0) {
        if (!lctx_cuda_reads_lists(queue.device, args)) {
            return lctx_cuda_run_expanded(queue, args, lctx_cuda_attend);
        }
        lctx_cuda_attend_lists(queue, args);
    }
    if (args.choices().n_alone() == 0) {
        return lctx_cuda_finish_attend(queue, args, {1, (float *)queue.work});
    }
    if (lctx_cuda_decodes(args)) {
        return lctx_cuda_decode(queue, args);
    }
    if (lctx_cuda_reads_runs(queue.device, args)) {
        return lctx_cuda_attend_runs(queue, args);
    }
    const bool f16 = args.cache.k_pool.type == GGML_TYPE_F16 && args.cache.v_pool.type == GGML_TYPE_F16;
    with_shape(args, [&](auto s) {
        using S = decltype(s);
        return f16 ? launch<S, true>(queue, args) : launch<S, false>(queue, args);
    });
}
