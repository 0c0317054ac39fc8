// Shows how *attend* goes over what a tile reads: its shapes, how shared memory is used, blocks of rows on their way,
// and the walk over them.
#pragma once

#include "plan.h"
#include "tile.h"

// PIECES: of a block of rows.
template <int COLUMNS, int PIECES> struct lctx_attend_memory : lctx_cuda_walk_memory<COLUMNS> {
    lctx_cuda_piece piece[LCTX_CUDA_ITEMS][PIECES];  // of the items by chunk
    int32_t most[2];  // bits of the largest value of a block of rows if it does not fit f16, else 0; blocks use them in
                      // turn
};

// One warp has 16 columns. With few columns the warps share the rows of a block instead, and of wide heads the
// dimensions: registers hold the results of 144 of them easily.
template <int DIM_, bool FEW> struct lctx_attend_shape {
    static constexpr int DIM = DIM_;  // of K and V, padded
    static constexpr bool WIDE = DIM > 256;
    static constexpr int ROWS = DIM <= 128 ? 64 : WIDE ? 16 : 32;  // of a tile
    static constexpr int COLUMN_WARPS = FEW || WIDE ? 1 : DIM <= 128 ? 4 : 2;
    static constexpr int ROW_WARPS = FEW && !WIDE ? ROWS / 16 : 1;
    static constexpr int DIM_WARPS = WIDE ? 4 : 1;
    static constexpr int COLUMNS = 16 * COLUMN_WARPS;
    static constexpr int PIECES = ROWS / lctx_cuda_piece::CELLS;
    static constexpr int WARP_ROWS = ROWS / ROW_WARPS;
    static constexpr int WARP_DIM = DIM / DIM_WARPS;
    static constexpr int THREADS = LCTX_WARP * COLUMN_WARPS * ROW_WARPS * DIM_WARPS;
    static constexpr int STRIDE = DIM + 8;
    static constexpr size_t TILE = (size_t)2 * ROWS * STRIDE * sizeof(uint16_t);  // K, then V
    static constexpr size_t QUERIES = (size_t)COLUMNS * STRIDE * sizeof(uint16_t);
    static constexpr size_t SUMS =
        WIDE ? (size_t)DIM_WARPS * 16 * ROWS * sizeof(float) : 0;  // scores of the warps that share dimensions
    using memory = lctx_attend_memory<COLUMNS, PIECES>;
    static constexpr size_t WALK = sizeof(memory);
    // states of the warps that share columns, where the tile was
    static constexpr int STATE = DIM + 4;
    static constexpr size_t STATES = ROW_WARPS > 1 ? (size_t)ROW_WARPS * COLUMNS * STATE * sizeof(float) : 0;
    static_assert(STATES <= TILE && TILE % 16 == 0 && QUERIES % 16 == 0 && WARP_DIM % 16 == 0, "shared memory");

    // This warp has the columns, rows and dimensions from these on.
    __device__ static int column0() { return lctx_warp() % COLUMN_WARPS * 16; }
    __device__ static int row0() { return WIDE ? 0 : lctx_warp() / COLUMN_WARPS * WARP_ROWS; }
    __device__ static int dim0() { return WIDE ? lctx_warp() * WARP_DIM : 0; }
};

// Divides shared memory: into tiles of f16 rows, or one tile and before it the bytes of the next rows.
struct lctx_attend_stages {
    int ahead;  // blocks that are on their way while one is read: two where two blocks of threads have room for that,
                // else one or none
    int n_tile;
    uint32_t n_raw;  // bytes of the rows of a block

    template <typename S, bool F16>
    static lctx_attend_stages of(const lctx_cuda_device & device, const lctx_attend_args & a) {
        const size_t of_values = lctx_values_in_keys(a.cache) ? 0 : a.cache.v_pool.row_size;
        const uint32_t raw = S::ROWS * (uint32_t)(a.cache.k_pool.row_size + of_values);
        const auto with = [&](int ahead) {
            return F16 ? lctx_attend_stages{ahead, ahead + 1, 0} : lctx_attend_stages{ahead, 1, raw};
        };
        const auto fits = [&](int ahead, size_t n_block) {
            return n_block * with(ahead).template n_shared<S>() <= device.max_shared;
        };
        return with(fits(2, 2) ? 2 : fits(1, 1) ? 1 : 0);
    }
    // Until the block that is read next is here, as far as this thread has copied it.
    __device__ __forceinline__ void wait() const {
        if (ahead == 2) {
            lctx_copy_wait<1>();
        } else {
            lctx_copy_wait<0>();
        }
    }
    template <typename S> __host__ __device__ size_t n_shared() const {
        return n_tile * S::TILE + ahead * n_raw + S::QUERIES + S::SUMS + S::WALK;
    }
};

// Says where the walk is: at a block of item `buffer` of those that are known.
struct lctx_attend_cursor {
    int buffer, block;
    bool valid;
    int32_t page;  // of the first cell that is read of a run: asked for before it is needed
};

// Begin to copy f16 rows of pieces into a tile; what is not read of a piece becomes 0.
template <typename S>
static __device__ __forceinline__ void lctx_cuda_copy_pieces(const lctx_pool_args & pool, int n_dim,
                                                             const lctx_cuda_piece * pieces, uint16_t * tile) {
    constexpr int PER_ROW = S::DIM / 8, CELLS = lctx_cuda_piece::CELLS, STEPS = S::ROWS * PER_ROW / S::THREADS;
    [[maybe_unused]] constexpr int AT_ONCE = STEPS > 8 ? 4 : STEPS;
#ifdef __CUDACC__
#pragma unroll AT_ONCE
#endif
    for (int step = 0; step < STEPS; step++) {
        const int i = step * S::THREADS + (int)threadIdx.x, row = i / PER_ROW, d = i % PER_ROW * 8;
        const lctx_cuda_piece & piece = pieces[row / CELLS];
        const int at = row % CELLS - piece.lo;
        const char * from = lctx_pool_at(pool, (size_t)piece.row + at) + d * sizeof(uint16_t);
        lctx_copy_16_or_zeros(tile + row * S::STRIDE + d,
                              at >= 0 && at < piece.hi - piece.lo && d < n_dim ? from : nullptr);
    }
}

template <typename S, bool F16> struct lctx_attend_reader {
    const lctx_attend_args & a;
    const lctx_cuda_tile & t;
    char * shared;
    const lctx_attend_stages & st;

    // Tile and bytes of the block number i.
    __device__ uint16_t * k_tile(int i) const { return (uint16_t *)(shared + i % st.n_tile * S::TILE); }
    __device__ uint16_t * v_tile(int i) const { return k_tile(i) + S::ROWS * S::STRIDE; }
    __device__ char * raw(int i) const { return shared + st.n_tile * S::TILE + i % st.ahead * st.n_raw; }
    __device__ char * end() const { return shared + st.n_tile * S::TILE + st.ahead * st.n_raw; }
    // f(block of rows that lie together) for all that is read at a cursor: a run has one, chunks have pieces.
    template <typename F> __device__ __forceinline__ void each_block(const typename S::memory & m,
                                                                     const lctx_attend_cursor & p, F && f) const {
        const lctx_cuda_item & item = m.item[p.buffer];
        const int run = p.block * S::ROWS;
        int lo = lctx_max(item.lo - run, 0), hi = lctx_min(item.hi - run, S::ROWS);
        size_t row = lctx_row_in(a.cache.table, lctx_max(p.page, 0), run + lo);
#ifdef __CUDACC__
#pragma unroll 1
#endif
        for (int i = 0; i < (item.by_chunk ? S::PIECES : 1); i++) {
            if (item.by_chunk) {
                const lctx_cuda_piece & piece = m.piece[p.buffer][i];
                const int first = i * lctx_cuda_piece::CELLS;
                lo = first + piece.lo, hi = first + piece.hi, row = (size_t)piece.row;
            }
            if (lo < hi) {
                f(lctx_cuda_block{a.cache, t.head_kv, item.seq, run, lo, hi, row, item.near != 0});
            }
        }
    }
    // Begin to bring what is read at a cursor closer, as number i.
    __device__ void fetch(const typename S::memory & m, const lctx_attend_cursor & p, int i) const {
        if (F16 && m.item[p.buffer].by_chunk) {
            lctx_cuda_copy_pieces<S>(a.cache.k_pool, a.head_dim_k, m.piece[p.buffer], k_tile(i));
            lctx_cuda_copy_pieces<S>(a.cache.v_pool, a.head_dim_v, m.piece[p.buffer], v_tile(i));
            return;
        }
        each_block(m, p, [&](const lctx_cuda_block & b) { fetch(b, i); });
    }
    __device__ void fetch(const lctx_cuda_block & b, int i) const {
        const size_t k_row = a.cache.k_pool.row_size, v_row = a.cache.v_pool.row_size;
        if constexpr (F16) {
            if (b.lo == 0 && b.hi == S::ROWS && a.head_dim_k == S::DIM && a.head_dim_v == S::DIM && !b.is_gathered()) {
                lctx_cuda_copy_tile<S>(b.k(), k_row, k_tile(i));
                lctx_cuda_copy_tile<S>(b.v(), v_row, v_tile(i));
                return;
            }
            const char *k = b.is_gathered() ? nullptr : b.k(), *v = b.v();
            lctx_cuda_copy_rows<S>(
                a.head_dim_k, b.lo, b.hi, [&](int row) { return k ? k + row * k_row : b.gathered_k(row); }, k_tile(i));
            lctx_cuda_copy_rows<S>(a.head_dim_v, b.lo, b.hi, [&](int row) { return v + row * v_row; }, v_tile(i));
        } else if (st.ahead > 0 && !b.is_gathered()) {
            lctx_cuda_copy_bytes(raw(i), b.k(), b.lo * k_row, b.hi * k_row);
            if (!lctx_values_in_keys(a.cache)) {
                lctx_cuda_copy_bytes(raw(i) + S::ROWS * k_row, b.v(), b.lo * v_row, b.hi * v_row);
            }
        }
    }
    // Fetch a block that is read whole and begins in row `row` of the pools.
    __device__ __forceinline__ void fetch_whole(size_t row, int i) const {
        const lctx_pool_args &k = a.cache.k_pool, &v = a.cache.v_pool;
        if constexpr (F16) {
            lctx_cuda_copy_tile<S>(lctx_pool_at(k, row), k.row_size, k_tile(i));
            lctx_cuda_copy_tile<S>(lctx_pool_at(v, row), v.row_size, v_tile(i));
        } else {
            lctx_cuda_copy_bytes(raw(i), lctx_pool_at(k, row), 0, S::ROWS * k.row_size);
            if (!lctx_values_in_keys(a.cache)) {
                lctx_cuda_copy_bytes(raw(i) + values(), lctx_pool_at(v, row), 0, S::ROWS * v.row_size);
            }
        }
        lctx_copy_end_group();
    }
    __device__ __forceinline__ void unpack_whole(int i) const {
        lctx_cuda_unpack_tile<S>(a.cache.k_pool.type, raw(i), a.cache.k_pool.row_size, k_tile(0));
        lctx_cuda_unpack_tile<S>(a.cache.v_pool.type, raw(i) + values(), a.cache.v_pool.row_size, v_tile(0));
    }
    // Unpack what was fetched into the tile, once it is there for all threads. Returns the factor for the weights of
    // its values.
    __device__ float unpack(const lctx_attend_cursor & p, int i, typename S::memory & m) const {
        const size_t k_row = a.cache.k_pool.row_size;
        each_block(m, p, [&](const lctx_cuda_block & b) {
            const char * k = is_here(b) ? raw(i) : b.is_gathered() ? nullptr : b.k();
            lctx_cuda_unpack_rows<S>(
                a.cache.k_pool.type, a.head_dim_k, b.lo, b.hi,
                [&](int i) { return k ? k + i * k_row : b.gathered_k(i); }, k_tile(0));
        });
        return lctx_cuda_scaled(m.most, i, [&](float factor) {
            float most = 0.0f;
            each_block(m, p,
                       [&](const lctx_cuda_block & b) { most = fmaxf(most, unpack_values(b, i, 1.0f / factor)); });
            return most;
        });
    }
    __device__ bool is_here(const lctx_cuda_block & b) const { return st.ahead > 0 && !b.is_gathered(); }
    // Return where the bytes of values begin after those that were fetched of keys, which may have them.
    __device__ size_t values() const {
        return lctx_values_in_keys(a.cache) ? a.cache.v_pool.data - a.cache.k_pool.data
                                            : S::ROWS * a.cache.k_pool.row_size;
    }
    // Values divided by `factor`; returns the largest of this thread where it may be more than a half.
    __device__ float unpack_values(const lctx_cuda_block & b, int i, float factor) const {
        const size_t v_row = a.cache.v_pool.row_size;
        const char * v = is_here(b) ? raw(i) + values() : b.v();
        const auto row = [&](int i) { return v + i * v_row; };
        switch (a.cache.v_pool.type) {
            case GGML_TYPE_F32:
                return lctx_cuda_unpack_values<lctx_cuda_f32, S>(a.head_dim_v, b.lo, b.hi, row, factor, v_tile(0));
            case GGML_TYPE_BF16:
                return lctx_cuda_unpack_values<lctx_cuda_bf16, S>(a.head_dim_v, b.lo, b.hi, row, factor, v_tile(0));
            default: lctx_cuda_unpack_rows<S>(a.cache.v_pool.type, a.head_dim_v, b.lo, b.hi, row, v_tile(0));
        }
        return 0.0f;
    }
};

template <typename S> struct lctx_attend_walker {
    const lctx_attend_args & a;
    const lctx_cuda_tile & t;
    typename S::memory & m;
    lctx_cuda_split split;
    const lctx_cuda_piece * pieces;  // of the plan of this tile
    int n_chunk_block;               // blocks of them
    // the first warp knows
    lctx_cuda_run_walk runs = {};
    int n_before = 0;      // blocks of the runs that were looked up
    int chunk_block = -1;  // of the pieces that were looked up last
    int32_t key = -1;      // of them

    __device__ static int first(const lctx_cuda_item & s) { return s.lo < s.hi ? s.lo / S::ROWS : 0; }
    __device__ static int end(const lctx_cuda_item & s) { return s.lo < s.hi ? (s.hi + S::ROWS - 1) / S::ROWS : 0; }
    // The block of this split from `block` on.
    __device__ int from(const lctx_cuda_item & s, int block) const {
        return split.next(block, s.n_before + block - first(s));
    }
    // The block of this split after p; all threads call. One barrier for an item: what it replaces is not read any
    // more.
    __device__ lctx_attend_cursor next(lctx_attend_cursor p) {
        if (p.valid) {
            const int block = p.block + split.n_split;
            if (block < end(m.item[p.buffer])) {
                return at(p.buffer, block);
            }
        }
        const int to = (p.buffer + 1) % LCTX_CUDA_ITEMS;
        if (lctx_warp() == 0 && !look_up_run(to)) {
            look_up_chunks(to);
        }
        __syncthreads();
        const lctx_cuda_item & s = m.item[to];
        return s.valid && !s.by_chunk ? at(to, from(s, first(s))) : lctx_attend_cursor{to, 0, s.valid != 0, 0};
    }
    __device__ lctx_attend_cursor at(int buffer, int block) const {
        const lctx_cuda_item & s = m.item[buffer];
        return {buffer, block, true, lctx_page_of(a.cache.table, lctx_max(s.lo, block * S::ROWS), t.head_kv, s.seq)};
    }
    // The next run with a block of this split, if there is one: the others are left out without a barrier.
    __device__ bool look_up_run(int to) {
        for (;;) {
            lctx_cuda_item s = runs.next(a, t, m, to);
            if (!s.valid) {
                return false;
            }
            s.n_before = n_before;
            n_before += end(s) - first(s);
            if (from(s, first(s)) < end(s)) {
                put(s, to, lctx_cuda_turns(m, to));
                return true;
            }
        }
    }
    // The next block of pieces of this split, which is an item of its own; not valid: there is none.
    __device__ void look_up_chunks(int to) {
        chunk_block = chunk_block < 0 ? split.next(0, n_before) : chunk_block + split.n_split;
        lctx_cuda_item s = {};
        s.valid = chunk_block < n_chunk_block, s.by_chunk = 1;
        if (!s.valid) {
            return put(s, to, false);
        }
        const lctx_cuda_piece * block = pieces + (size_t)chunk_block * S::PIECES;
        if (lctx_lane() < S::PIECES) {
            m.piece[to][lctx_lane()] = block[lctx_lane()];
        }
        s.seq = block->key / a.n_angle;
        put(s, to, block->key != key && turns_for(block->key, to));
        key = block->key;
    }
    // Return whether the columns of the sequence of a key turn for it.
    __device__ bool turns_for(int32_t key, int to) {
        const lctx_cuda_lists lists = {a};
        for (int c = lctx_lane(); c < S::COLUMNS; c += LCTX_WARP) {
            const bool reads = c < t.n_column() && lists.of(t.index(c), t.head(c))->seq == key / a.n_angle;
            m.lo[to][c] = 0, m.hi[to][c] = reads, m.angle[to][c] = reads ? t.token(c) * a.n_angle + key % a.n_angle : 0;
        }
        return lctx_cuda_turns(m, to);
    }
    __device__ void put(lctx_cuda_item & s, int to, bool turns) {
        s.turns = turns;
        if (lctx_lane() == 0) {
            m.item[to] = s;
        }
    }
};
