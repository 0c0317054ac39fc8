// *attend* of few tokens whose heads choose for themselves: heads share few rows, so a tile is one head of one token, and what it reads is
// its list of segments. The list is cut into pieces of 16 rows whose number follows from its ends, so that every warp finds its split
// without a walk. A warp reads rows from memory into registers and has a query and a state of its own: warps do not wait for each other
// until the states are merged.
#include "decode.h"

#include "hadamard.h"
#include "lists.h"
#include "tile.h"
#include "walk.h"

namespace {

constexpr int PIECE = 16;        // rows
constexpr int MOST_TOKENS = 16;  // of more tokens those that follow each other share enough for the tiles of attend.cu
constexpr int WARPS = 4, THREADS = WARPS * LCTX_WARP;
constexpr int PER_MULTIPROCESSOR = 4;  // blocks of threads

// How a warp holds rows: LANES lanes share one, and each of them has OCTETS times 8 channels of it. F16: K and V are f16, whose rows wait
// in half of the registers that floats take.
template <int LANES_, int OCTETS_, bool F16_> struct shape {
    static constexpr bool F16 = F16_;
    static constexpr int LANES = LANES_, OCTETS = OCTETS_;
    static constexpr int DIM = 8 * LANES * OCTETS;
    static constexpr int ROWS = LCTX_WARP / LANES;                                // side by side
    static constexpr int STEPS = lctx_min(PIECE / ROWS, (F16 ? 8 : 4) / OCTETS);  // one after the other, on their way together
    static constexpr int STATE = DIM + 4;                                         // floats of a warp in shared memory: m, l, o
    static constexpr size_t SHARED = (size_t)WARPS * STATE * sizeof(float);

    static __device__ int row() { return lctx_lane() / LANES; }
    static __device__ int channel(int octet) { return 8 * (lctx_lane() % LANES + octet * LANES); }
};

// ---- which rows ----

// Cells of a list, PIECE at most.
struct piece {
    int32_t lo, hi, angle, near;
    int32_t first_page, last_page;
};

__device__ piece from_lane(const piece & p, int lane) {
    return {lctx_shuffle(p.lo, lane),   lctx_shuffle(p.hi, lane),         lctx_shuffle(p.angle, lane),
            lctx_shuffle(p.near, lane), lctx_shuffle(p.first_page, lane), lctx_shuffle(p.last_page, lane)};
}

// The segments of a head of a token: runs, then chunks. A chunk has as many pieces as it would have if nothing of it were evicted.
struct list {
    const lctx_attend_args & a;
    const lctx_segment * segs;
    int head_kv, seq;
    lctx_cells cells;
    int32_t lo = 0, hi = 0, first = 0;  // of the run of this lane: cells, and the number of its first piece
    int n_in_runs = 0, per_chunk, n;    // pieces

    // Of a token with this index among those outside of tiles. The lanes of a warp together.
    __device__ list(const lctx_attend_args & a, int index, int head)
        : a(a),
          segs(a.segs + ((int64_t)index * a.n_head + head) * a.n_seg),
          head_kv(head / (a.n_head / a.n_head_kv)),
          seq(segs->seq),
          cells(a.cache, head_kv, seq),
          per_chunk((int)lctx_div_up(a.params.chunk_size, PIECE)) {
        if (lctx_lane() < a.params.n_run && segs[lctx_lane()].row0 < segs[lctx_lane()].row1) {
            lo = cells.cell(segs[lctx_lane()].row0), hi = cells.cell(segs[lctx_lane()].row1);
        }
        const int mine = (int)lctx_div_up(hi - lo, PIECE);
        for (int run = 0; run < a.params.n_run; run++) {
            const int n_of = lctx_shuffle(mine, run);
            first += run < lctx_lane() ? n_of : 0;
            n_in_runs += n_of;
        }
        n = n_in_runs + n_chunk() * per_chunk;
    }
    // Segments of chunks that are there come first: the lanes look at an equal number each of those in question.
    __device__ int n_chunk() const {
        const lctx_segment * chunks = segs + a.params.n_run;
        int n_there = 0;
        for (int left = a.n_seg - a.params.n_run; left > 0;) {
            const int step = (int)lctx_div_up(left, LCTX_WARP), last = (lctx_lane() + 1) * step - 1;
            const bool is_there = last < left && chunks[n_there + last].row0 < chunks[n_there + last].row1;
            const int n_step = __popc(lctx_ballot(is_there));
            n_there += n_step * step;
            left = lctx_min(step - 1, left - n_step * step);
        }
        return n_there;
    }
    // Piece i, another for every lane; without cells beyond the end. The lanes of a warp together.
    __device__ piece at(int i) const {
        piece p = {};
        for (int run = 0; run < a.params.n_run; run++) {
            const int before = lctx_shuffle(first, run), end = lctx_shuffle(hi, run);
            const int begin = lctx_shuffle(lo, run) + (i - before) * PIECE;
            if (i >= before && begin < end) {
                p = {begin, lctx_min(begin + PIECE, end), segs[run].angle, (int32_t)(a.params.near_mask >> run & 1)};
            }
        }
        if (i >= n_in_runs && i < n) {
            const lctx_segment s = segs[a.params.n_run + (i - n_in_runs) / per_chunk];
            const int begin = cells.cell(s.row0) + (i - n_in_runs) % per_chunk * PIECE;
            p = {begin, lctx_min(begin + PIECE, cells.cell(s.row1)), s.angle, 0};
        }
        if (p.lo < p.hi) {
            p.first_page = lctx_page_of(a.cache.table, p.lo, head_kv, seq);
            p.last_page = lctx_page_of(a.cache.table, p.hi - 1, head_kv, seq);
        }
        return p;
    }
    __device__ size_t pool_row(const piece & p, int cell) const {
        const lctx_table_args & table = a.cache.table;  // a piece lies in two pages at most, or units where rows are staged
        return lctx_row_in(table, cell >> table.shift == p.lo >> table.shift ? p.first_page : p.last_page, cell);
    }
    __device__ const char * key(const piece & p, int cell) const {
        return p.near ? lctx_near_row(a.cache, cells.row(cell), head_kv, seq) : lctx_pool_at(a.cache.k_pool, pool_row(p, cell));
    }
    __device__ const char * value(const piece & p, int cell) const { return lctx_pool_at(a.cache.v_pool, pool_row(p, cell)); }
};

// ---- rows in registers ----

// 8 channels of a row: halves, where these have what is stored, else floats.
template <typename T> struct octet_of_floats {
    float x[8];
    __device__ void load(const char * row, int d) { lctx_load_8<T>(row, d, x); }
    __device__ void clear() {
        lctx_unrolled<8>([&](int i) { x[i] = 0.0f; });
    }
    __device__ float at(int i) const { return x[i]; }
};

template <typename T> struct octet {
    uint32_t x[4];
    __device__ void load(const char * row, int d) {
        const uint4 halves = lctx_load_halves<T>(row, d);
        x[0] = halves.x, x[1] = halves.y, x[2] = halves.z, x[3] = halves.w;
    }
    __device__ void clear() {
        lctx_unrolled<4>([&](int i) { x[i] = 0; });
    }
    __device__ float at(int i) const { return lctx_from_half((uint16_t)(x[i / 2] >> i % 2 * 16)); }
};
template <> struct octet<lctx_cuda_f32> : octet_of_floats<lctx_cuda_f32> {};
template <> struct octet<lctx_cuda_bf16> : octet_of_floats<lctx_cuda_bf16> {};

// Steps of rows, side by side in the lanes.
template <typename S, typename T> struct rows {
    octet<T> x[S::STEPS][S::OCTETS];

    // row(step): the row of this lane, nullptr for none, which is read as zeros.
    template <typename Row> __device__ __forceinline__ void load(int n_dim, Row && row) {
        lctx_unrolled<S::STEPS>([&](int step) {
            const char * from = row(step);
            lctx_unrolled<S::OCTETS>([&](int j) {
                if (from && S::channel(j) < n_dim) {
                    x[step][j].load(from, S::channel(j));
                } else {
                    x[step][j].clear();
                }
            });
        });
    }
    // What this lane has of the products with a query.
    __device__ __forceinline__ void multiply(const float (&q)[S::OCTETS][8], float (&s)[S::STEPS]) const {
        lctx_unrolled<S::STEPS>([&](int step) {
            s[step] = 0.0f;
            lctx_unrolled<S::OCTETS>([&](int j) { lctx_unrolled<8>([&](int i) { s[step] += q[j][i] * x[step][j].at(i); }); });
        });
    }
    // o += rows times their weights.
    __device__ __forceinline__ void weigh(const float (&weight)[S::STEPS], float (&o)[S::OCTETS][8]) const {
        lctx_unrolled<S::STEPS>([&](int step) {
            lctx_unrolled<S::OCTETS>([&](int j) { lctx_unrolled<8>([&](int i) { o[j][i] += weight[step] * x[step][j].at(i); }); });
        });
    }
};

// ---- a warp ----

// The query of a warp, and the state of the rows that a lane has seen, with those of the lanes that share them.
template <typename S> struct reader {
    const lctx_attend_args & a;
    const list & l;
    float * shared;  // [S::STATE] of this warp
    float q[S::OCTETS][8] = {}, o[S::OCTETS][8] = {};
    float m = -INFINITY, total = 0.0f;

    // Look from an angle. Scores are base 2 without softcap.
    __device__ void turn(int token, int head, int32_t angle) {
        const float scale = a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale * LCTX_LOG2_E;
        float x[S::DIM / LCTX_WARP];
        lctx_turn_query(a, token, head, angle, scale, x);
        lctx_sync_warp();  // all have read the query before
        lctx_unrolled<S::DIM / LCTX_WARP>([&](int i) { shared[i * LCTX_WARP + lctx_lane()] = x[i]; });
        lctx_sync_warp();
        lctx_unrolled<S::OCTETS>([&](int j) { lctx_load_8(shared + S::channel(j), q[j]); });
    }
    // Products of cells from `cell` on, before the end of a piece, to weights.
    __device__ __forceinline__ void softmax(float (&s)[S::STEPS], int cell, int end) {
        float most = m;
        lctx_unrolled<S::STEPS>([&](int step) {
            s[step] = lctx_warp_sum(s[step], S::LANES);
            s[step] = a.params.softcap != 0.0f ? LCTX_LOG2_E * a.params.softcap * lctx_tanh(s[step]) : s[step];
            s[step] = cell + step * S::ROWS < end ? s[step] : -INFINITY;
            most = fmaxf(most, s[step]);
        });
        const float base = most == -INFINITY ? 0.0f : most;  // no row yet: keeps the exponents defined
        const float factor = lctx_exp2(m - base);
        m = most, total *= factor;
        lctx_unrolled<S::OCTETS>([&](int j) { lctx_unrolled<8>([&](int i) { o[j][i] *= factor; }); });
        lctx_unrolled<S::STEPS>([&](int step) {
            s[step] = lctx_exp2(s[step] - base);
            total += s[step];
        });
    }
    __device__ __forceinline__ void read(const piece & p) {
        for (int first = p.lo + S::row(); first - S::row() < p.hi; first += S::STEPS * S::ROWS) {
            const auto cell = [&](int step) { return first + step * S::ROWS; };
            const auto key = [&](int step) { return cell(step) < p.hi ? l.key(p, cell(step)) : nullptr; };
            const auto value = [&](int step) { return cell(step) < p.hi ? l.value(p, cell(step)) : nullptr; };
            float s[S::STEPS];
            if constexpr (S::F16) {  // values are on their way before scores are known
                rows<S, lctx_cuda_f16> k, v;
                k.load(a.head_dim_k, key);
                v.load(a.head_dim_v, value);
                k.multiply(q, s);
                softmax(s, first, p.hi);
                v.weigh(s, o);
            } else {
                lctx_cuda_with_rows(a.cache.k_pool.type, [&](auto type) {
                    rows<S, decltype(type)> k;
                    k.load(a.head_dim_k, key);
                    k.multiply(q, s);
                });
                softmax(s, first, p.hi);
                lctx_cuda_with_rows(a.cache.v_pool.type, [&](auto type) {
                    rows<S, decltype(type)> v;
                    v.load(a.head_dim_v, value);
                    v.weigh(s, o);
                });
            }
        }
    }
    // The lanes that had other rows add theirs; the state of the warp into shared memory.
    __device__ void finish() {
        const float most = lctx_warp_max(m), factor = total != 0.0f ? lctx_exp2(m - most) : 0.0f;
        const auto over_rows = [&](float x) {
            for (int step = S::LANES; step < LCTX_WARP; step *= 2) {
                x += lctx_shuffle_xor(x, step);
            }
            return x;
        };
        lctx_sync_warp();  // all have read the query
        const float l = over_rows(total * factor);
        lctx_unrolled<S::OCTETS>([&](int j) {
            lctx_unrolled<8>([&](int i) {
                const float sum = over_rows(o[j][i] * factor);
                if (S::row() == 0) {
                    shared[2 + S::channel(j) + i] = sum;
                }
            });
        });
        if (lctx_lane() == 0) {
            shared[0] = most, shared[1] = l;
        }
    }
};

template <typename S> __global__ void __launch_bounds__(THREADS, PER_MULTIPROCESSOR)
    decode(const lctx_attend_args a, const lctx_partial_states partial) {
    const int index = (int)blockIdx.x / a.n_head, head = (int)blockIdx.x % a.n_head, split = (int)blockIdx.y;
    const int token = lctx_cuda_token_alone(a, index);
    const int64_t warp_split = split * WARPS + lctx_warp(), n_warp_split = partial.n_split * WARPS;
    const list l(a, index, head);
    const int first = (int)(warp_split * l.n / n_warp_split), end = (int)((warp_split + 1) * l.n / n_warp_split);
    float * shared = (float *)lctx_shared();
    reader<S> r = {a, l, shared + lctx_warp() * S::STATE};
    int32_t angle = -1;
    for (int i = first; i < end; i += LCTX_WARP) {
        const piece mine = l.at(lctx_min(i + lctx_lane(), l.n));  // the next ones, a lane each
        for (int lane = 0; lane < lctx_min(LCTX_WARP, end - i); lane++) {
            const piece p = from_lane(mine, lane);
            if (p.lo >= p.hi) {
                continue;
            }
            if (p.angle != angle) {
                angle = p.angle;
                r.turn(token, head, angle);
            }
            r.read(p);
        }
    }
    r.finish();
    __syncthreads();
    for (int d = 2 * (int)threadIdx.x; d < S::DIM; d += 2 * THREADS) {
        partial.write(a, split, token, head, d, lctx_merge_states(shared, WARPS, S::STATE, d));
    }
}

int n_split(const lctx_cuda_device & device, const lctx_attend_args & a) {
    const int n_wanted = PER_MULTIPROCESSOR * device.n_multiprocessor / (a.choices().n_alone() * a.n_head);
    return lctx_max(1, lctx_min(n_wanted, (int)a.cache.table.head_stride));  // no more than there are pages
}

template <typename S> void launch(const lctx_cuda_queue & queue, const lctx_attend_args & a, const lctx_partial_states & partial) {
    lctx_launch(decode<S>, dim3(a.choices().n_alone() * a.n_head, partial.n_split), THREADS, S::SHARED, queue.stream, a, partial);
}

template <bool F16> void launch(const lctx_cuda_queue & queue, const lctx_attend_args & a, const lctx_partial_states & partial) {
    const int dim = lctx_max(a.head_dim_k, a.head_dim_v);
    return dim <= 64    ? launch<shape<8, 1, F16>>(queue, a, partial)
           : dim <= 128 ? launch<shape<16, 1, F16>>(queue, a, partial)
           : dim <= 256 ? launch<shape<32, 1, F16>>(queue, a, partial)
           : dim <= 512 ? launch<shape<32, 2, F16>>(queue, a, partial)
                        : launch<shape<32, 3, F16>>(queue, a, partial);
}

}  // namespace

bool lctx_cuda_decodes(const lctx_attend_args & a) {
    return a.params.chunk_size > 0 && a.n_choice == a.n_head && a.choices().n_alone() <= MOST_TOKENS && a.params.n_run <= LCTX_WARP;
}

size_t lctx_cuda_decode_wsize(const lctx_cuda_device & device, const lctx_attend_args & args) {
    return lctx_partial_states::size(args, lctx_max(n_split(device, args), lctx_cuda_list_splits(device, args)));
}

void lctx_cuda_decode(const lctx_cuda_queue & queue, const lctx_attend_args & args) {
    const lctx_partial_states partial = {n_split(queue.device, args), (float *)queue.work};
    const bool f16 = args.cache.k_pool.type == GGML_TYPE_F16 && args.cache.v_pool.type == GGML_TYPE_F16;
    (f16 ? launch<true> : launch<false>)(queue, args, partial);
    lctx_cuda_finish_attend(queue, args, partial);
}
