// *attend* of prompts: a dense loop over what the columns of a tile read, each of which is a query head of a token.
// Rows of a list that all columns read (lists.cu) are gathered 16 at a time; runs, which end at the row of each query,
// come last and are masked there (runs.cu).
//
// K and V take turns in shared memory: the one is on its way while products with the other run, which leaves room for
// two blocks of threads where a multiprocessor has 100 KiB. Where it has 164 KiB, there are two stages, and both of the
// next block are on their way while products with this one run. What is not f16 waits as bytes, and is unpacked into
// one tile, K first. GPUs of compute capability 9.0 may multiply in groups of warps (warpgroup.h).
#pragma once

#include "hadamard.h"
#include "partial-states.h"
#include "tile.h"
#include "walk.h"
#include "warpgroup.h"

#include <climits>
#include <type_traits>

namespace {

constexpr int GROUP =
    16;  // rows that lie together: chunks, units of staged rows and blocks of a run begin at multiples of it
constexpr int TILE = 64;  // tokens
constexpr int WARPS = 4, THREADS = WARPS * LCTX_WARP;

// F16: rows are copied as they are. One warp has 16 columns; those of wide heads share them and have a part of the
// dimensions each. IN_GROUP: the warps multiply together.
template <int DIM_, bool F16_, int STAGES_ = 1, bool IN_GROUP_ = false> struct shape {
    static constexpr int DIM = DIM_, STAGES = STAGES_;  // of K and V, padded
    static constexpr bool F16 = F16_, WIDE = DIM > 256, IN_GROUP = IN_GROUP_;
    static constexpr bool HAS_CODE = !IN_GROUP || LCTX_HAS_WARPGROUPS;  // on the architecture that is compiled for
    static constexpr int ROWS = DIM <= 128 ? 64 : WIDE ? GROUP : 32;    // of a block
    static constexpr int GROUPS = ROWS / GROUP;
    static constexpr int DIM_WARPS = WIDE ? WARPS : 1, COLUMNS = 16 * WARPS / DIM_WARPS, WARP_DIM = DIM / DIM_WARPS;
    static constexpr bool KEPT =
        WARP_DIM <= 144;  // queries are in registers, and in the memory of a tile on their way there
    using of_warps = std::conditional_t<WIDE, lctx_cuda_padded<DIM + 8>, lctx_cuda_swizzled<DIM>>;
    using layout = std::conditional_t<IN_GROUP, lctx_cuda_panels<DIM>, of_warps>;
    using of_warp = lctx_cuda_flash<WARP_DIM, ROWS, layout>;
    using flash = std::conditional_t<IN_GROUP, lctx_cuda_group_flash<DIM>, of_warp>;
    using queries = lctx_cuda_queries<WARP_DIM, KEPT, layout>;

    static constexpr int N_SOURCE = IN_GROUP ? 3 : 2;  // blocks whose place is known
    static constexpr size_t K_OR_V = (size_t)ROWS * layout::PER_ROW * sizeof(uint16_t);
    static constexpr size_t STAGE = (F16 ? 2 : 1) * K_OR_V, TILES = STAGES * STAGE;
    static constexpr size_t QUERIES = KEPT ? 0 : (size_t)COLUMNS * layout::PER_ROW * sizeof(uint16_t);
    static constexpr size_t SUMS = WIDE ? (size_t)DIM_WARPS * 16 * ROWS * sizeof(float) : 0;
    static_assert(!KEPT || (size_t)COLUMNS * layout::PER_ROW * sizeof(uint16_t) <= K_OR_V,
                  "queries are turned where values will be");

    __device__ static int column0() { return WIDE ? 0 : lctx_warp() * 16; }
    __device__ static int dim0() { return WIDE ? lctx_warp() * WARP_DIM : 0; }
};

// Tells what columns read of one segment: a run by cells, a far range by places in the list.
struct part {
    int32_t lo, hi;          // that any column reads
    int32_t all_lo, all_hi;  // that every column reads
    int32_t seg;             // of what the host has written
    int32_t listed;          // whether of a far range
    int32_t first;           // group of the list, of a far range
};

// Points to the groups of a block; nullptr: nothing is read of them.
template <int GROUPS> struct sources {
    const char *k[GROUPS], *v[GROUPS];
};

// Shared memory after the tiles; then groups of the list, and parts.
template <typename S> struct memory {
    sources<S::GROUPS> from[S::N_SOURCE];  // blocks use them in turn
    int32_t most[2];                       // bits of the largest value of a block if it does not fit f16, else 0
};

// Bytes of a block of rows as they are stored. Values that are channels of keys come with them.
struct raw_size {
    size_t k, v;

    template <typename S> LCTX_HD static raw_size of(const lctx_attend_args & a) {
        const size_t k = a.cache.k_pool.row_size, v = lctx_values_in_keys(a.cache) ? k : a.cache.v_pool.row_size;
        return S::F16 ? raw_size{0, 0} : raw_size{S::ROWS * k, S::ROWS * v};
    }
};

LCTX_HD int groups_of_chunk(const lctx_attend_args & a) {
    return a.params.chunk_size / GROUP;
}

template <typename S, typename C> size_t n_shared(const lctx_attend_args & a) {
    const raw_size raw = raw_size::of<S>(a);
    return S::TILES + raw.k + raw.v + S::QUERIES + S::SUMS + sizeof(memory<S>) + C::MEMORY +
           C::n_part(a) * sizeof(part) + C::n_group(a) * sizeof(int32_t);
}

// A block of a part.
struct cursor {
    int part, block;
    int n_before;  // blocks of the parts before it
};

// A block of threads.
template <typename S, typename C> struct dense_reader {
    const lctx_attend_args & a;
    C columns;
    const lctx_cuda_split split;
    const raw_size raw;
    char * shared;
    int32_t seq = -1;  // that is read

    typename S::flash f;
    typename S::queries q;
    int32_t turned[2] = {-1, -1};  // angles from which the columns `lane` and `lane` + 32 look
    int32_t lo[2], hi[2];          // what the columns of this lane read of a part
    bool reads = true;             // whether a column of this warp reads anything of it

    __device__ dense_reader(const lctx_attend_args & a, const C & columns, const lctx_cuda_split & split)
        : a(a),
          columns(columns),
          split(split),
          raw(raw_size::of<S>(a)),
          shared(S::IN_GROUP ? lctx_shared_panels() : lctx_shared()) {}

    // Tiles of block number i.
    __device__ uint16_t * k_tile(int i) const { return (uint16_t *)(shared + i % S::STAGES * S::STAGE); }
    __device__ uint16_t * v_tile(int i) const {
        return (uint16_t *)(shared + (i % S::STAGES + 1) * S::STAGE - S::K_OR_V);
    }
    __device__ char * k_raw() const { return shared + S::TILES; }
    __device__ char * v_raw() const { return k_raw() + raw.k; }
    // Queries that block number i meets, before the values of another one come into their place.
    __device__ uint16_t * queries(int i) const { return S::KEPT ? v_tile(i + 1) : (uint16_t *)(v_raw() + raw.v); }
    __device__ float * sums() const { return (float *)(v_raw() + raw.v + S::QUERIES); }
    __device__ memory<S> & m() const { return *(memory<S> *)((char *)sums() + S::SUMS); }
    __device__ char * columns_memory() const { return (char *)(&m() + 1); }
    __device__ part * parts() const { return (part *)(columns_memory() + C::MEMORY); }
    __device__ int32_t * groups() const { return (int32_t *)(parts() + n_part()); }

    __device__ int n_part() const { return C::n_part(a); }
    // What a column reads of this sequence, as cells.
    __device__ lctx_segment given(int column, int seg) const {
        lctx_segment s = columns.segment(column, seg);
        if constexpr (!C::LISTED) {
            const bool is_read = s.row0 < s.row1 && s.seq == seq;
            const lctx_cells cells(a.cache, columns.head_kv, seq);
            s.row0 = is_read ? cells.cell(s.row0) : 0, s.row1 = is_read ? cells.cell(s.row1) : 0;
        }
        return s;
    }

    // ---- what is read ----

    // The rows of the pools where the groups of the list begin.
    __device__ void list_groups() const {
        const int32_t * list = columns.list();
        const int per_chunk = groups_of_chunk(a);
        for (int i = (int)threadIdx.x; i < C::n_group(a); i += THREADS) {
            const int32_t chunk = list[i / per_chunk], row = chunk * a.params.chunk_size + i % per_chunk * GROUP;
            groups()[i] = chunk < 0 ? -1 : (int32_t)lctx_pool_row(a.cache.table, row, columns.head_kv, seq);
        }
    }
    // Far ranges come first. The lanes of a warp together.
    __device__ void make_parts() const {
        for (int i = lctx_warp(); i < n_part(); i += WARPS) {
            part p;
            if constexpr (C::LISTED) {
                const int n_range = n_part() - a.params.n_run;
                p = i < n_range ? part_of_range(a.params.n_run + i) : part_of_run(i - n_range);
            } else {
                p = part_of_run(i);
            }
            if (lctx_lane() == 0) {
                parts()[i] = p;
            }
        }
    }
    __device__ part part_of_range(int seg) const {
        const int32_t *list = columns.list(), size = a.params.chunk_size;
        const lctx_segment range = given(0, seg);
        int n_before = 0, n = 0;
        for (int i = lctx_lane(); i < a.params.tiles.n_shared; i += LCTX_WARP) {
            const int32_t row = list[i] * size;
            n_before += row >= 0 && row < range.row0, n += row >= range.row0 && row < range.row1;
        }
        n_before = lctx_warp_sum(n_before), n = range.row0 < range.row1 ? lctx_warp_sum(n) : 0;
        const int32_t end = n * size;
        return {0, end, 0, end, seg, 1, n_before * groups_of_chunk(a)};
    }
    __device__ part part_of_run(int seg) const {
        part p = {INT_MAX, 0, 0, INT_MAX, seg, 0, 0};
        for (int c = lctx_lane(); c < columns.n_column(); c += LCTX_WARP) {
            const lctx_segment s = given(c, seg);
            if (s.row0 < s.row1) {
                p.lo = lctx_min(p.lo, s.row0), p.hi = lctx_max(p.hi, s.row1);
            }
            p.all_lo = lctx_max(p.all_lo, s.row0), p.all_hi = lctx_min(p.all_hi, s.row0 < s.row1 ? s.row1 : 0);
        }
        p.lo = lctx_warp_min(p.lo), p.hi = -lctx_warp_min(-p.hi);
        p.all_lo = -lctx_warp_min(-p.all_lo), p.all_hi = lctx_warp_min(p.all_hi);
        return p;
    }
    __device__ static int first_block(const part & p) { return p.lo < p.hi ? p.lo / S::ROWS : 0; }
    __device__ static int end_block(const part & p) { return p.lo < p.hi ? (p.hi + S::ROWS - 1) / S::ROWS : 0; }
    __device__ bool is_valid(const cursor & c) const { return c.part < n_part(); }
    // The block of this split from `block` of a part on, or of the parts after it.
    __device__ cursor from(cursor c) const {
        while (is_valid(c) && c.block >= end_block(parts()[c.part])) {
            const part & p = parts()[c.part++];
            c.n_before += end_block(p) - first_block(p);
            if (is_valid(c)) {
                c.block = split.next(first_block(parts()[c.part]), c.n_before);
            }
        }
        return c;
    }
    __device__ cursor after(const cursor & c) const { return from({c.part, c.block + split.n_split, c.n_before}); }
    // Find where group `g` of a block lies.
    __device__ void look_up(const cursor & c, int g, const char *& k, const char *& v) const {
        const part & p = parts()[c.part];
        const int32_t at = c.block * S::ROWS + g * GROUP;
        k = v = nullptr;
        if (at + GROUP <= p.lo || at >= p.hi) {
            return;
        }
        if constexpr (S::F16 && !C::LISTED) {
            if (columns.is_converted()) {
                k = columns.converted_key(at), v = columns.converted_value(at);
                return;
            }
        }
        const size_t row =
            p.listed ? (size_t)groups()[p.first + at / GROUP] : lctx_pool_row(a.cache.table, at, columns.head_kv, seq);
        const bool near = !p.listed && (a.params.near_mask >> p.seg & 1);
        k = near ? lctx_near_row(a.cache, at, columns.head_kv, seq) : lctx_pool_at(a.cache.k_pool, row);
        v = lctx_pool_at(a.cache.v_pool, row);
    }

    // Bytes of a row of halves: of a pool, or converted.
    __device__ size_t row_size(const lctx_pool_args & pool, int n_dim) const {
        if constexpr (!C::LISTED) {
            if (columns.is_converted()) {
                return n_dim * sizeof(uint16_t);
            }
        }
        return pool.row_size;
    }

    // ---- rows on their way ----

    // Rows of a block that any column reads.
    struct bounds {
        int lo, hi;
        __device__ bool has(int row) const { return row >= lo && row < hi; }
        __device__ bool all() const { return lo == 0 && hi == S::ROWS; }
    };
    __device__ bounds bounds_of(const cursor & c) const {
        const part & p = parts()[c.part];
        return {lctx_max(p.lo - c.block * S::ROWS, 0), lctx_min(p.hi - c.block * S::ROWS, S::ROWS)};
    }
    // Begin to copy the rows of a block; others and dimensions that no row has become 0, for 0 times NaN is NaN. Eight
    // lanes share a row.
    __device__ __forceinline__ void copy_rows(const char * const (&from)[S::GROUPS], size_t row_size, int n_dim,
                                              const bounds & b, uint16_t * to) const {
        constexpr int LANES = 8, STEPS = (S::DIM / 8 + LANES - 1) / LANES;
        static_assert(THREADS / LANES == GROUP, "threads copy a group at a time");
        const int row = (int)threadIdx.x / LANES, d0 = (int)threadIdx.x % LANES * 8;
        const size_t offset = row * row_size + d0 * sizeof(uint16_t);
        const int at = S::layout::at(row, d0);
        const auto each = [&](auto && f) {
            lctx_unrolled<S::GROUPS>([&](int g) {
                const char * source = from[g] + offset;
                lctx_unrolled<STEPS>([&](int step) {
                    const int d = d0 + step * LANES * 8;
                    if (S::DIM % (LANES * 8) == 0 || d < S::DIM) {
                        uint16_t * place = to + g * GROUP * S::layout::STRIDE + S::layout::plus(at, step * LANES * 8);
                        f(g * GROUP + row, d, source + step * LANES * 16, place);
                    }
                });
            });
        };
        if (b.all() && n_dim == S::DIM) {
            each([&](int, int, const char * source, uint16_t * to) { lctx_copy_16(to, source); });
        } else {
            each([&](int row, int d, const char * source, uint16_t * to) {
                lctx_copy_16_or_zeros(to, b.has(row) && d < n_dim ? source : nullptr);
            });
        }
    }
    // Begin to copy the groups of a block as they are stored: a group has a multiple of 16 bytes.
    __device__ __forceinline__ void copy_bytes(const char * const (&from)[S::GROUPS], size_t row_size,
                                               char * to) const {
        constexpr int SHARE = WARPS / S::GROUPS;  // warps that copy a group together
        const int group = lctx_warp() / SHARE;
        const char * source = from[group];
        for (uint32_t i = lctx_warp() % SHARE * LCTX_WARP + lctx_lane(); source && i < row_size;
             i += SHARE * LCTX_WARP) {
            lctx_copy_16(to + (group * row_size + i) * 16, source + i * 16);
        }
    }
    __device__ __forceinline__ void fetch_k(const cursor & c, int i) const {
        if (is_valid(c)) {
            const auto & from = m().from[i % S::N_SOURCE].k;
            if constexpr (S::F16) {
                copy_rows(from, row_size(a.cache.k_pool, a.head_dim_k), a.head_dim_k, bounds_of(c), k_tile(i));
            } else {
                copy_bytes(from, a.cache.k_pool.row_size, k_raw());
            }
        }
        lctx_copy_end_group();
    }
    __device__ __forceinline__ void fetch_v(const cursor & c, int i) const {
        if (is_valid(c)) {
            const auto & from = m().from[i % S::N_SOURCE];
            if constexpr (S::F16) {
                copy_rows(from.v, row_size(a.cache.v_pool, a.head_dim_v), a.head_dim_v, bounds_of(c), v_tile(i));
            } else if (lctx_values_in_keys(a.cache)) {
                copy_bytes(from.k, a.cache.k_pool.row_size, v_raw());
            } else {
                copy_bytes(from.v, a.cache.v_pool.row_size, v_raw());
            }
        }
        lctx_copy_end_group();
    }

    // ---- bytes to f16 ----

    // Whole blocks of 32 elements: the threads that share a row take them in turn.
    template <typename T>
    __device__ void unpack_blocks(const char * rows, size_t row_size, int n_dim, const bounds & b) const {
        constexpr int LANES = THREADS / S::ROWS, STEP = LANES * T::BLOCK;
        const int row = (int)threadIdx.x % S::ROWS, first = (int)threadIdx.x / S::ROWS * T::BLOCK;
        const auto each = [&](auto && f) {
            const char * block = rows + row * row_size + first / T::BLOCK * T::SIZE;
            int at = S::layout::at(row, first);
#ifdef __CUDACC__
#pragma unroll 1
#endif
            for (int d = first; d < S::DIM; d += STEP, block += LANES * T::SIZE, at = S::layout::plus(at, STEP)) {
                f(d, block, [&](int i, const uint4 & x) {
                    if (S::DIM % T::BLOCK == 0 || d + i < S::DIM) {
                        *(uint4 *)(k_tile(0) + S::layout::plus(at, i)) = x;
                    }
                });
            }
        };
        if (b.all() && n_dim == S::DIM) {
            return each([&](int, const char * block, auto && put) { T::each_halves(block, put); });
        }
        each([&](int d, const char * block, auto && put) {
            if (b.has(row) && d < n_dim) {
                T::each_halves(block, put);
            } else {
                lctx_unrolled<T::BLOCK / 8>([&](int j) { put(8 * j, uint4{0, 0, 0, 0}); });
            }
        });
    }
    // f(row, first element) gives 8 elements of a row.
    template <typename F> __device__ __forceinline__ void put_each_8(F && f) const {
        for (int i = (int)threadIdx.x; i < S::ROWS * (S::DIM / 8); i += THREADS) {
            const int row = i / (S::DIM / 8), d = i % (S::DIM / 8) * 8;
            *(uint4 *)(k_tile(0) + S::layout::at(row, d)) = f(row, d);
        }
    }
    // Plain numbers times `factor`; returns the largest of this thread before that.
    template <typename T> __device__ float unpack_numbers(const char * rows, size_t row_size, int n_dim,
                                                          const bounds & b, float factor) const {
        float most = 0.0f;
        put_each_8([&](int row, int d) {
            float x[8] = {};
            if (b.has(row) && d < n_dim) {
                lctx_load_8<T>(rows + row * row_size, d, x);
            }
            lctx_unrolled<8>([&](int j) {
                most = fabsf(x[j]) > most ? fabsf(x[j]) : most;  // not NaN
                x[j] *= factor;
            });
            return lctx_pack_8(x);
        });
        return most;
    }
    // Unpack rows of any type. Returns 0 where all are halves.
    __device__ float unpack(ggml_type type, const char * rows, size_t row_size, int n_dim, const bounds & b,
                            float factor) const {
        float most = 0.0f;
        lctx_cuda_with_rows(type, [&](auto of_type) {
            using T = decltype(of_type);
            if constexpr (T::BLOCK == 32) {
                unpack_blocks<T>(rows, row_size, n_dim, b);
            } else if constexpr (std::is_same_v<T, lctx_cuda_f16>) {
                put_each_8([&](int row, int d) {
                    return b.has(row) && d < n_dim ? lctx_load_halves<T>(rows + row * row_size, d) : uint4{0, 0, 0, 0};
                });
            } else {
                most = unpack_numbers<T>(rows, row_size, n_dim, b, factor);
            }
        });
        return most;
    }
    __device__ void unpack_keys(const cursor & c) const {
        unpack(a.cache.k_pool.type, k_raw(), a.cache.k_pool.row_size, a.head_dim_k, bounds_of(c), 1.0f);
    }
    // Returns what the weights of the values are to be multiplied by.
    __device__ float unpack_values(const cursor & c, int i) const {
        const lctx_pool_args &k = a.cache.k_pool, &v = a.cache.v_pool;
        const char * rows = v_raw() + (lctx_values_in_keys(a.cache) ? v.data - k.data : 0);
        return lctx_cuda_scaled(m().most, i, [&](float factor) {
            return unpack(v.type, rows, v.row_size, a.head_dim_v, bounds_of(c), 1.0f / factor);
        });
    }

    // ---- columns ----

    // Return whether a column looks at a part from another angle than at what it read before; all warps find the same.
    __device__ bool turns(const part & p) {
        bool any = false;
        int32_t angle[2];
        lctx_unrolled<2>([&](int i) {
            const int c = lctx_lane() + i * LCTX_WARP;
            const lctx_segment s = given(lctx_min(c, S::COLUMNS - 1), p.seg);
            angle[i] = s.angle;
            any |= s.row0 < s.row1 && angle[i] != turned[i];
        });
        any = lctx_ballot(any) != 0;
        lctx_unrolled<2>([&](int i) { turned[i] = any ? angle[i] : turned[i]; });
        return any;
    }
    // Queries as they see a part, for block number `block`; scores are base 2 without softcap.
    __device__ void turn(const part & p, int block) const {
        // two stages leave no register in which what follows from it could wait
        const float kept =
            S::STAGES == 1 ? a.params.scale : lctx_as_float((uint32_t)lctx_kept((int)lctx_as_uint(a.params.scale)));
        const float scale = a.params.softcap != 0.0f ? kept / a.params.softcap : kept * LCTX_LOG2_E;
        if (a.params.hadamard.k != 0) {
            for (int c = lctx_warp(); c < columns.n_column(); c += WARPS) {
                turn_transformed(c, columns.segment(c, p.seg).angle, scale, block);
            }
            return;
        }
        constexpr int PAIRS = S::DIM / 2;
        const int half = a.n_dims / 2;
        const bool neox = a.params.rope_mode == GGML_ROPE_TYPE_NEOX;
#ifdef __CUDACC__
#pragma unroll 4
#endif
        for (int i = (int)threadIdx.x; i < S::COLUMNS * PAIRS; i += THREADS) {
            const int c = i / PAIRS, pair = i % PAIRS;
            const bool rotates = pair < half;
            const int first = rotates && neox ? pair : 2 * pair, second = rotates && neox ? pair + half : first + 1;
            float x = 0.0f, y = 0.0f;
            if (first < a.head_dim_k && c < columns.n_column()) {
                const float * of_token = query(c);
                x = of_token[first], y = of_token[second];
            }
            if (rotates) {
                const float * cs = a.angles + (size_t)columns.segment(c, p.seg).angle * a.n_dims + 2 * pair;
                const float rotated = x * cs[0] - y * cs[1];
                y = x * cs[1] + y * cs[0], x = rotated;
            }
            const uint32_t both = lctx_pack_limited(scale * x, scale * y);
            queries(block)[S::layout::at(c, first)] = (uint16_t)both;
            queries(block)[S::layout::at(c, second)] = (uint16_t)(both >> 16);
        }
    }
    __device__ const float * query(int column) const { return (const float *)columns.query(column); }
    __device__ void turn_transformed(int column, int32_t angle, float scale, int block) const {
        constexpr int N = (S::DIM + LCTX_WARP - 1) / LCTX_WARP;
        float x[N];
        lctx_turn_query(a, columns.token(column), columns.head(column), angle, scale, x);
        lctx_unrolled<N>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            if (d < S::DIM) {
                queries(block)[S::layout::at(column, d)] = (uint16_t)lctx_pack_limited(x[i], 0.0f);
            }
        });
    }
    // Begin with a part at block number i, when no thread reads values of the one before.
    __device__ void enter(const part & p, int i) {
        lctx_unrolled<2>([&](int h) {
            const lctx_segment s = given(S::column0() + f.column(h), p.seg);
            lo[h] = p.listed ? 0 : s.row0, hi[h] = p.listed ? p.hi : s.row1;
        });
        if constexpr (!C::LISTED) {
            reads = lctx_ballot(lo[0] < hi[0] || lo[1] < hi[1]) != 0;
        }
        if (turns(p)) {
            turn(p, i);
            __syncthreads();
            q.take(queries(i) + S::column0() * S::layout::STRIDE + S::dim0());
            __syncthreads();
        }
    }
    // Keys of a block to weights.
    __device__ __forceinline__ void score(const cursor & c, int i) {
        f.scores(q, k_tile(i) + S::dim0());
        if constexpr (S::WIDE) {
            f.template add_warps<S::DIM_WARPS>(sums());
        }
        limit(c);
        f.softmax();
    }
    // Scores to those that a softmax takes.
    __device__ __forceinline__ void limit(const cursor & c) {
        const int first = c.block * S::ROWS;
        if (a.params.softcap != 0.0f) {
            f.each_score([&](float & s, int, int) { s = LCTX_LOG2_E * a.params.softcap * lctx_tanh(s); });
        }
        if (first < parts()[c.part].all_lo || first + S::ROWS > parts()[c.part].all_hi) {
            f.each_score(
                [&](float & s, int i, int row) { s = first + row >= lo[i] && first + row < hi[i] ? s : -INFINITY; });
        }
    }

    __device__ void run() {
        f.clear();
        if constexpr (C::LISTED) {
            seq = columns.segment(0, 0).seq;
            read_sequence();
        } else {
            for (seq = columns.next_sequence(-1); seq != INT_MAX; seq = columns.next_sequence(seq)) {
                read_sequence();
                __syncthreads();  // before shared memory says what is read of the next one
            }
        }
        f.finish();
    }
    __device__ __forceinline__ void read_sequence() {
        if constexpr (C::LISTED) {
            list_groups();
        }
        make_parts();
        if (threadIdx.x < 2) {
            m().most[threadIdx.x] = 0;
        }
        __syncthreads();
        cursor now = from({0, split.next(first_block(parts()[0]), 0), 0});
        put_sources(now, 0);
        if constexpr (S::IN_GROUP) {
            return lctx_cuda_read_in_group(*this, now);
        }
        if constexpr (S::STAGES > 1) {
            return read_stages(now);
        }
        __syncthreads();
        fetch_k(now, 0);
        if constexpr (!S::F16) {
            fetch_v(now, 0);
        }
        int loaded = -1;
        for (int i = 0; is_valid(now); i++) {
            const cursor next = after(now);
            const bool enters = now.part != loaded;
            loaded = now.part;
            if constexpr (S::F16) {
                read_halves(now, next, i, enters);
            } else {
                read_bytes(now, next, i, enters);
            }
            now = next;
        }
    }
    // Into the memory where block number i lies, a thread for a group.
    __device__ void put_sources(const cursor & c, int i) const {
        if (threadIdx.x < S::GROUPS && is_valid(c)) {
            auto & to = m().from[i % S::N_SOURCE];
            look_up(c, (int)threadIdx.x, to.k[threadIdx.x], to.v[threadIdx.x]);
        }
    }
    // Read the blocks from `now` on, each while the next one is on its way.
    __device__ __forceinline__ void read_stages(cursor now) {
        cursor next = after(now);
        put_sources(next, 1);
        __syncthreads();
        fetch_k(now, 0), fetch_v(now, 0);
        bool enters = true;
        for (int i = 0; is_valid(now); i++) {
            const cursor later = after(next);
            lctx_copy_wait<0>();
            __syncthreads();  // the block is here, and all have read the one before it
            if (enters) {
                enter(parts()[now.part], i);
            }
            fetch_k(next, i + 1), fetch_v(next, i + 1);
            put_sources(later, i + 2);
            if (reads) {
                score(now, i);
                f.weigh(v_tile(i) + S::dim0());
            }
            enters = next.part != now.part;
            now = next, next = later;
        }
    }
    // Block number i. Its keys are on their way; those of the next one are at the end.
    __device__ __forceinline__ void read_halves(const cursor & now, const cursor & next, int i, bool enters) {
        lctx_copy_wait<0>();
        __syncthreads();  // keys are here, and all have read the values before
        if (enters) {
            enter(parts()[now.part], i);
        }
        fetch_v(now, i);
        put_sources(next, i + 1);
        if (reads) {
            score(now, i);
        }
        lctx_copy_wait<0>();
        __syncthreads();  // values are here, and all have read the keys
        fetch_k(next, i + 1);
        if (reads) {
            f.weigh(v_tile(i) + S::dim0());
        }
    }
    // Read rows that are unpacked; keys and values are on their way.
    __device__ __forceinline__ void read_bytes(const cursor & now, const cursor & next, int i, bool enters) {
        lctx_copy_wait<1>();
        __syncthreads();  // keys are here, and all have read the values before
        if (enters) {
            enter(parts()[now.part], i);
        }
        unpack_keys(now);
        put_sources(next, i + 1);
        __syncthreads();
        fetch_k(next, i + 1);
        if (reads) {
            score(now, i);
        }
        lctx_copy_wait<1>();
        __syncthreads();  // values are here, and all have read the keys
        const float factor = unpack_values(now, i);
        fetch_v(next, i + 1);
        if (!reads) {
            return;
        }
        if (factor != 1.0f) {
            f.each_score([&](float & weight, int, int) { weight *= factor; });
        }
        f.weigh(v_tile(i) + S::dim0());
    }
    __device__ void write(const lctx_partial_states & partial) const {
        f.each_result([&](int c, int d, float m, float l, float o0, float o1) {
            const int column = S::column0() + c;
            if (column < columns.n_column()) {
                partial.write(a, split.index, columns.token(column), columns.head(column), S::dim0() + d,
                              {m, l, o0, o1});
            }
        });
    }
};

// f(shape) with the shape of these arguments.
template <typename F> void with_shape(const lctx_attend_args & a, F && f) {
    const bool f16 = a.cache.k_pool.type == GGML_TYPE_F16 && a.cache.v_pool.type == GGML_TYPE_F16;
    lctx_cuda_with_width(lctx_max(a.head_dim_k, a.head_dim_v), [&](auto width) {
        constexpr int DIM = decltype(width)::DIM;
        return f16 ? f(shape<DIM, true>()) : f(shape<DIM, false>());
    });
}

// f(shape) with two stages where a multiprocessor has room for two such blocks of threads, else with one; whose warps
// multiply in a group where the device shall.
template <typename S, template <int> class COLUMNS, typename F>
void with_stages(const lctx_cuda_device & device, const lctx_attend_args & a, F && f) {
    constexpr int MOST_DIM = 128;
    if constexpr (S::F16 && S::DIM <= MOST_DIM) {
        const auto fits = [&](auto s) {
            return 2 * n_shared<decltype(s), COLUMNS<S::COLUMNS>>(a) <= device.max_shared;
        };
        if constexpr (S::DIM % 64 == 0) {
            if (device.has_warpgroups && fits(shape<S::DIM, true, 2, true>())) {
                return f(shape<S::DIM, true, 2, true>());
            }
        }
        if (fits(shape<S::DIM, true, 2>())) {
            return f(shape<S::DIM, true, 2>());
        }
    }
    f(S());
}

// Bytes of shared memory of a kernel with columns COLUMNS<N>.
template <template <int> class COLUMNS> size_t shared_size(const lctx_attend_args & a) {
    size_t size = 0;
    with_shape(a, [&](auto s) {
        using S = decltype(s);
        size = n_shared<S, COLUMNS<S::COLUMNS>>(a);
    });
    return size;
}

}  // namespace
