// *select*: every query scores the chunks before it and keeps the best (LongHeads, eq. 3).
//
// With extremes as summaries the score is an upper bound of the best key's: sum over channels of max(q, 0) * maximum +
// min(q, 0) * minimum, a product of twice the width. Scores stand in the work buffer, those of some tokens at a time.
#include "choose.h"
#include "kernels.h"
#include "product.h"

namespace {

constexpr size_t SCORES = 256 * 1024;  // bytes per multiprocessor: enough to keep all of them busy
constexpr int FEW = 8;                 // so few queries that reading the summaries is what takes time
constexpr int FEW_WARPS = 4, FEW_CHUNKS = 4;
constexpr int CUT_THREADS = 256;
constexpr int CHOOSE_WARPS = 4;

// Tokens [first, first + n) that choose together: neighbours of one sequence in one aligned block. n is 0 after the last block.
struct block {
    int32_t first, n;
};

// How the work is cut and where it lies.
struct plan {
    int32_t * begins;  // number of blocks, first token of each, n_tokens; nullptr: every token is a block
    float * scores;    // [n_slab][n_choice][n_chunk_max] of the blocks from `first` on
    int32_t first = 0;
    int32_t n_slab;  // at most so many blocks at a time
    int32_t n_token;
    int32_t n_product;          // summaries that make one score
    int32_t heads_per_product;  // query heads that share each of them

    plan(const lctx_cuda_device & device, const lctx_select_args & a, char * work)
        : begins((int32_t *)work), scores((float *)(work + begins_size(a))) {
        const size_t of_one = (size_t)a.n_choice * a.n_chunk_max * sizeof(float);
        const int64_t most =
            lctx_max((int64_t)(SCORES * device.n_multiprocessor / of_one / lctx_product::TILE), (int64_t)1) * lctx_product::TILE;
        const int heads_per_choice = a.n_head / a.n_choice;
        begins = begins_size(a) > 0 ? begins : nullptr;
        n_slab = (int32_t)lctx_min(most, (int64_t)a.n_tokens);
        n_token = a.n_tokens;
        heads_per_product = a.chunks.minmax ? heads_per_choice : 1;
        n_product = heads_per_choice / heads_per_product;
    }
    static size_t begins_size(const lctx_select_args & a) {
        const size_t size = (size_t)lctx_div_up(a.n_tokens + 2, 64) * 64 * sizeof(int32_t);
        return a.chunks.select_block > 1 && a.n_tokens > 1 ? size : 0;
    }
    size_t size(const lctx_select_args & a) const { return begins_size(a) + (size_t)n_slab * a.n_choice * a.n_chunk_max * sizeof(float); }
    int64_t n_float(const lctx_select_args & a) const { return (int64_t)n_product * a.chunks.summary_dim(a.head_dim); }

    // Block i of the slab.
    __device__ block at(int i) const {
        const int32_t b = first + i;
        if (i >= n_slab || b >= (begins ? begins[0] : n_token)) {
            return {0, 0};
        }
        return begins ? block{begins[1 + b], begins[2 + b] - begins[1 + b]} : block{b, 1};
    }
    __device__ float * scores_of(const lctx_select_args & a, int i, int choice) const {
        return scores + ((size_t)i * a.n_choice + choice) * a.n_chunk_max;
    }
};

__device__ bool same_block(const lctx_select_args & a, int32_t t, int32_t u) {
    const int32_t size = a.chunks.select_block;
    return a.rows[t].seq == a.rows[u].seq && a.rows[t].row / size == a.rows[u].row / size;
}

// Chunks that need a score: those before the own one, or none where all are read.
__device__ int n_scored(const lctx_select_args & a, const block & b) {
    const int own = b.n > 0 ? a.rows[b.first].row / a.chunks.chunk_size : 0;
    return own < a.chunks.n_chunk ? 0 : own;
}

// Write down where the blocks begin.
__global__ void cut(lctx_select_args a, int32_t * begins) {
    int32_t * count = (int32_t *)lctx_shared();
    const int thread = (int)threadIdx.x;
    int32_t n = 0;
    for (int32_t t0 = 0; t0 < a.n_tokens; t0 += CUT_THREADS) {
        const int32_t t = t0 + thread;
        const bool is_first = t < a.n_tokens && (t == 0 || !same_block(a, t - 1, t));
        const uint32_t firsts = lctx_ballot(is_first);
        count[lctx_warp()] = __popc(firsts);
        __syncthreads();
        int32_t at = n + __popc(firsts & lctx_lanes_below());
        for (int w = 0; w < CUT_THREADS / LCTX_WARP; w++) {
            at += w < lctx_warp() ? count[w] : 0;
            n += count[w];
        }
        if (is_first) {
            begins[1 + at] = t;
        }
        __syncthreads();
    }
    if (thread == 0) {
        begins[0] = n;
        begins[1 + n] = a.n_tokens;
    }
}

// ---- scores ----

// Elements [d, d + 8) of what a block multiplies the summary of query heads [head, head + n) with: the mean query, or the
// positive and negative parts of them, to meet maximum and minimum.
__device__ void query_8(const lctx_select_args & a, const block & b, int head, int n, int d, float (&x)[8]) {
    const bool is_negative = d >= a.head_dim;
    const float share = 1.0f / (float)b.n;
    for (int h = head; h < head + n; h++) {
        float mean[8] = {};
        for (int32_t t = b.first; t < b.first + b.n; t++) {
            float q[8];
            const float * row = (const float *)(a.q + h * a.q_head_stride + t * a.q_token_stride);
            lctx_load_8(row + (is_negative ? d - a.head_dim : d), q);
            for (int i = 0; i < 8; i++) {
                mean[i] += q[i] * share;
            }
        }
        for (int i = 0; i < 8; i++) {
            x[i] += !a.chunks.minmax ? mean[i] : is_negative ? fminf(mean[i], 0.0f) : fmaxf(mean[i], 0.0f);
        }
    }
}

__device__ const char * summaries_of(const lctx_select_args & a, int head, int32_t seq) {
    return a.summaries + head / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
}

// One query against some chunks: the query in shared memory, a warp for FEW_CHUNKS chunks.
__global__ void score_few(lctx_select_args a, plan p) {
    float * query = (float *)lctx_shared();  // [n_product][summary_dim]
    const int choice = (int)blockIdx.y, i = (int)blockIdx.z, summary_dim = a.chunks.summary_dim(a.head_dim);
    const int first = (int)blockIdx.x * FEW_WARPS * FEW_CHUNKS, first_head = choice * (a.n_head / a.n_choice);
    const block b = p.at(i);
    const int n = n_scored(a, b);
    if (first >= n) {
        return;
    }
    for (int d = (int)threadIdx.x * 8; d < p.n_product * summary_dim; d += FEW_WARPS * LCTX_WARP * 8) {
        float x[8] = {};
        query_8(a, b, first_head + d / summary_dim * p.heads_per_product, p.heads_per_product, d % summary_dim, x);
        lctx_store_8(query + d, x);
    }
    __syncthreads();
    const int chunk = first + lctx_warp() * FEW_CHUNKS;
    float score[FEW_CHUNKS] = {};
    for (int product = 0; product < p.n_product; product++) {
        const char * summaries = summaries_of(a, first_head + product * p.heads_per_product, a.rows[b.first].seq);
        for (int d = lctx_lane() * 4; d < summary_dim; d += LCTX_WARP * 4) {
            const float4 q = *(const float4 *)(query + product * summary_dim + d);
            for (int c = 0; c < FEW_CHUNKS; c++) {
                const float4 r = *(const float4 *)(summaries + lctx_min(chunk + c, n - 1) * a.summary_stride + d * sizeof(float));
                score[c] += q.x * r.x + q.y * r.y + q.z * r.z + q.w * r.w;
            }
        }
    }
    for (int c = 0; c < FEW_CHUNKS; c++) {
        const float sum = lctx_warp_sum(score[c]);
        if (lctx_lane() == 0 && chunk + c < n) {
            p.scores_of(a, i, choice)[chunk + c] = sum;
        }
    }
}

// 64 blocks against 64 chunks; every run of blocks of one sequence meets its own summaries.
struct score_tile {
    const lctx_select_args & a;
    const plan & p;
    lctx_product product;
    block * blocks;    // [TILE]
    int32_t * seq;     // [TILE] -1: no block
    int32_t * scored;  // [TILE]
    int choice, first, chunk0;

    static constexpr size_t SHARED = lctx_product::N_FLOAT * sizeof(float) + lctx_product::TILE * (sizeof(block) + 2 * sizeof(int32_t));

    __device__ score_tile(const lctx_select_args & a, const plan & p) : a(a), p(p), product{(float *)lctx_shared()} {
        blocks = (block *)(product.slabs + lctx_product::N_FLOAT);
        seq = (int32_t *)(blocks + lctx_product::TILE);
        scored = seq + lctx_product::TILE;
        chunk0 = (int)blockIdx.x * lctx_product::TILE;
        choice = (int)blockIdx.y;
        first = (int)blockIdx.z * lctx_product::TILE;
    }
    __device__ void load_blocks() const {
        const int i = (int)threadIdx.x;
        if (i < lctx_product::TILE) {
            blocks[i] = p.at(first + i);
            seq[i] = blocks[i].n > 0 ? a.rows[blocks[i].first].seq : -1;
            scored[i] = n_scored(a, blocks[i]);
        }
        __syncthreads();
    }
    __device__ int most_scored() const { return -lctx_warp_min(-lctx_max(scored[lctx_lane()], scored[lctx_lane() + LCTX_WARP])); }

    // One bit per block that begins a run; the first always does.
    __device__ uint64_t runs() const {
        const int low = lctx_lane(), high = low + LCTX_WARP;
        const uint32_t in_low = lctx_ballot(low == 0 || seq[low] != seq[low - 1]), in_high = lctx_ballot(seq[high] != seq[high - 1]);
        return in_low | (uint64_t)in_high << 32;
    }
    // limit: chunks that any block scores.
    __device__ void score_run(int begin, int end, int limit) const {
        const bool is_mine = product.a(0) < end && product.a(3) >= begin;
        const int first_head = choice * (a.n_head / a.n_choice);
        float score[4][4] = {};
        for (int i = 0; i < p.n_product; i++) {
            const int head = first_head + i * p.heads_per_product;
            const char * summaries = summaries_of(a, head, seq[begin]);
            const auto query = [&](int row, int d, float(&x)[8]) {
                if (blocks[row].n > 0) {
                    query_8(a, blocks[row], head, p.heads_per_product, d, x);
                }
            };
            const auto summary = [&](int row, int d, float(&x)[8]) {
                if (chunk0 + row < limit) {
                    lctx_load_8((const float *)(summaries + (chunk0 + row) * a.summary_stride) + d, x);
                }
            };
            product.add(a.chunks.summary_dim(a.head_dim), query, summary, score, is_mine);
        }
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                const int row = product.a(i), chunk = chunk0 + product.b(j);
                if (row >= begin && row < end && chunk < scored[row]) {
                    p.scores_of(a, first + row, choice)[chunk] = score[i][j];
                }
            }
        }
    }
};

__global__ void __launch_bounds__(lctx_product::THREADS) score_many(lctx_select_args a, plan p) {
    const score_tile tile(a, p);
    if (p.at(tile.first).n == 0) {
        return;
    }
    tile.load_blocks();
    const int limit = tile.most_scored();
    if (tile.chunk0 >= limit) {
        return;
    }
    uint64_t rest = tile.runs();
    while (rest) {
        const int begin = __ffsll((long long)rest) - 1;
        rest &= rest - 1;
        if (tile.seq[begin] >= 0) {
            tile.score_run(begin, rest ? __ffsll((long long)rest) - 1 : lctx_product::TILE, limit);
        }
    }
}

// ---- choice ----

__device__ void put_segment(lctx_segment * to, int32_t row0, int32_t row1, int32_t angle, int32_t seq) {
    *(uint4 *)to = {(unsigned)row0, (unsigned)row1, (unsigned)angle, (unsigned)seq};
}

// The segments of one token: packed, or grouped with the near window apart. n: chunks that are chosen.
__device__ void write_segments(const lctx_select_args & a, const lctx_chooser & c, int32_t token, int n, lctx_segment * segs) {
    const lctx_chunk_row at = a.rows[token];
    const int size = a.chunks.chunk_size, near_row = a.chunks.near_row(at.row), near_segment = a.chunks.near_segment();
    const bool grouped = a.chunks.near_window > 0;
    int n_seen = 0, n_near = 0;
    for (int w = 0; w <= c.own / 32; w++) {
        const uint32_t chosen = c.chosen[w];
        if (chosen == 0) {
            continue;
        }
        const int row0 = (32 * w + lctx_lane()) * size, row1 = lctx_min(row0 + size, at.row + 1), far1 = lctx_min(row1, near_row);
        const bool is_mine = chosen >> lctx_lane() & 1, is_near = is_mine && row1 > near_row;
        const uint32_t near = lctx_ballot(is_near);
        if (is_mine) {
            const int i = n_seen + __popc(chosen & lctx_lanes_below());
            put_segment(segs + i, row0, lctx_max(row0, far1), at.angle + (grouped ? LCTX_ANGLE_FAR : n - 1 - i), at.seq);
        }
        if (is_near) {
            const int i = near_segment + n_near + __popc(near & lctx_lanes_below());
            put_segment(segs + i, lctx_max(row0, near_row), row1, at.angle + LCTX_ANGLE_EXACT, at.seq);
        }
        n_seen += __popc(chosen);
        n_near += __popc(near);
    }
    for (int i = n + lctx_lane(); i < a.chunks.n_segment(); i += LCTX_WARP) {
        if (i < near_segment || i >= near_segment + n_near) {
            put_segment(segs + i, 0, 0, at.angle, at.seq);
        }
    }
}

// A warp per block and choice.
__global__ void choose(lctx_select_args a, plan p, int n_word, int n_shared) {
    const int64_t job = (int64_t)blockIdx.x * CHOOSE_WARPS + lctx_warp();
    const int choice = (int)(job % a.n_choice), i = (int)lctx_min(job / a.n_choice, (int64_t)p.n_slab);
    const block b = p.at(i);
    if (b.n == 0) {
        return;
    }
    const int own = a.rows[b.first].row / a.chunks.chunk_size;
    uint32_t * shared = (uint32_t *)lctx_shared() + lctx_warp() * n_shared;
    float * scores = p.scores_of(a, i, choice);
    int32_t * found = (int32_t *)shared + n_word;
    const lctx_chooser c = {a,
                            scores,
                            (uint32_t *)scores,
                            shared,
                            found,
                            found + a.chunks.n_chunk,
                            a.rows[b.first].row,
                            choice,
                            own,
                            a.chunks.first_candidate(),
                            a.chunks.end_candidate(own)};
    const int n = c.run(n_word);
    for (int32_t t = b.first; t < b.first + b.n; t++) {
        write_segments(a, c, t, n, a.dst + ((size_t)t * a.n_choice + choice) * a.chunks.n_segment());
    }
}

void launch_scores(const lctx_cuda_queue & queue, const lctx_select_args & a, const plan & p) {
    if (a.n_tokens <= FEW) {
        const dim3 grid((unsigned)lctx_div_up(a.n_chunk_max, FEW_WARPS * FEW_CHUNKS), a.n_choice, p.n_slab);
        lctx_launch(score_few, grid, FEW_WARPS * LCTX_WARP, p.n_float(a) * sizeof(float), queue.stream, a, p);
    } else {
        const auto tiles = [](int64_t n) { return (unsigned)lctx_div_up(n, lctx_product::TILE); };
        const dim3 grid(tiles(a.n_chunk_max), a.n_choice, tiles(p.n_slab));
        lctx_launch(score_many, grid, lctx_product::THREADS, score_tile::SHARED, queue.stream, a, p);
    }
}

}  // namespace

size_t lctx_cuda_select_wsize(const lctx_cuda_device & device, const lctx_select_args & args) {
    return plan(device, args, nullptr).size(args);
}

void lctx_cuda_select(const lctx_cuda_queue & queue, const lctx_select_args & args) {
    plan p(queue.device, args, queue.work);
    if (p.begins) {
        lctx_launch(cut, dim3(1), CUT_THREADS, CUT_THREADS / LCTX_WARP * sizeof(int32_t), queue.stream, args, p.begins);
    }
    const size_t shared = lctx_chooser::shared(args);
    for (; p.first < args.n_tokens; p.first += p.n_slab) {
        launch_scores(queue, args, p);
        const dim3 grid((unsigned)lctx_div_up((int64_t)p.n_slab * args.n_choice, CHOOSE_WARPS));
        lctx_launch(choose, grid, CHOOSE_WARPS * LCTX_WARP, CHOOSE_WARPS * shared, queue.stream, args, p, lctx_chooser::n_word(args),
                    (int)(shared / sizeof(int32_t)));
    }
}
