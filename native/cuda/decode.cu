// *attend* of few tokens: what tensor cores would multiply is less than what is read. A tile is heads of one token that
// read the same, one that chooses for itself or up to four of a KV head, and what it reads is their list of segments.
// The list is cut into pieces of 16 rows whose number follows from its ends, so that every warp finds its split without
// a walk. A warp reads rows from memory into registers and has queries and states of its own: warps do not wait for
// each other until the states are merged.
#include "decode.h"

#include "hadamard.h"
#include "lists.h"
#include "new-rows.h"
#include "tile.h"
#include "walk.h"

#include <cfloat>
#include <type_traits>

namespace {

constexpr int PIECE = 16;        // rows: what is staged is not smaller
constexpr int MOST_TOKENS = 16;  // of more tokens those that follow each other share enough for the tiles of attend.cu
constexpr int MOST_READS = 2;    // times that tiles of other tokens or heads read what is the same
constexpr int GROUP = 4;         // heads
constexpr int WARPS = 4, THREADS = WARPS * LCTX_WARP;

// Cells of a list, PIECE at most; those of a run begin at a multiple of it.
struct piece {
    int32_t lo, hi, angle, near;
    int32_t first_page, last_page;
};

// Cells of a run, and the number of its first piece.
struct run {
    int32_t lo, hi, first;
};

// Holds in shared memory what a warp looks at between pieces: registers are for rows.
struct list_memory {
    const lctx_segment * segs;
    lctx_cells cells;
    int32_t head_kv, seq, n_in_runs;
    run runs[LCTX_WARP];
    piece pieces[LCTX_WARP];  // the next ones
};

// Divides rows within a warp: LANES lanes share one, and each of them has OCTETS times 8 channels of it, and of the
// queries of HEADS heads. TYPE: of K and V, whose rows wait in half of the registers that floats take; void: any, which
// the arguments say.
template <int LANES_, int OCTETS_, int HEADS_, typename TYPE_> struct shape {
    using TYPE = TYPE_;
    static constexpr bool KNOWN = !std::is_void_v<TYPE>;
    static constexpr bool IN_BYTES =
        KNOWN && !std::is_same_v<TYPE, lctx_cuda_f16>;  // products with keys as they are stored
    static constexpr int LANES = LANES_, OCTETS = OCTETS_, HEADS = HEADS_;
    static constexpr bool WRITES = HEADS > 1;  // new rows; heads alone have no registers for it
    static constexpr int DIM = 8 * LANES * OCTETS;
    static constexpr int ROWS = LCTX_WARP / LANES;  // side by side
    static constexpr int MOST_STEPS = (KNOWN && HEADS == 1 ? 8 : 4) / OCTETS;
    static constexpr int STEPS = lctx_min(PIECE / ROWS, MOST_STEPS);  // one after the other, on their way together
    static constexpr int BLOCKS = HEADS * OCTETS == 1 ? 4 : 3;        // of threads, of a multiprocessor
    static constexpr int STATE = DIM + 4;                             // floats in shared memory: m, l, o
    static constexpr size_t SHARED = WARPS * (HEADS * STATE * sizeof(float) + sizeof(list_memory));

    static __device__ int row() { return lctx_lane() / LANES; }
    static __device__ int channel(int octet) { return 8 * (lctx_lane() % LANES + octet * LANES); }

    // Add up what the lanes of a row have for the heads: each gets the sum of one of them, that of `head`. Every step
    // halves what is left to add.
    static __device__ __forceinline__ float add_lanes(float (&x)[HEADS]) {
        int step = LANES;
        for (int n = HEADS / 2; n > 0; n /= 2) {
            step /= 2;
            const bool upper = lctx_lane() & step;
            for (int i = 0; i < n; i++) {
                const float kept = upper ? x[i + n] : x[i], given = upper ? x[i] : x[i + n];
                x[i] = kept + lctx_shuffle_xor(given, step);
            }
        }
        return lctx_warp_sum(x[0], step);
    }
    static __device__ int head() { return lctx_lane() % LANES / (LANES / HEADS); }
    // Return what the lanes of this row have for head h.
    static __device__ __forceinline__ float of_head(float x, int h) {
        return HEADS == 1 ? x : lctx_shuffle(x, row() * LANES + h * (LANES / HEADS));
    }
    // f over the rows side by side.
    template <typename F> static __device__ __forceinline__ float over_rows(float x, F && f) {
        for (int step = LANES; step < LCTX_WARP; step *= 2) {
            x = f(x, lctx_shuffle_xor(x, step));
        }
        return x;
    }
};

// Heads of a token that read the same, as tiles of at most `most`.
struct head_tiles {
    int n_same, n_part, n_tile;

    LCTX_HD head_tiles(const lctx_attend_args & a, int most) {
        n_same = a.n_head / (lctx_cuda_lists{a}.by_chunk() ? a.n_choice : a.n_head_kv);
        n_part = (int)lctx_div_up(n_same, most), n_tile = a.n_head / n_same * n_part;
    }
    LCTX_HD int first(int tile, int most) const { return tile / n_part * n_same + tile % n_part * most; }
    LCTX_HD int end(int tile, int most) const {
        return lctx_min(first(tile, most) + most, (tile / n_part + 1) * n_same);
    }
};

// ---- which rows ----

// The segments of a tile: runs, then chunks. A chunk has as many pieces as it would have if nothing of it were evicted.
struct list {
    const lctx_attend_args & a;
    list_memory & m;  // of this warp
    int n;            // pieces

    // Of a token with this index among those outside of tiles. The lanes of a warp together.
    __device__ list(const lctx_attend_args & a, int index, int head, list_memory & m) : a(a), m(m) {
        const lctx_segment * segs = lctx_cuda_lists{a}.of(index, head);
        const int head_kv = head / (a.n_head / a.n_head_kv), seq = segs->seq;
        const lctx_cells cells(a.cache, head_kv, seq);
        run mine = {};
        if (lctx_lane() < n_run() && segs[lctx_lane()].row0 < segs[lctx_lane()].row1) {
            mine.lo = cells.cell(segs[lctx_lane()].row0), mine.hi = cells.cell(segs[lctx_lane()].row1);
        }
        const int n_mine = mine.lo < mine.hi ? (int)lctx_div_up(mine.hi, PIECE) - mine.lo / PIECE : 0;
        int n_in_runs = 0;
        for (int i = 0; i < n_run(); i++) {
            const int n_of = lctx_shuffle(n_mine, i);
            mine.first += i < lctx_lane() ? n_of : 0;
            n_in_runs += n_of;
        }
        m.runs[lctx_lane()] = mine;
        m.segs = segs, m.cells = cells, m.head_kv = head_kv, m.seq = seq,
        m.n_in_runs = n_in_runs;  // all write the same
        n = n_in_runs + n_chunk(segs + n_run()) * per_chunk();
    }
    __device__ int n_run() const { return lctx_cuda_lists{a}.n_run(); }
    __device__ int per_chunk() const { return (int)lctx_div_up(a.params.chunk_size, PIECE); }
    // Segments of chunks that are there come first: the lanes look at an equal number each of those in question.
    __device__ int n_chunk(const lctx_segment * chunks) const {
        int n_there = 0;
        for (int left = a.n_seg - n_run(); left > 0;) {
            const int step = (int)lctx_div_up(left, LCTX_WARP), last = (lctx_lane() + 1) * step - 1;
            const bool is_there = last < left && chunks[n_there + last].row0 < chunks[n_there + last].row1;
            const int n_step = __popc(lctx_ballot(is_there));
            n_there += n_step * step;
            left = lctx_min(step - 1, left - n_step * step);
        }
        return n_there;
    }
    // The piece with a cell of a run; -1: there is none. The lanes of a warp together.
    __device__ int piece_of(int32_t cell) const {
        const run & r = m.runs[lctx_lane()];  // which this lane has written
        const bool has = r.lo <= cell && cell < r.hi;
        return (int)lctx_reduce_max(has ? r.first + cell / PIECE - r.lo / PIECE + 1 : 0) - 1;
    }
    // Look up those of pieces [first, end) that come next, one for every lane. The lanes of a warp together.
    __device__ void look_up(int first, int end) const {
        lctx_sync_warp();  // all have read the pieces before
        if (first + lctx_lane() < end) {
            m.pieces[lctx_lane()] = at(first + lctx_lane());
        }
        lctx_sync_warp();
    }
    __device__ piece at(int i) const {
        piece p = {};
        for (int j = 0; j < n_run(); j++) {
            const run & r = m.runs[j];
            const int cell = (r.lo / PIECE + i - r.first) * PIECE;
            if (i >= r.first && r.lo < r.hi && cell < r.hi) {
                p = {lctx_max(cell, r.lo), lctx_min(cell + PIECE, r.hi), m.segs[j].angle,
                     (int32_t)(a.params.near_mask >> j & 1)};
            }
        }
        if (i >= m.n_in_runs) {
            const lctx_segment s = m.segs[n_run() + (i - m.n_in_runs) / per_chunk()];
            const int begin = m.cells.cell(s.row0) + (i - m.n_in_runs) % per_chunk() * PIECE;
            p = {begin, lctx_min(begin + PIECE, m.cells.cell(s.row1)), s.angle, 0};
        }
        if (p.lo < p.hi) {
            p.first_page = lctx_page_of(a.cache.table, p.lo, m.head_kv, m.seq);
            p.last_page = lctx_page_of(a.cache.table, p.hi - 1, m.head_kv, m.seq);
        }
        return p;
    }
    __device__ size_t pool_row(const piece & p, int cell) const {
        const lctx_table_args & table =
            a.cache.table;  // a piece lies in two pages at most, or units where rows are staged
        return lctx_row_in(table, cell >> table.shift == p.lo >> table.shift ? p.first_page : p.last_page, cell);
    }
    // The key of a cell of a piece; what a head that evicts has in a near ring goes by row number.
    __device__ const char * key(const piece & p, int cell) const {
        return p.near ? lctx_near_row(a.cache, m.cells.row(cell), m.head_kv, m.seq)
                      : lctx_pool_at(a.cache.k_pool, pool_row(p, cell));
    }
    // Of a piece, the cells from `cell` on whose rows lie together, wherever rows are staged: results do not depend on
    // that. The lanes of a warp look at one each, and there are fewer than lanes.
    __device__ int n_together(const piece & p, int cell) const {
        const int n = lctx_min(p.hi, (cell / PIECE + 1) * PIECE) - cell;
        if (!p.near) {
            return n;
        }
        const auto mine = (uint64_t)(uintptr_t)key(p, lctx_min(cell + lctx_lane(), p.hi - 1));
        const uint32_t together = lctx_ballot(mine == lctx_shuffle(mine, 0) + lctx_lane() * a.cache.k_pool.row_size);
        return lctx_min(n, __popc(together & ~(together + 1)));  // lanes from the first one on
    }
};

// ---- rows in registers ----

// 8 channels of a row: halves, where these have what is stored, else floats.
template <typename T> struct octet_of_floats {
    float x[8];
    __device__ void load(const char * row, int d) { lctx_load_8<T>(row, d, x); }
    __device__ float at(int i) const { return x[i]; }
};

template <typename T> struct octet {
    uint32_t x[4];
    __device__ void load(const char * row, int d) {
        const uint4 halves = lctx_load_halves<T>(row, d);
        x[0] = halves.x, x[1] = halves.y, x[2] = halves.z, x[3] = halves.w;
    }
    __device__ float at(int i) const { return lctx_from_half((uint16_t)(x[i / 2] >> i % 2 * 16)); }
};
template <> struct octet<lctx_cuda_f32> : octet_of_floats<lctx_cuda_f32> {};
template <> struct octet<lctx_cuda_bf16> : octet_of_floats<lctx_cuda_bf16> {};

// 8 channels of a query.
struct query_octet {
    float x[8];
    __device__ void take(const float * from) { lctx_load_8(from, x); }
    template <typename O> __device__ __forceinline__ float product(const O & k) const {
        float sum = 0.0f;
        lctx_unrolled<8>([&](int i) { sum += x[i] * k.at(i); });
        return sum;
    }
};

// Holds keys that are multiplied as they are stored: signed bytes, of which a block has one scale.
template <typename T> struct byte_octet {
    uint32_t x[2];
    float scale;
    __device__ __forceinline__ void load(const char * row, int d) {
        const char * block = row + d / T::BLOCK * T::SIZE;
        const uint2 levels = T::levels(block, d % T::BLOCK);
        x[0] = centered(levels.x), x[1] = centered(levels.y);
        scale = lctx_from_half((uint16_t)lctx_word(block));
    }
    // No byte carries into the next one.
    __device__ static uint32_t centered(uint32_t levels) {
        return (levels + (128 - T::MIDDLE) * 0x01010101u) ^ 0x80808080u;
    }
};

// A number is scale (STEPS high + low), so two bytes have it to 16 bits of the largest.
struct query_bytes {
    static constexpr int STEPS = 254;
    uint32_t high[2] = {}, low[2] = {};
    float scale;
    __device__ void take(const float * from) {
        float x[8], most = 0.0f;
        bool is_finite = true;
        lctx_load_8(from, x);
        lctx_unrolled<8>([&](int i) {
            most = fmaxf(most, fabsf(x[i]));
            is_finite = is_finite && fabsf(x[i]) <= FLT_MAX;
        });
        const float inverse = most > 0.0f && is_finite ? 127.0f / most : 0.0f;
        scale = is_finite ? most / (127.0f * STEPS) : NAN;
        high[0] = high[1] = low[0] = low[1] = 0;
        lctx_unrolled<8>([&](int i) {
            const float y = is_finite ? x[i] * inverse : 0.0f, of_high = rintf(y),
                        of_low = rintf((y - of_high) * STEPS);
            high[i / 4] |= (uint32_t)(uint8_t)(int)of_high << i % 4 * 8;
            low[i / 4] |= (uint32_t)(uint8_t)(int)of_low << i % 4 * 8;
        });
    }
    template <typename O> __device__ __forceinline__ float product(const O & k) const {
        const int of_high = lctx_dot_bytes(high[1], k.x[1], lctx_dot_bytes(high[0], k.x[0], 0));
        const int of_low = lctx_dot_bytes(low[1], k.x[1], lctx_dot_bytes(low[0], k.x[0], 0));
        return (float)(STEPS * of_high + of_low) * (scale * k.scale);
    }
};

// Steps of rows, side by side in the lanes.
template <typename S, typename OCTET> struct rows {
    OCTET x[S::STEPS][S::OCTETS];

    // row(step): the row of this lane. Channels beyond the head repeat its last ones: their queries are 0, and their
    // results are not used.
    template <typename Row> __device__ __forceinline__ void load(int n_dim, Row && row) {
        lctx_unrolled<S::STEPS>([&](int step) {
            const char * from = row(step);
            lctx_unrolled<S::OCTETS>([&](int j) { x[step][j].load(from, lctx_min(S::channel(j), n_dim - 8)); });
        });
    }
    // Products with queries, of the head of this lane.
    template <typename Q>
    __device__ __forceinline__ void multiply(const Q (&q)[S::HEADS][S::OCTETS], float (&s)[S::STEPS]) const {
        lctx_unrolled<S::STEPS>([&](int step) {
            float sum[S::HEADS] = {};
            lctx_unrolled<S::OCTETS>(
                [&](int j) { lctx_unrolled<S::HEADS>([&](int h) { sum[h] += q[h][j].product(x[step][j]); }); });
            s[step] = S::add_lanes(sum);
        });
    }
    // o += rows times their weights.
    __device__ __forceinline__ void weigh(const float (&weight)[S::STEPS], float (&o)[S::HEADS][S::OCTETS][8]) const {
        lctx_unrolled<S::STEPS>([&](int step) {
            float of[S::HEADS];
            lctx_unrolled<S::HEADS>([&](int h) { of[h] = S::of_head(weight[step], h); });
            lctx_unrolled<S::OCTETS>([&](int j) {
                lctx_unrolled<8>([&](int i) {
                    const float y = x[step][j].at(i);
                    lctx_unrolled<S::HEADS>([&](int h) { o[h][j][i] += of[h] * y; });
                });
            });
        });
    }
};

// ---- a warp ----

// The queries of a warp, and the states of the rows that a lane has seen, with those of the lanes that share them; m
// and total are of its head.
template <typename S> struct reader {
    const lctx_attend_args & a;
    const list & l;
    int first_head, end_head;
    float * shared;  // [S::HEADS][S::STATE] of this warp
    std::conditional_t<S::IN_BYTES, query_bytes, query_octet> q[S::HEADS][S::OCTETS] = {};
    float o[S::HEADS][S::OCTETS][8] = {};
    float m = -INFINITY, total = 0.0f;

    // f(head, octet) for what this lane has.
    template <typename F> static __device__ __forceinline__ void each_octet(F && f) {
        lctx_unrolled<S::HEADS>([&](int h) { lctx_unrolled<S::OCTETS>([&](int j) { f(h, j); }); });
    }
    // Look from an angle. Scores are base 2 without softcap. Heads after the last repeat it.
    __device__ void turn(int token, int32_t angle) {
        const float scale = a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale * LCTX_LOG2_E;
        lctx_sync_warp();  // all have read the queries before
#ifdef __CUDACC__
#pragma unroll 1
#endif
        for (int h = 0; h < S::HEADS; h++) {
            float x[S::DIM / LCTX_WARP];
            // the token is kept so that no addresses of its query wait in registers while rows are read
            lctx_turn_query(a, lctx_kept(token), lctx_min(first_head + h, end_head - 1), angle, scale, x);
            lctx_unrolled<S::DIM / LCTX_WARP>(
                [&](int i) { shared[h * S::STATE + i * LCTX_WARP + lctx_lane()] = x[i]; });
        }
        lctx_sync_warp();
        each_octet([&](int h, int j) { q[h][j].take(shared + h * S::STATE + S::channel(j)); });
    }
    // Products of n rows, of which a warp has more, to weights.
    __device__ __forceinline__ void softmax(float (&s)[S::STEPS], int n) {
        float most = m;
        lctx_unrolled<S::STEPS>([&](int step) {
            s[step] = a.params.softcap != 0.0f ? LCTX_LOG2_E * a.params.softcap * lctx_tanh(s[step]) : s[step];
            s[step] = step * S::ROWS + S::row() < n ? s[step] : -INFINITY;
            most = fmaxf(most, s[step]);
        });
        const float base = most == -INFINITY ? 0.0f : most;  // no row yet: keeps the exponents defined
        if (lctx_ballot(most != m) != 0) {                   // rare after the first rows
            const float factor = lctx_exp2(m - base);
            m = most, total *= factor;
            lctx_unrolled<S::HEADS>([&](int h) {
                const float its_factor = S::of_head(factor, h);
                lctx_unrolled<S::OCTETS>([&](int j) { lctx_unrolled<8>([&](int i) { o[h][j][i] *= its_factor; }); });
            });
        }
        lctx_unrolled<S::STEPS>([&](int step) {
            s[step] = lctx_exp2(s[step] - base);
            total += s[step];
        });
    }
    __device__ __forceinline__ void read(const piece & p) {
        for (int cell = p.lo; cell < p.hi;) {
            const int n = l.n_together(p, cell);
            read(p, cell, n);
            cell += n;
        }
    }
    // n rows from `cell` on, PIECE at most, which lie together.
    __device__ __forceinline__ void read(const piece & p, int cell, int n) {
        const char *keys = l.key(p, cell), *values = lctx_pool_at(a.cache.v_pool, l.pool_row(p, cell));
        const auto k_size = (uint32_t)a.cache.k_pool.row_size, v_size = (uint32_t)a.cache.v_pool.row_size;
        for (int first = 0; first < PIECE && first < n; first += S::STEPS * S::ROWS) {
            const auto mine = [&](int step) {
                return lctx_min(first + step * S::ROWS + S::row(), n - 1);
            };  // the last one again
            const auto key = [&](int step) { return keys + mine(step) * k_size; };
            const auto value = [&](int step) { return values + mine(step) * v_size; };
            float s[S::STEPS];
            if constexpr (S::KNOWN) {  // values are on their way before scores are known
                using T = typename S::TYPE;
                rows<S, std::conditional_t<S::IN_BYTES, byte_octet<T>, octet<T>>> k;
                rows<S, octet<T>> v;
                k.load(a.head_dim_k, key);
                v.load(a.head_dim_v, value);
                k.multiply(q, s);
                softmax(s, n - first);
                v.weigh(s, o);
            } else {
                lctx_cuda_with_rows(a.cache.k_pool.type, [&](auto type) {
                    rows<S, octet<decltype(type)>> k;
                    k.load(a.head_dim_k, key);
                    k.multiply(q, s);
                });
                softmax(s, n - first);
                lctx_cuda_with_rows(a.cache.v_pool.type, [&](auto type) {
                    rows<S, octet<decltype(type)>> v;
                    v.load(a.head_dim_v, value);
                    v.weigh(s, o);
                });
            }
        }
    }
    // The lanes that had other rows add theirs; the states of the warp into shared memory.
    __device__ void finish() {
        const auto sum = [](float x, float y) { return x + y; };
        const float most = S::over_rows(m, [](float x, float y) { return fmaxf(x, y); });
        const float factor = total != 0.0f ? lctx_exp2(m - most) : 0.0f;
        const float l = S::over_rows(total * factor, sum);
        lctx_sync_warp();  // all have read the queries
        each_octet([&](int h, int j) {
            const float its_factor = S::of_head(factor, h);
            lctx_unrolled<8>([&](int i) {
                const float all = S::over_rows(o[h][j][i] * its_factor, sum);
                if (S::row() == 0) {
                    shared[h * S::STATE + 2 + S::channel(j) + i] = all;
                }
            });
        });
        if (S::row() == 0) {  // the lanes of a head write the same
            shared[S::head() * S::STATE] = most, shared[S::head() * S::STATE + 1] = l;
        }
    }
};

// Write the row of the only token, where nothing is evicted, if it is in pieces [first, end): no other warp of a tile
// reads it, and tiles of the same KV head write the same. channels: of put_new.
__device__ inline void put_own_row(const lctx_new_rows & rows, const list & l, int first, int end, float * channels) {
    const int at = l.piece_of(rows.store.rows[0].row);
    if (at < first || at >= end) {
        return;
    }
#ifdef __CUDACC__
#pragma unroll 1
#endif
    for (int what = 0; what < rows.n_stored(); what++) {
        put_new<0>(rows, what, 0, l.m.head_kv, channels);
    }
    lctx_sync_warp();  // all of it is there
}

// rows: those of the token, where they are not written yet; else none.
template <typename S> __global__ void __launch_bounds__(THREADS, S::BLOCKS)
    decode(const lctx_attend_args a, const lctx_partial_states partial, const lctx_new_rows rows) {
    lctx_begin();
    lctx_let_next_begin();  // as many blocks run as fit, so that the merge takes no place of theirs
    const head_tiles heads(a, S::HEADS);
    const int index = (int)blockIdx.x / heads.n_tile, tile = (int)blockIdx.x % heads.n_tile, split = (int)blockIdx.y;
    const int first_head = heads.first(tile, S::HEADS), end_head = heads.end(tile, S::HEADS),
              token = lctx_cuda_token_alone(a, index);
    const int64_t warp_split = split * WARPS + lctx_warp(), n_warp_split = partial.n_split * WARPS;
    float * shared = (float *)lctx_shared();
    const list l(a, index, first_head, ((list_memory *)(shared + WARPS * S::HEADS * S::STATE))[lctx_warp()]);
    const int first = (int)(warp_split * l.n / n_warp_split), end = (int)((warp_split + 1) * l.n / n_warp_split);
    reader<S> r = {a, l, first_head, end_head, shared + lctx_warp() * S::HEADS * S::STATE};
    if constexpr (S::WRITES) {
        if (rows.store.n_tokens > 0) {
            put_own_row(rows, l, first, end, r.shared);
        }
    }
    int32_t angle = -1;
    for (int i = first; i < end; i += LCTX_WARP) {
        l.look_up(i, end);
        for (int j = 0; j < lctx_min(LCTX_WARP, end - i); j++) {
            const piece & p = l.m.pieces[j];
            if (p.lo >= p.hi) {
                continue;
            }
            if (p.angle != angle) {
                angle = p.angle;
                r.turn(token, angle);
            }
            r.read(p);
        }
    }
    r.finish();
    __syncthreads();
    for (int i = (int)threadIdx.x; i < S::HEADS * S::DIM / 2; i += THREADS) {
        const int h = i / (S::DIM / 2), d = i % (S::DIM / 2) * 2;
        if (first_head + h < end_head) {
            const lctx_attend_state s = lctx_merge_states(shared + h * S::STATE, WARPS, S::HEADS * S::STATE, d);
            partial.write(a, split, token, first_head + h, d, s);
        }
    }
}

template <typename S> int n_split(const lctx_cuda_device & device, const lctx_attend_args & a) {
    return lctx_cuda_splits(device, a, a.choices().n_alone() * head_tiles(a, S::HEADS).n_tile, S::BLOCKS);
}

int width(const lctx_attend_args & a) {
    return lctx_max(a.head_dim_k, a.head_dim_v);
}

// f(shape) with that of a head alone.
template <typename TYPE, typename F> void with_head(const lctx_attend_args & a, F && f) {
    const int dim = width(a);
    return dim <= 64    ? f(shape<8, 1, 1, TYPE>())
           : dim <= 128 ? f(shape<16, 1, 1, TYPE>())
           : dim <= 256 ? f(shape<32, 1, 1, TYPE>())
           : dim <= 512 ? f(shape<32, 2, 1, TYPE>())
                        : f(shape<32, 3, 1, TYPE>());
}

constexpr int MOST_GROUP_DIM = 256;  // wider heads leave no registers for four

template <typename TYPE, typename F> void with_group(const lctx_attend_args & a, F && f) {
    const int dim = width(a);
    return dim <= 64    ? f(shape<8, 1, GROUP, TYPE>())
           : dim <= 128 ? f(shape<16, 1, GROUP, TYPE>())
                        : f(shape<32, 1, GROUP, TYPE>());
}

// f(shape) with the shape of these arguments.
template <typename F> void with_shape(const lctx_attend_args & a, F && f) {
    const ggml_type type = a.cache.k_pool.type == a.cache.v_pool.type ? a.cache.k_pool.type : GGML_TYPE_COUNT;
    if (head_tiles(a, 1).n_same == 1) {
        return type == GGML_TYPE_F16 ? with_head<lctx_cuda_f16>(a, f) : with_head<void>(a, f);
    }
    return type == GGML_TYPE_F16    ? with_group<lctx_cuda_f16>(a, f)
           : type == GGML_TYPE_Q8_0 ? with_group<lctx_cuda_q8_0>(a, f)
                                    : with_group<lctx_cuda_q4_0>(a, f);
}

// Return whether with_shape has one for heads that read the same.
bool has_group(const lctx_attend_args & a) {
    const ggml_type k = a.cache.k_pool.type, v = a.cache.v_pool.type;
    return k == v && (k == GGML_TYPE_F16 || k == GGML_TYPE_Q8_0 || k == GGML_TYPE_Q4_0) && width(a) <= MOST_GROUP_DIM;
}

}  // namespace

bool lctx_cuda_decodes(const lctx_attend_args & a) {
    const head_tiles heads(a, GROUP);
    const int n_alone = a.choices().n_alone();
    if (lctx_cuda_lists{a}.n_run() > LCTX_WARP || (heads.n_same > 1 && !has_group(a))) {
        return false;
    }
    const bool chooses_alone = lctx_cuda_lists{a}.by_chunk() && a.n_choice == a.n_head;
    return chooses_alone ? n_alone <= MOST_TOKENS : n_alone * heads.n_part <= MOST_READS;
}

bool lctx_cuda_decode_writes(const lctx_attend_args & a) {
    bool writes = false;
    if (lctx_cuda_decodes(a)) {
        with_shape(a, [&](auto s) { writes = decltype(s)::WRITES; });
    }
    return writes;
}

size_t lctx_cuda_decode_wsize(const lctx_cuda_device & device, const lctx_attend_args & args) {
    size_t size = 0;
    with_shape(args, [&](auto s) {
        size = lctx_partial_states::size(
            args, lctx_max(n_split<decltype(s)>(device, args), lctx_cuda_list_splits(device, args)));
    });
    return size;
}

void lctx_cuda_decode(const lctx_cuda_queue & queue, const lctx_attend_args & args, const lctx_new_rows & rows) {
    with_shape(args, [&](auto s) {
        using S = decltype(s);
        const lctx_partial_states partial = {n_split<S>(queue.device, args), (float *)queue.work};
        const dim3 grid(args.choices().n_alone() * head_tiles(args, S::HEADS).n_tile, partial.n_split);
        lctx_launch(decode<S>, grid, THREADS, S::SHARED, queue.stream, args, partial, rows);
        lctx_cuda_finish_attend(queue, args, partial);
    });
}
