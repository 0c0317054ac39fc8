// *select*: every query scores the chunks before it and keeps the best (LongHeads, eq. 3).
#include "choose.h"
#include "kernels.h"
#include "scores.h"

namespace {

constexpr int FEW = 8;  // so few queries that reading the summaries is what takes time
constexpr int FEW_WARPS = 4, FEW_CHUNKS = 4;
constexpr int CHOOSE_WARPS = 4;  // of a block, at most, each with a choice of its own
constexpr int WIDE_WARPS = 8;    // of a block, for one choice, when there are few

// score += those of FEW_CHUNKS chunks, by a warp. summary(chunk) is where it lies.
template <typename S>
__device__ void add_scores(const lctx_select_args & a, const float * query, S && summary, float (&score)[FEW_CHUNKS]) {
    const int summary_dim = a.chunks.summary_dim(a.head_dim), query_dim = a.chunks.query_dim(a.head_dim);
    float others[FEW_CHUNKS] = {}, outlier[FEW_CHUNKS] = {};
    for (int d = lctx_lane() * 8; d < summary_dim; d += LCTX_WARP * 8) {
        const bool is_outlier = d >= query_dim;
        float q[8];
        lctx_load_8(query + (is_outlier ? d - query_dim : d), q);
        for (int c = 0; c < FEW_CHUNKS; c++) {
            float x[8], product = 0.0f;
            lctx_summary_8(a, summary(c), d, x);
            for (int i = 0; i < 8; i++) {
                product += q[i] * x[i];
            }
            others[c] += is_outlier ? 0.0f : product;
            outlier[c] += is_outlier ? product : 0.0f;
        }
    }
    for (int c = 0; c < FEW_CHUNKS; c++) {
        const float sum = lctx_warp_sum(others[c]);
        score[c] += a.chunks.has_outlier() ? lctx_log_sum(a, sum, lctx_warp_sum(outlier[c])) : sum;
    }
}

// One query against some chunks: the query in shared memory, a warp for FEW_CHUNKS chunks.
__global__ void score_few(lctx_select_args a, lctx_select_plan p) {
    float * query = (float *)lctx_shared();  // [n_product][query_dim]
    const int list = (int)blockIdx.y, i = (int)blockIdx.z, query_dim = a.chunks.query_dim(a.head_dim);
    const int first = (int)blockIdx.x * FEW_WARPS * FEW_CHUNKS, first_head = list * p.heads_per_list;
    const int32_t token = p.at(i);
    const int n = lctx_n_scored(a, token);
    if (first >= n) {
        return;
    }
    for (int d = (int)threadIdx.x * 8; d < p.n_product * query_dim; d += FEW_WARPS * LCTX_WARP * 8) {
        float x[8] = {};
        lctx_wide_query_8(a, token, first_head + d / query_dim * p.heads_per_product, p.heads_per_product, d % query_dim, x);
        lctx_store_8(query + d, x);
    }
    __syncthreads();
    const int chunk = first + lctx_warp() * FEW_CHUNKS;
    float score[FEW_CHUNKS] = {};
    for (int product = 0; product < p.n_product; product++) {
        const char * summaries = lctx_summaries_of(a, first_head + product * p.heads_per_product, a.rows[token].seq);
        const auto summary = [&](int c) { return summaries + lctx_min(chunk + c, n - 1) * a.summary_stride; };
        add_scores(a, query + product * query_dim, summary, score);
    }
    for (int c = 0; c < FEW_CHUNKS; c++) {
        if (lctx_lane() == 0 && chunk + c < n) {
            p.scores_of(a, i, list)[chunk + c] = score[c];
        }
    }
}

// 64 queries against 64 chunks.
__global__ void __launch_bounds__(lctx_product::THREADS) score_many(lctx_select_args a, lctx_select_plan p) {
    const lctx_score_tile tile(a, p);
    if (p.at(tile.first) < 0) {
        return;
    }
    tile.load_tokens();
    const int limit = tile.most_scored();
    if (tile.chunk0 >= limit) {
        return;
    }
    uint64_t rest = tile.runs();
    while (rest) {
        const int begin = __ffsll((long long)rest) - 1;
        rest &= rest - 1;
        if (tile.seq[begin] >= 0) {
            tile.score_run({begin, rest ? __ffsll((long long)rest) - 1 : lctx_product::TILE, limit});
        }
    }
}

__device__ void put_segment(lctx_segment * to, int32_t row0, int32_t row1, uint32_t angle, int32_t seq) {
    *(uint4 *)to = {(unsigned)row0, (unsigned)row1, angle, (unsigned)seq};
}

// The segments of one token: its chunks, seen from their places, by a warp. n: chunks that are chosen.
template <typename C>
__device__ void write_segments(const lctx_select_args & a, const C & c, int32_t token, int n, float unread, lctx_segment * segs) {
    const lctx_chunk_row at = a.rows[token];
    const int size = a.chunks.chunk_size;
    int n_seen = 0;
    for (int w = 0; w <= c.own / 32; w++) {
        const uint32_t chosen = c.chosen[w];
        if (chosen >> lctx_lane() & 1) {
            const int chunk = 32 * w + lctx_lane(), i = n_seen + __popc(chosen & lctx_lanes_below()), row0 = chunk * size;
            put_segment(segs + i, row0, lctx_min(row0 + size, at.row + 1), (uint32_t)a.chunks.place(c.own, chunk, i, n), at.seq);
        }
        n_seen += __popc(chosen);
    }
    for (int i = n + lctx_lane(); i < a.chunks.n_chunk; i += LCTX_WARP) {
        put_segment(segs + i, 0, 0, 0, at.seq);
    }
    if (a.chunks.mass > 0.0f && lctx_lane() == 0) {
        const int n_row = (n - 1) * size + at.row + 1 - c.own * size;  // the own chunk is the last
        put_segment(segs + a.chunks.n_chunk, n_row, n_row, lctx_as_uint(unread), at.seq);
    }
}

// A query left a share unread.
__device__ void count_unread(lctx_unread & to, float share) {
    atomicAdd((unsigned long long *)&to.n_query, 1ull);
    atomicAdd((unsigned long long *)&to.sum, (unsigned long long)(share * lctx_unread::UNIT));
}

// A warp, or a block of WARPS, per token and choice.
template <int WARPS> __global__ void choose(lctx_select_args a, lctx_select_plan p, int n_word, int n_shared) {
    const int mine = WARPS == 1 ? lctx_warp() : 0, n_job = WARPS == 1 ? (int)blockDim.x / LCTX_WARP : 1;
    const int64_t job = (int64_t)blockIdx.x * n_job + mine;
    const int choice = (int)(job % a.n_choice), i = (int)lctx_min(job / a.n_choice, (int64_t)p.n_slab);
    const int32_t token = p.at(i);
    if (token < 0) {
        return;
    }
    const int own = a.rows[token].row / a.chunks.chunk_size, n_list = p.n_list / a.n_choice;
    uint32_t * shared = (uint32_t *)lctx_shared() + mine * n_shared;
    float * scores = p.scores_of(a, i, choice * n_list);
    int32_t * found = (int32_t *)shared + n_word;
    const lctx_chooser<WARPS> c = {a,
                                   scores,
                                   (uint32_t *)scores,
                                   n_list,
                                   shared,
                                   found,
                                   found + a.chunks.n_chunk,
                                   a.rows[token].row,
                                   choice,
                                   own,
                                   a.chunks.first_candidate(),
                                   a.chunks.end_candidate(own),
                                   (float *)shared + n_shared - WARPS};
    float unread = 0.0f;
    const int n = c.run(n_word, unread);
    if (c.thread() >= LCTX_WARP) {
        return;
    }
    write_segments(a, c, token, n, unread, a.dst + ((size_t)token * a.n_choice + choice) * a.chunks.n_segment());
    if (a.unread && lctx_lane() == 0) {
        count_unread(a.unread[choice], unread);
    }
}

void launch_scores(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    if (a.n_tokens <= FEW) {
        const dim3 grid((unsigned)lctx_div_up(a.n_chunk_max, FEW_WARPS * FEW_CHUNKS), p.n_list, p.n_slab);
        lctx_launch(score_few, grid, FEW_WARPS * LCTX_WARP, p.n_float(a) * sizeof(float), queue.stream, a, p);
    } else {
        const auto tiles = [](int64_t n) { return (unsigned)lctx_div_up(n, lctx_product::TILE); };
        const dim3 grid(tiles(a.n_chunk_max), p.n_list, tiles(p.n_slab));
        lctx_launch(score_many, grid, lctx_product::THREADS, lctx_score_tile::SHARED, queue.stream, a, p);
    }
}

void launch_choices(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    const int64_t n_job = (int64_t)p.n_slab * a.n_choice;
    const int n_word = lctx_chooser<1>::n_word(a);
    if (a.n_tokens <= FEW) {
        const size_t shared = lctx_chooser<WIDE_WARPS>::shared(a);
        lctx_launch(choose<WIDE_WARPS>, dim3((unsigned)n_job), WIDE_WARPS * LCTX_WARP, shared, queue.stream, a, p, n_word,
                    (int)(shared / sizeof(int32_t)));
        return;
    }
    const size_t shared = lctx_chooser<1>::shared(a);
    const int n_warp = (int)lctx_max(lctx_min(queue.device.max_shared / shared, (size_t)CHOOSE_WARPS), (size_t)1);
    const dim3 grid((unsigned)lctx_div_up(n_job, n_warp));
    lctx_launch(choose<1>, grid, n_warp * LCTX_WARP, n_warp * shared, queue.stream, a, p, n_word, (int)(shared / sizeof(int32_t)));
}

}  // namespace

size_t lctx_cuda_select_shared(const lctx_select_args & args) {
    const size_t of_queries = lctx_select_plan({1, 0}, args, nullptr).n_float(args) * sizeof(float);
    return lctx_max(lctx_chooser<WIDE_WARPS>::shared(args), of_queries);
}

size_t lctx_cuda_select_wsize(const lctx_cuda_device & device, const lctx_select_args & args) {
    return lctx_select_plan(device, args, nullptr).size(args);
}

void lctx_cuda_select(const lctx_cuda_queue & queue, const lctx_select_args & args) {
    lctx_select_plan p(queue.device, args, queue.work);
    for (; p.first < args.n_tokens; p.first += p.n_slab) {
        launch_scores(queue, args, p);
        launch_choices(queue, args, p);
    }
}
