// The plans of *attend*: a block of threads for a tile. The chunks that columns read from one angle of one sequence are
// marked, then listed.
#include "plan.h"

#include <climits>

namespace {

constexpr int WARPS = 8, THREADS = WARPS * LCTX_WARP;
constexpr int MOST_COLUMNS = 64;

struct rows {
    int32_t begin, end;
};

struct memory {
    int sums[LCTX_WARP];            // of lctx_block_scan
    int first, end, next;           // chunks of this key; the key after it
    rows unfinished[MOST_COLUMNS];  // rows of a chunk of which a column reads only the beginning: that of its own token
};

// Mark the chunks of a key in those of the columns that read them; what comes next into the memory.
__device__ void mark(const lctx_attend_args & a, const lctx_cuda_tile & t, int32_t key, unsigned long long * columns,
                     memory & m) {
    const lctx_cuda_lists lists = {a};
    int first = INT_MAX, end = 0, next = INT_MAX;
    for (int c = lctx_warp(); c < t.n_column(); c += WARPS) {
        const lctx_segment * segs = lists.of(t.index(c), t.head(c));
        for (int i = a.params.n_run + lctx_lane(); i < a.n_seg; i += LCTX_WARP) {
            const lctx_segment s = segs[i];
            const int32_t its_key = s.row0 < s.row1 ? s.seq * a.n_angle + s.angle - t.token(c) * a.n_angle : -1;
            if (its_key == key && key >= 0 && s.row1 - s.row0 < a.params.chunk_size) {
                m.unfinished[c] = {s.row0, s.row1};
            } else if (its_key == key && key >= 0) {
                const int chunk = s.row0 / a.params.chunk_size;
                first = lctx_min(first, chunk), end = lctx_max(end, chunk + 1);
                atomicOr(&columns[chunk], 1ull << c);
            } else if (its_key > key) {
                next = lctx_min(next, its_key);
            }
        }
    }
    first = lctx_warp_min(first), end = -lctx_warp_min(-end), next = lctx_warp_min(next);
    if (lctx_lane() == 0) {
        atomicMin(&m.first, first);
        atomicMax(&m.end, end);
        atomicMin(&m.next, next);
    }
}

// The pieces of rows [row0, row1) of a chunk: of evicted cells some are missing.
__device__ void put_rows(const lctx_attend_args & a, const lctx_cuda_plan & p, int head_kv, int32_t row0, int32_t row1,
                         int32_t key, unsigned long long columns, lctx_cuda_piece * to) {
    constexpr int CELLS = lctx_cuda_piece::CELLS;
    const int seq = key / a.n_angle;
    const lctx_cells cells(a.cache, head_kv, seq);
    const int begin = cells.cell(row0), end = cells.cell(row1);
    for (int i = 0; i < p.per_chunk; i++) {
        const int group = (begin / CELLS + i) * CELLS, lo = lctx_max(begin, group), hi = lctx_min(end, group + CELLS);
        to[i] = {0, 0, key, 0, 0};
        if (lo < hi) {
            to[i] = {columns, (int32_t)lctx_pool_row(a.cache.table, lo, head_kv, seq), key, (int16_t)(lo - group),
                     (int16_t)(hi - group)};
        }
    }
}

// List what is marked, clear the marks, and fill a block of rows; returns how many pieces there are then.
__device__ int list(const lctx_attend_args & a, const lctx_cuda_plan & p, int head_kv, int32_t key,
                    unsigned long long * columns, lctx_cuda_piece * pieces, int n, memory & m) {
    const int size = a.params.chunk_size, mine = (int)threadIdx.x;
    int n_listed;
    for (int chunk0 = m.first; chunk0 < m.end; chunk0 += THREADS, n += n_listed * p.per_chunk) {
        const int chunk = chunk0 + mine;
        const unsigned long long read = chunk < m.end ? columns[chunk] : 0;
        const int at = lctx_block_scan(read != 0, m.sums, n_listed);
        if (read != 0) {
            put_rows(a, p, head_kv, chunk * size, (chunk + 1) * size, key, read, pieces + n + at * p.per_chunk);
            columns[chunk] = 0;
        }
    }
    const rows its = mine < MOST_COLUMNS ? m.unfinished[mine] : rows{0, 0};
    const int at = lctx_block_scan(its.begin < its.end, m.sums, n_listed);
    if (its.begin < its.end) {
        put_rows(a, p, head_kv, its.begin, its.end, key, 1ull << mine, pieces + n + at * p.per_chunk);
        m.unfinished[mine] = {0, 0};
    }
    n += n_listed * p.per_chunk;
    const int end = (int)lctx_div_up(n, p.per_block) * p.per_block;
    for (int i = n + mine; i < end; i += THREADS) {
        pieces[i] = {0, 0, key, 0, 0};
    }
    return end;
}

__global__ void __launch_bounds__(THREADS, 2)
    make_plan(const lctx_attend_args a, const lctx_cuda_plan p, int n_column, int first) {
    lctx_begin();
    lctx_let_next_begin();
    auto & m = *(memory *)lctx_shared();
    const int side = (int)blockIdx.x, head_kv = (int)blockIdx.y;
    const lctx_cuda_tile t(a, lctx_cuda_tiling(a, n_column), first + side, head_kv);
    unsigned long long * columns = p.columns(side, head_kv);
    for (int chunk = (int)threadIdx.x; chunk < p.n_chunk; chunk += THREADS) {
        columns[chunk] = 0;
    }
    if (threadIdx.x < MOST_COLUMNS) {
        m.unfinished[threadIdx.x] = {0, 0};
    }
    int n = 0;
    for (int32_t key = -1; key != INT_MAX; key = m.next) {
        __syncthreads();  // all have read the memory
        if (threadIdx.x == 0) {
            m.first = INT_MAX, m.end = 0, m.next = INT_MAX;
        }
        __syncthreads();
        mark(a, t, key, columns, m);
        __syncthreads();
        n = list(a, p, head_kv, key, columns, p.pieces(side, head_kv), n, m);
    }
    if (threadIdx.x == 0) {
        p.count(side, head_kv) = n;
    }
}

}  // namespace

void lctx_cuda_make_plans(const lctx_cuda_queue & queue, const lctx_attend_args & args, const lctx_cuda_plan & plan,
                          int n_column, int first) {
    lctx_launch(make_plan, dim3(plan.n_tile, args.n_head_kv), THREADS, sizeof(memory), queue.stream, args, plan,
                n_column, first);
}
