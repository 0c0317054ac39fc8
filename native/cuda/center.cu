// *center*: every query counts into the mean of its head; at a border the rows that a KV head holds are scored with the means of its
// query heads (../cpu/center.cpp says why).
//
// A thread adds up one pair of a query head, token by token. Then a block of threads scores the rows of a KV head, a warp a row: that
// comes once in evict_every tokens.
#include "hadamard.h"
#include "kernels.h"
#include "voters.h"

#include <cmath>

namespace {

constexpr int THREADS = 256, WARPS = THREADS / LCTX_WARP;

// The rotated pairs of a head, then the dimensions that are not rotated.
__device__ int n_unit(const lctx_center_args & a) {
    return a.head_dim - a.n_pair;
}

// Unit `i` of the sums: f(place in them, of a pair its length).
template <typename F> __device__ void each_number(const lctx_center_args & a, int i, F && f) {
    if (i >= a.n_pair) {
        f(i + a.n_pair);
        return;
    }
    const lctx_pair_at at = a.pair(i);
    f(at.first), f(at.second), f(a.head_dim + i);
}

// Sums begin with the first token, and are kept as they were before the ubatch.
__device__ void keep_unit(const lctx_center_args & a, const lctx_run & r, int head, int i) {
    const lctx_voter & first = a.voters[r.first];
    const lctx_query_sums sums = a.sums_of(head, first.seq);
    each_number(a, i, [&](int at) {
        sums.data[at] = first.row == 0 ? 0.0f : sums.data[at];
        if (first.undo_from >= 0) {
            sums.undo()[at] = sums.data[at];
        }
    });
}

__device__ void add_unit(const lctx_center_args & a, const lctx_run & r, int head, int i) {
    const lctx_query_sums sums = a.sums_of(head, a.voters[r.first].seq);
    if (i >= a.n_pair) {
        float sum = sums.queries()[i + a.n_pair];
        for (int t = r.first; t < r.end; t++) {
            sum += a.query(t, head)[i + a.n_pair];
        }
        sums.queries()[i + a.n_pair] = sum;
        return;
    }
    const lctx_pair_at at = a.pair(i);
    float x = sums.queries()[at.first], y = sums.queries()[at.second], length = sums.lengths()[i];
    for (int t = r.first; t < r.end; t++) {
        const float * q = a.query(t, head);
        x += q[at.first], y += q[at.second], length += lctx_length(q[at.first], q[at.second]);
    }
    sums.queries()[at.first] = x, sums.queries()[at.second] = y, sums.lengths()[i] = length;
}

__global__ void __launch_bounds__(THREADS) add_queries(const lctx_center_args a) {
    const int head = (int)blockIdx.x;
    const auto each_unit = [&](const lctx_run & r, auto && f) {
        for (int i = (int)threadIdx.x; i < n_unit(a); i += THREADS) {
            f(a, r, head, i);
        }
    };
    lctx_each_run(a.voters, a.n_tokens, [&](const lctx_run & r) { each_unit(r, keep_unit); });
    lctx_each_run(a.voters, a.n_tokens, [&](const lctx_run & r) { each_unit(r, add_unit); });
}

// ---- scores ----

// In shared memory.
struct memory {
    float * parts;   // [WARPS]
    float * center;  // [head_dim]
    float * spread;  // [n_pair]
    float * keys;    // [WARPS][head_dim]

    static size_t size(const lctx_center_args & a) { return (WARPS + (size_t)a.head_dim * (WARPS + 1) + a.n_pair) * sizeof(float); }
    __device__ explicit memory(const lctx_center_args & a) : parts((float *)lctx_shared()) {
        center = parts + WARPS;
        spread = center + a.head_dim;
        keys = spread + a.n_pair;
    }
};

// The center of a head as the queries after `token` bring it.
__device__ void make_center(const lctx_center_args & a, int head, int token, const memory & m) {
    const lctx_query_sums sums = a.sums_of(head, a.voters[token].seq);
    const float n = (float)(a.voters[token].row + 1);
    const float * cs = a.angles + (size_t)a.rows[token].angle * 2 * a.n_pair;
    for (int i = (int)threadIdx.x; i < n_unit(a); i += THREADS) {
        if (i >= a.n_pair) {
            m.center[i + a.n_pair] = sums.queries()[i + a.n_pair] / n;
            continue;
        }
        const lctx_pair_at at = a.pair(i);
        const lctx_expected_pair pair(sums, at, i, n, cs + 2 * i, a.ahead + 2 * i);
        m.center[at.first] = pair.first, m.center[at.second] = pair.second, m.spread[i] = pair.spread;
    }
}

// The score of one row; the lanes of a warp together.
__device__ float score(const lctx_center_args & a, const char * row, const memory & m) {
    float * key = m.keys + (size_t)lctx_warp() * a.head_dim;
    for (int d = 8 * lctx_lane(); d < a.head_dim; d += 8 * LCTX_WARP) {
        float x[8];
        lctx_load_8(a.cache.k_pool.type, row, d, a.params.hadamard.k, x);
        for (int i = 0; i < 8; i++) {
            key[d + i] = x[i];
        }
    }
    lctx_sync_warp();
    float sum = 0.0f;
    for (int i = lctx_lane(); i < n_unit(a); i += LCTX_WARP) {
        if (i >= a.n_pair) {
            sum += m.center[i + a.n_pair] * key[i + a.n_pair];
            continue;
        }
        const lctx_pair_at at = a.pair(i);
        const float x = key[at.first], y = key[at.second];
        sum += m.center[at.first] * x + m.center[at.second] * y + m.spread[i] * lctx_length(x, y);
    }
    lctx_sync_warp();  // the key is read
    return lctx_warp_sum(sum);
}

// The sum of x over the block; all threads come and get it.
__device__ float block_sum(float x, const memory & m) {
    x = lctx_warp_sum(x);
    __syncthreads();
    if (lctx_lane() == 0) {
        m.parts[lctx_warp()] = x;
    }
    __syncthreads();
    x = 0.0f;
    for (int warp = 0; warp < WARPS; warp++) {
        x += m.parts[warp];
    }
    return x;
}

// Deviations from the mean, in units of the standard deviation; the largest of all query heads stays.
__device__ void count(const lctx_held & held, const float * scores, int n_held, bool is_first, const memory & m) {
    float sum = 0.0f, squares = 0.0f;
    for (int cell = (int)threadIdx.x; cell < n_held; cell += THREADS) {
        sum += scores[cell];
    }
    const float mean = block_sum(sum, m) / (float)n_held;
    for (int cell = (int)threadIdx.x; cell < n_held; cell += THREADS) {
        squares += (scores[cell] - mean) * (scores[cell] - mean);
    }
    squares = block_sum(squares, m);
    const float unit = squares > 0.0f ? 1.0f / sqrtf(squares / (float)n_held) : 0.0f;
    for (int cell = (int)threadIdx.x; cell < n_held; cell += THREADS) {
        const float z = (scores[cell] - mean) * unit;
        int32_t & best = held.scores()[cell];
        best = lctx_held::as_score(is_first ? z : lctx_max(lctx_held::as_float(best), z));
    }
}

__device__ void score_head(const lctx_center_args & a, int head_kv, int token, float * scores, const memory & m) {
    const int32_t seq = a.voters[token].seq;
    const int ratio = a.n_head / a.n_head_kv;
    const lctx_held held = lctx_cells(a.cache, head_kv, seq).held;
    const int n_held = held.cell(a.voters[token].row) + 1;
    for (int i = 0; i < ratio; i++) {
        make_center(a, head_kv * ratio + i, token, m);
        __syncthreads();
        for (int cell = lctx_warp(); cell < n_held; cell += WARPS) {
            const float of_row = score(a, lctx_key_row(a.cache, cell, head_kv, seq), m);
            if (lctx_lane() == 0) {
                scores[cell] = of_row;
            }
        }
        __syncthreads();
        count(held, scores, n_held, i == 0, m);
        __syncthreads();
    }
}

__device__ void keep_scores(const lctx_center_args & a, const lctx_run & r, int head_kv) {
    const lctx_voter & last = a.voters[r.end - 1];
    if (last.undo_from < 0) {
        return;
    }
    const lctx_held held = lctx_cells(a.cache, head_kv, last.seq).held;
    const int n_held = held.cell(last.row) + 1;
    for (int cell = (int)threadIdx.x; cell < n_held; cell += THREADS) {
        held.undo()[cell] = held.scores()[cell];
    }
    if (threadIdx.x == 0) {
        held.undo_from() = last.undo_from;
    }
}

// work: [n_head_kv][n_row_max]
__global__ void __launch_bounds__(THREADS) score_rows(const lctx_center_args a, float * work) {
    const int head_kv = (int)blockIdx.x;
    const memory m(a);
    lctx_each_run(a.voters, a.n_tokens, [&](const lctx_run & r) { keep_scores(a, r, head_kv); });
    __syncthreads();
    lctx_each_run(a.voters, a.n_tokens, [&](const lctx_run & r) {
        if (a.is_due(r.end - 1)) {
            score_head(a, head_kv, r.end - 1, work + (size_t)head_kv * a.cache.held.n_row_max, m);
        }
    });
}

}  // namespace

size_t lctx_cuda_center_wsize(const lctx_cuda_device &, const lctx_center_args & args) {
    return (size_t)args.n_head_kv * args.cache.held.n_row_max * sizeof(float);
}

void lctx_cuda_center(const lctx_cuda_queue & queue, const lctx_center_args & args) {
    lctx_launch(add_queries, dim3(args.n_head), THREADS, 0, queue.stream, args);
    lctx_launch(score_rows, dim3(args.n_head_kv), THREADS, memory::size(args), queue.stream, args, (float *)queue.work);
}
