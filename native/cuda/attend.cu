// *attend* on the tensor cores: a block of threads is a tile of 16 (decode) or more (prefill) columns of one KV head, and a part of what it
// reads. Rows become f16 in shared memory; the next rows are on their way while these are read. Parts are merged by a second kernel.
#include "flash.h"
#include "hadamard.h"
#include "kernels.h"
#include "tile.h"
#include "walk.h"

namespace {

// One warp has 16 columns. With few columns the warps share the rows of a block instead.
template <int DIM_, bool FEW> struct shape {
    static constexpr int DIM = DIM_;                   // of K and V, padded
    static constexpr int ROWS = DIM <= 128 ? 64 : 32;  // of a tile
    static constexpr int COLUMN_WARPS = FEW ? 1 : DIM <= 128 ? 4 : 2;
    static constexpr int ROW_WARPS = FEW ? ROWS / 16 : 1;
    static constexpr int COLUMNS = 16 * COLUMN_WARPS;
    static constexpr int WARP_ROWS = ROWS / ROW_WARPS;
    static constexpr int THREADS = LCTX_WARP * COLUMN_WARPS * ROW_WARPS;
    static constexpr int STRIDE = DIM + 8;
    static constexpr size_t TILE = (size_t)2 * ROWS * STRIDE * sizeof(uint16_t);  // K, then V
    static constexpr size_t QUERIES = (size_t)COLUMNS * STRIDE * sizeof(uint16_t);
    static constexpr size_t WALK = sizeof(lctx_cuda_walk_memory<COLUMNS>);
    // states of the warps that share columns, where the tile was
    static constexpr int STATE = DIM + 4;
    static constexpr size_t STATES = ROW_WARPS > 1 ? (size_t)ROW_WARPS * COLUMNS * STATE * sizeof(float) : 0;
    static_assert(STATES <= TILE && TILE % 16 == 0 && QUERIES % 16 == 0, "shared memory");
};

// Whether any device lets two blocks of threads have two tiles on their way.
template <typename S, bool F16> constexpr bool LOOKS_FAR = !F16 || 2 * (3 * S::TILE + S::QUERIES + S::WALK) <= ((size_t)227 << 10);

// How shared memory is used: tiles of f16 rows, or one tile and before it the bytes of the next rows.
struct stages {
    int ahead;  // blocks that are on their way while one is read: two where two blocks of threads have room for that, else one or none
    int n_tile;
    uint32_t n_raw;  // bytes of the rows of a block

    template <typename S, bool F16> static stages of(const lctx_cuda_device & device, const lctx_attend_args & a) {
        const uint32_t raw = S::ROWS * (uint32_t)(a.cache.k_pool.row_size + a.cache.v_pool.row_size);
        const auto with = [&](int ahead) { return F16 ? stages{ahead, ahead + 1, 0} : stages{ahead, 1, raw}; };
        const auto fits = [&](int ahead, size_t n_block) { return n_block * with(ahead).template n_shared<S>() <= device.max_shared; };
        return with(LOOKS_FAR<S, F16> && fits(2, 2) ? 2 : fits(1, 1) ? 1 : 0);
    }
    template <typename S> __host__ __device__ size_t n_shared() const { return n_tile * S::TILE + ahead * n_raw + S::QUERIES + S::WALK; }
};

struct parts {
    int n_split;
    float * data;  // [n_split][n_tokens * n_head][m, l, o of head_dim_v] with n_split > 1

    __host__ __device__ static size_t n_float(const lctx_attend_args & a) { return (size_t)a.n_tokens * a.n_head * (a.head_dim_v + 2); }
    __device__ float * of(const lctx_attend_args & a, int split, int token, int head) const {
        return data + split * n_float(a) + ((size_t)token * a.n_head + head) * (a.head_dim_v + 2);
    }
};

// Those of a warp; wide ones leave no registers for them.
template <typename S> using queries = lctx_cuda_queries<S::DIM, S::DIM <= 128>;

// The queries of a tile, turned to the positions from which they look at a span; scores are base 2 without softcap.
template <typename S>
__device__ void load_queries(const lctx_attend_args & a, const lctx_cuda_tile & t, const int32_t * angle, uint16_t * to) {
    const float scale = a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale * LCTX_LOG2_E;
    for (int c = lctx_warp(); a.params.hadamard.k != 0 && c < t.n_column(); c += S::THREADS / LCTX_WARP) {
        lctx_put_query<S::DIM>(a, t.token(c), t.head(c), angle[c], scale, to + c * S::STRIDE);
    }
    const int n_done = a.params.hadamard.k != 0 ? t.n_column() * S::DIM / 2 : 0;
    for (int i = n_done + (int)threadIdx.x; i < S::COLUMNS * S::DIM / 2; i += S::THREADS) {
        const int c = i / (S::DIM / 2), d = i % (S::DIM / 2) * 2;
        float x[2] = {};
        if (c < t.n_column() && d < a.head_dim_k) {
            const float * q = (const float *)(a.q + t.head(c) * a.q_head_stride + t.token(c) * a.q_token_stride);
            const float * cs = a.angles + (size_t)angle[c] * a.n_dims;
            x[0] = scale * lctx_rotated(q, d, cs, a.n_dims, a.params.rope_mode);
            x[1] = scale * lctx_rotated(q, d + 1, cs, a.n_dims, a.params.rope_mode);
        }
        *(uint32_t *)(to + c * S::STRIDE + d) = lctx_pack_limited(x[0], x[1]);
    }
}

template <typename S, bool F16> struct reader {
    const lctx_attend_args & a;
    const lctx_cuda_tile & t;
    char * shared;
    const stages & st;

    // Tile and bytes of the block number i.
    __device__ uint16_t * k_tile(int i) const { return (uint16_t *)(shared + i % st.n_tile * S::TILE); }
    __device__ uint16_t * v_tile(int i) const { return k_tile(i) + S::ROWS * S::STRIDE; }
    __device__ char * raw(int i) const { return shared + st.n_tile * S::TILE + i % st.ahead * st.n_raw; }
    __device__ char * end() const { return shared + st.n_tile * S::TILE + st.ahead * st.n_raw; }
    __device__ lctx_cuda_block block(const lctx_cuda_span & span, int index) const {
        const int first = index * S::ROWS;
        return {a.cache, t.head_kv, span.seq, first, lctx_max(span.lo - first, 0), lctx_min(span.hi - first, S::ROWS), span.near != 0};
    }
    // Begin to bring a block closer, as number i.
    __device__ void fetch(const lctx_cuda_block & b, int i) const {
        const size_t k_row = a.cache.k_pool.row_size, v_row = a.cache.v_pool.row_size;
        if constexpr (F16) {
            const char *k = b.is_gathered() ? nullptr : b.k(), *v = b.v();
            lctx_cuda_copy_rows<S::ROWS, S::DIM>(
                a.head_dim_k, b.lo, b.hi, [&](int row) { return k ? k + row * k_row : b.gathered_k(row); }, k_tile(i));
            lctx_cuda_copy_rows<S::ROWS, S::DIM>(a.head_dim_v, b.lo, b.hi, [&](int row) { return v + row * v_row; }, v_tile(i));
        } else if (st.ahead > 0 && !b.is_gathered()) {
            lctx_cuda_copy_bytes(raw(i), b.k(), S::ROWS * k_row);
            lctx_cuda_copy_bytes(raw(i) + S::ROWS * k_row, b.v(), S::ROWS * v_row);
        }
    }
    // What was fetched into the tile, once it is there for all threads.
    __device__ void unpack(const lctx_cuda_block & b, int i) const {
        const size_t k_row = a.cache.k_pool.row_size, v_row = a.cache.v_pool.row_size;
        const bool is_here = st.ahead > 0 && !b.is_gathered();
        const char * k = is_here ? raw(i) : b.is_gathered() ? nullptr : b.k();
        const char * v = is_here ? raw(i) + S::ROWS * k_row : b.v();
        lctx_cuda_unpack_rows<S::ROWS, S::DIM>(
            a.cache.k_pool.type, a.head_dim_k, b.lo, b.hi, [&](int i) { return k ? k + i * k_row : b.gathered_k(i); }, k_tile(0));
        lctx_cuda_unpack_rows<S::ROWS, S::DIM>(
            a.cache.v_pool.type, a.head_dim_v, b.lo, b.hi, [&](int i) { return v + i * v_row; }, v_tile(0));
    }
};

// Where the walk stands: a block of span `buffer` of those that are known.
struct place {
    int buffer, block;
    bool valid;
};

template <typename S> struct walker {
    const lctx_attend_args & a;
    const lctx_cuda_tile & t;
    lctx_cuda_walk_memory<S::COLUMNS> & m;
    lctx_cuda_share share;
    int phase = 0;
    int n_before = 0;  // blocks of the spans before this one

    __device__ static int first(const lctx_cuda_span & s) { return s.lo < s.hi ? s.lo / S::ROWS : 0; }
    __device__ static int end(const lctx_cuda_span & s) { return s.lo < s.hi ? (s.hi + S::ROWS - 1) / S::ROWS : 0; }
    // The block of this part after p; all threads call.
    __device__ place next(place p) {
        if (p.valid) {
            const lctx_cuda_span & s = m.span[p.buffer];
            const int block = share.next(p.block + 1, n_before + p.block + 1 - first(s));
            if (block < end(s)) {
                return {p.buffer, block, true};
            }
            n_before += end(s) - first(s);
        }
        const int to = (p.buffer + 1) % LCTX_CUDA_SPANS;  // the span of p is still read, and the one before it
        for (;;) {
            __syncthreads();  // nobody reads what is there
            lctx_cuda_next_span(a, t, phase, m, to);
            __syncthreads();
            const lctx_cuda_span & s = m.span[to];
            const int block = s.valid ? share.next(first(s), n_before) : 0;
            if (!s.valid || block < end(s)) {
                return {to, block, s.valid != 0};
            }
            n_before += end(s) - first(s);
        }
    }
};

// Two dimensions of a result: into the output, or a part that is merged later.
__device__ void write_result(const lctx_attend_args & a, const parts & part, int split, int token, int head, int d, float m, float l,
                             float o0, float o1) {
    if (d >= a.head_dim_v) {
        return;
    }
    const size_t at = (size_t)token * a.n_head + head;
    if (part.n_split > 1) {
        float * to = part.of(a, split, token, head);
        to[2 + d] = o0, to[3 + d] = o1;
        if (d == 0) {
            to[0] = m, to[1] = l;
        }
        return;
    }
    const float inverse = l != 0.0f ? 1.0f / l : 0.0f;
    a.dst[at * a.head_dim_v + d] = o0 * inverse, a.dst[at * a.head_dim_v + d + 1] = o1 * inverse;
    if (a.lse && d == 0) {
        a.lse[at] = l != 0.0f ? m * LCTX_LN_2 + logf(l) : -INFINITY;
    }
}

// The states of the warps that share columns become one; thread by dimensions.
template <typename S> __device__ void merge_warps(const lctx_attend_args & a, const lctx_cuda_tile & t, const parts & part, int split,
                                                  const lctx_cuda_flash<S::DIM, S::WARP_ROWS> & f, float * states) {
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
        float m = -INFINITY, l = 0.0f, o0 = 0.0f, o1 = 0.0f;
        for (int w = 0; w < S::ROW_WARPS; w++) {
            m = fmaxf(m, states[(w * S::COLUMNS + c) * S::STATE]);
        }
        for (int w = 0; w < S::ROW_WARPS; w++) {
            const float * s = states + (w * S::COLUMNS + c) * S::STATE;
            const float factor = s[1] != 0.0f ? lctx_exp2(s[0] - m) : 0.0f;
            l += s[1] * factor, o0 += s[2 + d] * factor, o1 += s[3 + d] * factor;
        }
        write_result(a, part, split, t.token(c), t.head(c), d, m, l, o0, o1);
    }
}

template <typename S> __device__ void attend_block(const lctx_attend_args & a, const lctx_cuda_walk_memory<S::COLUMNS> & m, int buffer,
                                                   int first, const queries<S> & q, const uint16_t * k, const uint16_t * v,
                                                   lctx_cuda_flash<S::DIM, S::WARP_ROWS> & f) {
    const int column0 = lctx_warp() % S::COLUMN_WARPS * 16, row0 = lctx_warp() / S::COLUMN_WARPS * S::WARP_ROWS;
    const lctx_cuda_span & span = m.span[buffer];
    f.scores(q, k + row0 * S::STRIDE);
    if (a.params.softcap != 0.0f) {
        f.each_score([&](float & s, int, int) { s = LCTX_LOG2_E * a.params.softcap * lctx_tanh(s); });
    }
    if (first < span.all_lo || first + S::ROWS > span.all_hi) {
        f.each_score([&](float & s, int c, int row) {
            const int x = first + row0 + row;
            s = x >= m.lo[buffer][column0 + c] && x < m.hi[buffer][column0 + c] ? s : -INFINITY;
        });
    }
    f.softmax();
    f.weigh(v + row0 * S::STRIDE);
}

template <typename S, bool F16> __global__ void __launch_bounds__(S::THREADS, 2)
    attend(const lctx_attend_args a, const stages st, const parts part) {
    const lctx_cuda_tiling tiling(a, S::COLUMNS);
    const lctx_cuda_tile t(a, tiling, (int)blockIdx.x, (int)blockIdx.y);
    char * shared = lctx_shared();
    const reader<S, F16> r = {a, t, shared, st};
    uint16_t * q = (uint16_t *)r.end();
    auto & m = *(lctx_cuda_walk_memory<S::COLUMNS> *)((char *)q + S::QUERIES);

    for (int c = (int)threadIdx.x; c < S::COLUMNS; c += S::THREADS) {
        m.cursor[c] = 0;
    }
    for (int stage = 0; stage < st.n_tile; stage++) {
        lctx_cuda_clear_padding<S::ROWS, S::DIM>(a.head_dim_k, r.k_tile(stage));
        lctx_cuda_clear_padding<S::ROWS, S::DIM>(a.head_dim_v, r.v_tile(stage));
    }
    __syncthreads();
    lctx_cuda_flash<S::DIM, S::WARP_ROWS> f;
    f.clear();
    queries<S> mine;
    walker<S> walk = {a, t, m, {(int)blockIdx.z, part.n_split}};
    const auto fetch = [&](place p, int i) {
        if (p.valid) {
            r.fetch(r.block(m.span[p.buffer], p.block), i);
        }
        lctx_copy_end_group();  // one group for every number
    };
    place now = walk.next({LCTX_CUDA_SPANS - 1, 0, false}), next = now;
    fetch(now, 0);
    if (LOOKS_FAR<S, F16> && now.valid) {
        next = walk.next(now);
    }
    if (st.ahead == 2) {
        fetch(next, 1);
    }
    for (int i = 0, loaded = -1; now.valid; i++) {
        place after = next;  // looked up while blocks are on their way
        if (!LOOKS_FAR<S, F16>) {
            next = walk.next(now);
        } else if (next.valid) {
            after = walk.next(next);
        }
        if (st.ahead == 2) {
            lctx_copy_wait<1>();
        } else {
            lctx_copy_wait<0>();
        }
        __syncthreads();  // the block is here, and nobody reads the one before
        if (!F16) {
            r.unpack(r.block(m.span[now.buffer], now.block), i);
        }
        if (now.buffer != loaded) {
            load_queries<S>(a, t, m.angle[now.buffer], q);
        }
        if (!F16 || now.buffer != loaded) {
            __syncthreads();
        }
        if (now.buffer != loaded) {
            mine.take(q + lctx_warp() % S::COLUMN_WARPS * 16 * S::STRIDE);
            loaded = now.buffer;
        }
        if (st.ahead > 0) {
            place to = next;
            if (st.ahead == 2) {
                to = after;
            }
            fetch(to, i + st.ahead);
        }
        attend_block<S>(a, m, now.buffer, now.block * S::ROWS, mine, r.k_tile(i), r.v_tile(i), f);
        if (st.ahead == 0) {
            __syncthreads();
            fetch(next, i + 1);
        }
        now = next, next = after;
    }
    f.finish();
    if constexpr (S::ROW_WARPS > 1) {
        __syncthreads();
        merge_warps<S>(a, t, part, (int)blockIdx.z, f, (float *)shared);
    } else {
        const int column0 = lctx_warp() * 16;
        f.each_result([&](int c, int d, float m, float l, float o0, float o1) {
            if (column0 + c < t.n_column()) {
                write_result(a, part, (int)blockIdx.z, t.token(column0 + c), t.head(column0 + c), d, m, l, o0, o1);
            }
        });
    }
}

// A block of threads for a (token, head). What is NaN in a part is NaN in the result.
__global__ void merge(const lctx_attend_args a, const parts part) {
    const int token = (int)blockIdx.x / a.n_head, head = (int)blockIdx.x % a.n_head;
    float m = -INFINITY, l = 0.0f;
    for (int split = 0; split < part.n_split; split++) {
        m = fmaxf(m, part.of(a, split, token, head)[0]);
    }
    for (int split = 0; split < part.n_split; split++) {
        const float * p = part.of(a, split, token, head);
        l += p[1] != 0.0f ? p[1] * lctx_exp2(p[0] - m) : 0.0f;
    }
    const size_t at = (size_t)token * a.n_head + head;
    for (int d = (int)threadIdx.x; d < a.head_dim_v; d += (int)blockDim.x) {
        float o = 0.0f;
        for (int split = 0; split < part.n_split; split++) {
            const float * p = part.of(a, split, token, head);
            o += p[1] != 0.0f ? p[2 + d] * lctx_exp2(p[0] - m) : 0.0f;
        }
        a.dst[at * a.head_dim_v + d] = l != 0.0f ? o / l : 0.0f;
    }
    if (threadIdx.x == 0 && a.lse) {
        a.lse[at] = l != 0.0f ? m * LCTX_LN_2 + logf(l) : -INFINITY;
    }
    __syncthreads();
    if (a.params.hadamard.v != 0 && lctx_warp() == 0) {
        lctx_transform_row(a.dst + at * a.head_dim_v, a.head_dim_v, a.params.hadamard.v);
    }
}

// The output of values that were transformed, where there is nothing to merge. One warp for a (token, head).
__global__ void transform_back(const lctx_attend_args a) {
    lctx_transform_row(a.dst + (size_t)blockIdx.x * a.head_dim_v, a.head_dim_v, a.params.hadamard.v);
}

bool has_few_columns(const lctx_attend_args & a) {
    return a.n_tokens * (a.n_head / a.n_head_kv) <= 16;
}

// Parts of a tile: about two blocks of threads for every multiprocessor, and no more than there are pages.
template <typename S> int n_split(const lctx_cuda_device & device, const lctx_attend_args & a) {
    const int n_block = lctx_cuda_tiling(a, S::COLUMNS).n_tile() * a.n_head_kv, n_wanted = 2 * device.n_multiprocessor / n_block;
    return lctx_max(1, lctx_min(n_wanted, (int)a.cache.table.head_stride));
}

template <typename S, bool F16> void launch(const lctx_cuda_queue & queue, const lctx_attend_args & a) {
    const stages st = stages::of<S, F16>(queue.device, a);
    const parts part = {n_split<S>(queue.device, a), (float *)queue.work};
    const dim3 grid(lctx_cuda_tiling(a, S::COLUMNS).n_tile(), a.n_head_kv, part.n_split);
    lctx_launch(attend<S, F16>, grid, S::THREADS, st.template n_shared<S>(), queue.stream, a, st, part);
    if (part.n_split > 1) {
        lctx_launch(merge, dim3(a.n_tokens * a.n_head), 64, 0, queue.stream, a, part);
    } else if (a.params.hadamard.v != 0) {
        lctx_launch(transform_back, dim3(a.n_tokens * a.n_head), LCTX_WARP, 0, queue.stream, a);
    }
}

// f(shape) with the shape of these arguments.
template <bool FEW, typename F> void with_dim(const lctx_attend_args & a, F && f) {
    const int dim = lctx_max(a.head_dim_k, a.head_dim_v);
    return dim <= 64    ? f(shape<64, FEW>())
           : dim <= 80  ? f(shape<80, FEW>())
           : dim <= 96  ? f(shape<96, FEW>())
           : dim <= 128 ? f(shape<128, FEW>())
                        : f(shape<256, FEW>());
}

template <typename F> void with_shape(const lctx_attend_args & a, F && f) {
    return has_few_columns(a) ? with_dim<true>(a, f) : with_dim<false>(a, f);
}

}  // namespace

size_t lctx_cuda_attend_wsize(const lctx_cuda_device & device, const lctx_attend_args & args) {
    int n = 1;
    with_shape(args, [&](auto s) { n = n_split<decltype(s)>(device, args); });
    return n > 1 ? n * parts::n_float(args) * sizeof(float) : 0;
}

void lctx_cuda_attend(const lctx_cuda_queue & queue, const lctx_attend_args & args) {
    const bool f16 = args.cache.k_pool.type == GGML_TYPE_F16 && args.cache.v_pool.type == GGML_TYPE_F16;
    with_shape(args, [&](auto s) {
        using S = decltype(s);
        return f16 ? launch<S, true>(queue, args) : launch<S, false>(queue, args);
    });
}
