// For heads that choose together, scores become weights in the attention of each, which what the query reads anyway has
// a share of: r, the log of the sum over these rows.
#pragma once

#include "key-scores.h"

namespace {

constexpr int WEIGHT_WARPS = 8;  // of a block, which has one query

// The sum over the threads of a block. sums: [WEIGHT_WARPS] in shared memory.
__device__ log_sum sum_block(const log_sum & mine, log_sum * sums) {
    const float most = lctx_warp_max(mine.most), base = most == -INFINITY ? 0.0f : most;
    const log_sum of_warp = {most, lctx_warp_sum(mine.sum * expf(mine.most - base))};
    __syncthreads();  // all have read the sums before
    if (lctx_lane() == 0) {
        sums[lctx_warp()] = of_warp;
    }
    __syncthreads();
    log_sum all = sums[0];
    for (int warp = 1; warp < WEIGHT_WARPS; warp++) {
        all = all.with(sums[warp].most, sums[warp].sum);
    }
    return all;
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

// The sum over this thread's rows of a run but those of the near ring, which the index does not have as they are seen.
template <int BITS> __device__ log_sum sum_run(const lctx_select_args & a, int32_t token, int head, int run,
                                               lctx_key_query * query, float * rotated) {
    const lctx_segment & s = a.segs[(size_t)token * a.chunks.n_given() + run];
    log_sum all = {-INFINITY, 0.0f};
    if (s.row0 >= s.row1 || (a.near_mask >> run & 1)) {
        return all;
    }
    __syncthreads();  // all have read the query before
    if (lctx_warp() == 0) {
        rotate_query(a, token, head, s.angle, rotated);
        round_query(a, rotated, query);
    }
    __syncthreads();
    const int list = head / (a.n_head / a.n_list);
    const int32_t seq = a.rows[token].seq;
    const lctx_cells cells(a.cache, list, seq);
    const int32_t end = cells.cell(s.row1);
    for (int32_t cell = cells.cell(s.row0) + (int32_t)threadIdx.x; cell < end; cell += WEIGHT_WARPS * LCTX_WARP) {
        all = all.with(score_row<BITS>(a, query, cell, list, seq), 1.0f);
    }
    return all;
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
template <int BITS> __global__ void weigh(lctx_select_args a, lctx_select_plan p) {
    lctx_begin();
    lctx_let_next_begin();
    const int i = (int)blockIdx.x, head = (int)blockIdx.y;
    const int32_t token = p.token(a, i);
    auto * query = (lctx_key_query *)lctx_shared();
    auto * sums = (log_sum *)((char *)query + p.query_size);
    auto * rotated = (float *)(sums + WEIGHT_WARPS);

    const log_sum none = {-INFINITY, 0.0f};
    log_sum mine = none;
    for (int run = 0; run < a.chunks.n_run; run++) {
        const log_sum more = sum_run<BITS>(a, token, head, run, query, rotated);
        mine = mine.with(more.most, more.sum);
    }
    const log_sum read = sum_block(mine, sums);
    const float reference = read.most == -INFINITY ? 0.0f : read.value();

    float * scores = p.scores_of(a, i, head);
    const auto is_number = [&](int chunk) { return scores[chunk] == scores[chunk]; };
    mine = none;
    each_scored(a, token, [&](int chunk) { mine = is_number(chunk) ? mine.with(scores[chunk], 1.0f) : mine; });
    const log_sum all = sum_block(mine, sums).with(reference, 1.0f);
    each_scored(a, token,
                [&](int chunk) { scores[chunk] = is_number(chunk) ? expf(scores[chunk] - all.most) / all.sum : 0.0f; });
}

template <int BITS>
void launch_weights(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    const dim3 grid((unsigned)p.n_slab, (unsigned)a.n_head);
    const size_t shared = p.query_size + WEIGHT_WARPS * sizeof(log_sum) + a.head_dim * sizeof(float);
    lctx_launch(weigh<BITS>, grid, WEIGHT_WARPS * LCTX_WARP, shared, queue.stream, a, p);
}

}  // namespace
