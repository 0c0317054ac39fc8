// *evict*: rows without enough votes leave, the others move up inside the pages of their head, as they are stored.
//
// Whether a row stays is a comparison with one number per head, found first. Then every strip of the bytes of K, V and
// index rows has a block of threads of its own, so that a head's rows move on many multiprocessors in their order; row
// numbers and scores, by which the strips know what stays, move last.
#include "../ops/cache.h"
#include "index.h"
#include "kernels.h"

namespace {

constexpr int THREADS = 512;

// Tells what was decided for a head: cells from n_old on stay, and those before with a rank of at least `least`.
struct decision {
    uint64_t least;
    int32_t n_held;
    int32_t n_old;
};

__device__ decision & decision_of(const lctx_evict_args & a, decision * decisions, int head_kv, int seq) {
    return decisions[(size_t)seq * a.n_head_kv + head_kv];
}

// Scores in the order of unsigned numbers; of equals the newer row ranks higher.
__device__ uint64_t rank_of(lctx_score kind, int32_t score, int32_t cell) {
    return (uint64_t)lctx_held::rank(kind, score) << 32 | (uint32_t)cell;
}

__device__ bool stays(const lctx_evict_args & a, const decision & d, int32_t score, int32_t cell) {
    return cell >= d.n_old || rank_of(a.params.retain.score, score, cell) >= d.least;
}

struct search_memory {
    int32_t count[256];  // ranks by their next 8 bits
    int32_t digit;
    int32_t n;
};

// The rank of the n-th best of cells [0, n_old), 8 bits at a time from the top; n > 0. All threads call and get it.
__device__ uint64_t nth_best(lctx_score kind, const int32_t * scores, int32_t n_old, int32_t n, search_memory & m) {
    uint64_t best = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        const uint64_t known = shift == 56 ? 0 : ~(uint64_t)0 << (shift + 8);
        const int mine = (int)threadIdx.x;
        __syncthreads();  // the counts of before were read
        if (mine < 256) {
            m.count[mine] = 0;
        }
        __syncthreads();
        for (int32_t cell = mine; cell < n_old; cell += THREADS) {
            const uint64_t rank = rank_of(kind, scores[cell], cell);
            if (((rank ^ best) & known) == 0) {
                atomicAdd(&m.count[rank >> shift & 255], 1);
            }
        }
        __syncthreads();
        int better = 0;
        for (int i = mine + 1; i < 256; i++) {
            better += m.count[i];
        }
        if (mine < 256 && better < n && n <= better + m.count[mine]) {
            m.digit = mine;
            m.n = n - better;
        }
        __syncthreads();
        best |= (uint64_t)m.digit << shift;
        n = m.n;
        if (m.count[m.digit] == n) {  // all of them: no bit below matters
            break;
        }
    }
    return best;
}

// Decide which rows of a head stay after row p; all threads call.
__device__ decision decide(const lctx_evict_args & a, const lctx_held & held, int32_t p, int32_t budget,
                           search_memory & m) {
    const lctx_retain & r = a.params.retain;
    decision d = {0, p + 1 - held.n_gone(), 0};
    const int32_t n_old = lctx_min(held.cell(r.first_safe(p, a.params.chunk_size)), d.n_held);
    if (r.budget == 0) {
        d.n_old = n_old;
        d.least = rank_of(r.score, p - r.window + 1, 0);
    } else if (d.n_held > budget) {
        const int32_t n_best = lctx_max(0, budget - (d.n_held - n_old));
        d.n_old = n_old;
        d.least = n_best > 0 ? nth_best(r.score, held.scores(), n_old, n_best, m) : ~(uint64_t)0;
    }
    return d;
}

// A chunk whose last row is evicted is no longer a candidate. A warp takes 32 cells and walks over every chunk that
// begins among them.
__device__ void forget_chunks(const lctx_evict_args & a, const lctx_held & held, const decision & d, int head_kv,
                              int seq) {
    const int32_t * rows = held.rows();
    const int size = a.params.chunk_size, lane = lctx_lane();
    for (int first = lctx_warp() * LCTX_WARP; first < d.n_old; first += THREADS) {
        const int mine = first + lane;
        const bool begins = mine < d.n_old && (mine == 0 || rows[mine - 1] / size != rows[mine] / size);
        const uint32_t begin = lctx_ballot(begins);
        for (int i = 0; i < LCTX_WARP; i++) {
            if (!(begin >> i & 1)) {
                continue;
            }
            const int32_t chunk = rows[first + i] / size;
            bool is_left = false, ends = false;
            for (int cell = first + i + lane; !is_left && !ends; cell += LCTX_WARP) {
                const bool here = cell < d.n_held && rows[cell] / size == chunk;
                is_left = lctx_ballot(here && stays(a, d, held.scores()[cell], cell)) != 0;
                ends = lctx_ballot(!here) != 0;
            }
            const int n_half = (int)(a.summary_stride / sizeof(uint16_t));  // or scales of blocks and pairs of bytes
            for (int n = lane; !is_left && n < a.n_summary * n_half; n += LCTX_WARP) {
                const int summary = head_kv * a.n_summary + n / n_half;
                uint16_t * at = (uint16_t *)(a.summaries + chunk * a.summary_stride + summary * a.summary_head_stride +
                                             seq * a.summary_seq_stride);
                at[n % n_half] = 0xffff;  // NaN as floats, as halves, and as scales of blocks
            }
        }
    }
}

__global__ void __launch_bounds__(THREADS) decide_heads(const lctx_evict_args a, decision * decisions) {
    lctx_begin();
    const int head_kv = (int)blockIdx.x, seq = (int)blockIdx.y;
    if (a.due[seq] < 0) {
        return;
    }
    const lctx_held held = lctx_cells(a.cache, head_kv, seq).held;
    const decision d = decide(a, held, a.due[seq], lctx_budget_of(a, head_kv, seq), *(search_memory *)lctx_shared());
    if (a.summaries) {
        forget_chunks(a, held, d, head_kv, seq);
    }
    if (threadIdx.x == 0) {
        decision_of(a, decisions, head_kv, seq) = d;
    }
}

// ---- K, V and the index ----

constexpr int STRIP = 8;  // units of a row that a block of threads moves

// The widest unit in which rows can be copied: pages are aligned, rows lie at multiples of their size.
LCTX_HD int unit_size(size_t row_size) {
    return row_size % 16 == 0 ? 16 : row_size % 4 == 0 ? 4 : 2;
}

LCTX_HD int n_strip(const lctx_pool_args & pool) {
    return (int)lctx_div_up((long long)pool.row_size, STRIP * unit_size(pool.row_size));
}

struct move_memory {
    int32_t sums[LCTX_WARP];
    int32_t from[THREADS];  // cells that stay
};

// n_unit units of every row, STRIP at most, for THREADS cells at a time: all are read before one is written, and no row
// moves to a later cell. unit(cell, i): where they lie.
template <typename T, typename Unit> __device__ void move_units(const lctx_evict_args & a, const decision & d,
                                                                int head_kv, int seq, int n_unit, move_memory & m,
                                                                Unit && unit) {
    const lctx_held held = lctx_cells(a.cache, head_kv, seq).held;
    const int mine = (int)threadIdx.x;
    for (int first = 0, to = 0; first < d.n_held; first += THREADS) {
        const int cell = first + mine;
        const bool left = cell < d.n_held && stays(a, d, held.scores()[cell], cell);
        int n;
        const int at = lctx_block_scan(left, m.sums, n);
        if (to < first || n < lctx_min(THREADS, d.n_held - first)) {  // else nothing has left so far
            if (left) {
                m.from[at] = cell;
            }
            __syncthreads();
            T moved[STRIP];
            for (int i = 0; i < STRIP; i++) {
                const int at_unit = mine + i * THREADS;
                if (at_unit < n * n_unit) {
                    moved[i] = *unit(m.from[at_unit / n_unit], at_unit % n_unit);
                }
            }
            __syncthreads();
            for (int i = 0; i < STRIP; i++) {
                const int at_unit = mine + i * THREADS;
                if (at_unit < n * n_unit) {
                    *unit(to + at_unit / n_unit, at_unit % n_unit) = moved[i];
                }
            }
        }
        to += n;
    }
}

// The units of strip `strip` of rows of K or V.
template <typename T> __device__ void move_strip(const lctx_evict_args & a, const lctx_pool_args & pool,
                                                 const decision & d, int head_kv, int seq, int strip, move_memory & m) {
    const int n_unit = lctx_min(STRIP, (int)(pool.row_size / sizeof(T)) - strip * STRIP);
    move_units<T>(a, d, head_kv, seq, n_unit, m, [&](int cell, int i) {
        return (T *)(pool.data + lctx_pool_row(a.cache.table, cell, head_kv, seq) * pool.row_size) + strip * STRIP + i;
    });
}

LCTX_HD int n_word(const lctx_index_shape & index) {
    return index.n_code() / index.WORD;
}

// Slices of the words of a row of the index, and one for its scale.
LCTX_HD int n_index_strip(const lctx_evict_args & a) {
    return a.cache.index.data ? (int)lctx_div_up(n_word(a.index), STRIP) + 1 : 0;
}

__device__ void move_index(const lctx_evict_args & a, const decision & d, int head_kv, int seq, int strip,
                           move_memory & m) {
    constexpr int GROUP = lctx_index_shape::GROUP;
    const int n_unit = lctx_min(STRIP, n_word(a.index) - strip * STRIP);
    const auto group = [&](int cell) { return lctx_index_group(a.cache, cell / GROUP, head_kv, seq); };
    if (n_unit <= 0) {
        return move_units<uint16_t>(a, d, head_kv, seq, 1, m, [&](int cell, int) {
            return (uint16_t *)(group(cell) + a.index.scale_at(cell % GROUP));
        });
    }
    move_units<uint32_t>(a, d, head_kv, seq, n_unit, m, [&](int cell, int i) {
        return (uint32_t *)(group(cell) + a.index.word_at(strip * STRIP + i, cell % GROUP));
    });
}

// Slices of K, of the index, and of V where it has bytes of its own.
__global__ void __launch_bounds__(THREADS) move_rows(const lctx_evict_args a, decision * decisions) {
    lctx_begin();
    const int head_kv = (int)blockIdx.y, seq = (int)blockIdx.z, n_strip_k = n_strip(a.cache.k_pool),
              n_strip_index = n_index_strip(a);
    if (a.due[seq] < 0) {
        return;
    }
    const decision d = decision_of(a, decisions, head_kv, seq);
    move_memory & m = *(move_memory *)lctx_shared();
    const int in_index = (int)blockIdx.x - n_strip_k;
    if (in_index >= 0 && in_index < n_strip_index) {
        return move_index(a, d, head_kv, seq, in_index, m);
    }
    const bool is_k = in_index < 0;
    const lctx_pool_args & pool = is_k ? a.cache.k_pool : a.cache.v_pool;
    const int strip = (int)blockIdx.x - (is_k ? 0 : n_strip_k + n_strip_index);
    switch (unit_size(pool.row_size)) {
        case 16: return move_strip<uint4>(a, pool, d, head_kv, seq, strip, m);
        case 4:  return move_strip<uint32_t>(a, pool, d, head_kv, seq, strip, m);
        default: return move_strip<uint16_t>(a, pool, d, head_kv, seq, strip, m);
    }
}

// ---- row numbers, scores, header ----

__global__ void __launch_bounds__(THREADS) move_scores(const lctx_evict_args a, decision * decisions) {
    lctx_begin();
    const int head_kv = (int)blockIdx.x, seq = (int)blockIdx.y;
    const int32_t p = a.due[seq];
    if (p < 0) {
        return;
    }
    const lctx_held held = lctx_cells(a.cache, head_kv, seq).held;
    const decision d = decision_of(a, decisions, head_kv, seq);
    const lctx_retain & r = a.params.retain;
    int to = 0;
    for (int first = 0; first < d.n_held; first += THREADS) {
        const int cell = first + (int)threadIdx.x;
        const int32_t row = cell < d.n_held ? held.rows()[cell] : 0, score = cell < d.n_held ? held.scores()[cell] : 0;
        const bool left = cell < d.n_held && stays(a, d, score, cell);
        int n;
        const int at = lctx_block_scan(left, (int *)lctx_shared(), n);  // all have read when it returns
        if (left) {
            held.rows()[to + at] = row;
            held.scores()[to + at] = r.resets ? lctx_held::first_score(r.score) : score;
        }
        to += n;
    }
    if (threadIdx.x == 0) {
        held.n_gone() = p + 1 - to;
        held.dense_from() = p + 1;
    }
}

}  // namespace

size_t lctx_cuda_evict_wsize(const lctx_cuda_device &, const lctx_evict_args & args) {
    return (size_t)args.n_head_kv * args.n_seq * sizeof(decision);
}

void lctx_cuda_evict(const lctx_cuda_queue & queue, const lctx_evict_args & args) {
    decision * decisions = (decision *)queue.work;
    const dim3 heads(args.n_head_kv, args.n_seq);
    const int n_strip_v = lctx_values_in_keys(args.cache) ? 0 : n_strip(args.cache.v_pool);
    const dim3 strips(n_strip(args.cache.k_pool) + n_index_strip(args) + n_strip_v, args.n_head_kv, args.n_seq);
    lctx_launch(decide_heads, heads, THREADS, sizeof(search_memory), queue.stream, args, decisions);
    lctx_launch(move_rows, strips, THREADS, sizeof(move_memory), queue.stream, args, decisions);
    lctx_launch(move_scores, heads, THREADS, LCTX_WARP * sizeof(int), queue.stream, args, decisions);
}
