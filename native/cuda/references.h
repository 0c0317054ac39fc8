// For heads that choose together, scores become weights in the attention of each, which what the query reads anyway has
// a share of: r, the log of the sum over these rows.
#pragma once

#include "key-scores.h"

namespace {

constexpr int REFERENCE_WARPS = 4;  // of a block, each with a query of its own
constexpr int WEIGHT_WARPS = 8;     // of a block, which has one query

// The sum over the lanes of a warp.
__device__ log_sum sum_lanes(const log_sum & mine) {
    const float most = lctx_warp_max(mine.most), base = most == -INFINITY ? 0.0f : most;
    return {most, lctx_warp_sum(mine.sum * expf(mine.most - base))};
}

// The score of a row by the index; one thread.
template <int BITS>
__device__ float score_row(const lctx_select_args & a, lctx_key_query * query, int32_t cell, int list, int32_t seq) {
    constexpr int GROUP = lctx_index_shape::GROUP, PAIRS = lctx_index_shape::WORD * 8 / BITS / 2;
    const char * group = lctx_index_group(a.cache, cell / GROUP, list, seq);
    float sum = 0.0f;
    for (int word = 0; word < a.index.n_code() / lctx_index_shape::WORD; word++) {
        const uint32_t codes = *(const uint32_t *)(group + a.index.word_at(word, cell % GROUP));
        lctx_unrolled<PAIRS>([&](int pair) {
            const uint32_t key = lctx_index_pair<BITS>(codes, pair);
            const uint16_t * q = query->levels() + lctx_key_order::index(BITS, word, pair);
            sum += lctx_from_half((uint16_t)key) * lctx_from_half(q[0]) +
                   lctx_from_half((uint16_t)(key >> 16)) * lctx_from_half(q[1]);
        });
    }
    return sum * lctx_from_half(*(const uint16_t *)(group + a.index.scale_at(cell % GROUP))) * query->scale;
}

// The sum over the rows of a run but those of the near ring, which the index does not have as they are seen. One warp.
template <int BITS> __device__ log_sum sum_run(const lctx_select_args & a, int32_t token, int head, int run, float * q,
                                               lctx_key_query * query) {
    const lctx_segment & s = a.segs[(size_t)token * a.chunks.n_given() + run];
    log_sum all = {-INFINITY, 0.0f};
    if (s.row0 >= s.row1 || (a.near_mask >> run & 1)) {
        return all;
    }
    lctx_sync_warp();  // all have read the query before
    rotate_query(a, token, head, s.angle, q);
    round_query(a, q, query);
    lctx_sync_warp();
    const int list = head / (a.n_head / a.n_list);
    const int32_t seq = a.rows[token].seq;
    const lctx_cells cells(a.cache, list, seq);
    const int32_t end = cells.cell(s.row1);
    for (int32_t cell = cells.cell(s.row0) + lctx_lane(); cell < end; cell += LCTX_WARP) {
        all = all.with(score_row<BITS>(a, query, cell, list, seq), 1.0f);
    }
    return all;
}

// A warp for a query.
template <int BITS> __global__ void sum_runs(lctx_select_args a, lctx_select_plan p) {
    lctx_begin();
    lctx_let_next_begin();
    const int i = (int)blockIdx.x, head = (int)blockIdx.y * REFERENCE_WARPS + lctx_warp();
    if (head >= a.n_head) {
        return;
    }
    auto * query = (lctx_key_query *)(lctx_shared() + lctx_warp() * (p.query_size + a.head_dim * sizeof(float)));
    log_sum all = {-INFINITY, 0.0f};
    for (int run = 0; run < a.chunks.n_run; run++) {
        const log_sum more = sum_run<BITS>(a, p.token(a, i), head, run, (float *)((char *)query + p.query_size), query);
        all = all.with(more.most, more.sum);
    }
    all = sum_lanes(all);
    if (lctx_lane() == 0) {
        p.reference(a, i, head) = all.most == -INFINITY ? 0.0f : all.value();
    }
}

// f(chunk) for the chunks of this thread, of those that a token scores.
template <typename F> __device__ void each_scored(const lctx_select_args & a, int32_t token, F && f) {
    for (int slot = 0; slot < a.chunks.n_range; slot++) {
        const lctx_chunk_range r(a, token, slot);
        for (int chunk = r.first + (int)threadIdx.x; chunk < r.end; chunk += (int)blockDim.x) {
            f(chunk);
        }
    }
}

// Scores of a head become shares of the sum over all of them and what it reads anyway; what is not a number has none. A
// block for a query.
__global__ void weigh(lctx_select_args a, lctx_select_plan p) {
    lctx_begin();
    lctx_let_next_begin();
    const int i = (int)blockIdx.x, head = (int)blockIdx.y;
    const int32_t token = p.token(a, i);
    float * scores = p.scores_of(a, i, head);
    auto * sums = (log_sum *)lctx_shared();
    log_sum all = {-INFINITY, 0.0f};
    const auto is_number = [&](int chunk) { return scores[chunk] == scores[chunk]; };
    each_scored(a, token, [&](int chunk) { all = is_number(chunk) ? all.with(scores[chunk], 1.0f) : all; });
    all = sum_lanes(all);
    if (lctx_lane() == 0) {
        sums[lctx_warp()] = all;
    }
    __syncthreads();
    all = {p.reference(a, i, head), 1.0f};
    for (int warp = 0; warp < WEIGHT_WARPS; warp++) {
        all = all.with(sums[warp].most, sums[warp].sum);
    }
    each_scored(a, token,
                [&](int chunk) { scores[chunk] = is_number(chunk) ? expf(scores[chunk] - all.most) / all.sum : 0.0f; });
}

template <int BITS>
void launch_references(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    const dim3 grid((unsigned)p.n_slab, (unsigned)lctx_div_up(a.n_head, REFERENCE_WARPS));
    const size_t shared = REFERENCE_WARPS * (p.query_size + a.head_dim * sizeof(float));
    lctx_launch(sum_runs<BITS>, grid, REFERENCE_WARPS * LCTX_WARP, shared, queue.stream, a, p);
}

void launch_weights(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    const dim3 grid((unsigned)p.n_slab, (unsigned)a.n_head);
    lctx_launch(weigh, grid, WEIGHT_WARPS * LCTX_WARP, WEIGHT_WARPS * sizeof(log_sum), queue.stream, a, p);
}

}  // namespace
