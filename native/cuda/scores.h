// How *select* scores chunks: products of summaries with what is made of a query, in f32. Scores stand in the work buffer, those of some
// tokens at a time.
#pragma once

#include "kernels.h"
#include "product.h"

// How the work is cut and where it lies. A token has a list of scores for every choice; with mass one for every query head.
struct lctx_select_plan {
    float * scores;  // [n_slab][n_list][n_chunk_max] of the tokens from `first` on
    int32_t first = 0;
    int32_t n_slab;  // at most so many tokens at a time
    int32_t n_token;
    int32_t n_list;
    int32_t heads_per_list;
    int32_t n_product;          // scores that are added up to one of a list
    int32_t heads_per_product;  // query heads whose queries are added up before that

    lctx_select_plan(const lctx_cuda_device & device, const lctx_select_args & a, char * work) : scores((float *)work) {
        constexpr size_t BYTES = 256 * 1024;  // per multiprocessor: enough to keep all of them busy
        n_list = a.chunks.mass > 0.0f ? a.n_head : a.n_choice;
        const size_t of_one = (size_t)n_list * a.n_chunk_max * sizeof(float);
        const int64_t most =
            lctx_max((int64_t)(BYTES * device.n_multiprocessor / of_one / lctx_product::TILE), (int64_t)1) * lctx_product::TILE;
        n_slab = (int32_t)lctx_min(most, (int64_t)a.n_tokens);
        n_token = a.n_tokens;
        heads_per_list = a.n_head / n_list;
        heads_per_product = a.chunks.by_attention() || a.chunks.has_outlier() ? 1 : heads_per_list;
        n_product = heads_per_list / heads_per_product;
    }
    size_t size(const lctx_select_args & a) const { return (size_t)n_slab * n_list * a.n_chunk_max * sizeof(float); }
    int64_t n_float(const lctx_select_args & a) const { return (int64_t)n_product * a.chunks.query_dim(a.head_dim); }

    // Token i of the slab; -1 after the last.
    __device__ int32_t at(int i) const { return i < n_slab && first + i < n_token ? first + i : -1; }
    __device__ float * scores_of(const lctx_select_args & a, int i, int list) const {
        return scores + ((size_t)i * n_list + list) * a.n_chunk_max;
    }
};

// Chunks that need a score: those before the own one, or none where all are read.
static __device__ inline int lctx_n_scored(const lctx_select_args & a, int32_t token) {
    const int own = token >= 0 ? a.rows[token].row / a.chunks.chunk_size : 0;
    return a.chunks.reads_all(own) ? 0 : own;
}

// Element d of what meets a summary, made of that of a query. minmax: positive and negative part, for the largest and the smallest
// value: an upper bound of the best key's score. moments: for mean and variance, the log of the chunk's expected mass, were its
// keys normally distributed. outlier: the same of the other keys; the first half meets the outlier too.
static __device__ inline float lctx_to_meet_summary(const lctx_select_args & a, int d, float q) {
    const bool is_second = d >= a.head_dim;
    switch (a.chunks.representation) {
        case LCTX_REPRESENT_ATTENTION: return q;
        case LCTX_REPRESENT_MINMAX:    return is_second ? fminf(q, 0.0f) : fmaxf(q, 0.0f);
        default:                       return is_second ? q * q : a.scale * q;
    }
}

// Elements [d, d + 8) of what a token multiplies the summary of query heads [head, head + n) with.
static __device__ inline void lctx_wide_query_8(const lctx_select_args & a, int32_t token, int head, int n, int d, float (&x)[8]) {
    for (int h = head; h < head + n; h++) {
        float q[8];
        lctx_load_8((const float *)(a.q + h * a.q_head_stride + token * a.q_token_stride) + d % a.head_dim, q);
        for (int i = 0; i < 8; i++) {
            x[i] += lctx_to_meet_summary(a, d, q[i]);
        }
    }
}

// The log of what a chunk attracts: its other keys, each `others` on average, and its outlier.
static __device__ inline float lctx_log_sum(const lctx_select_args & a, float others, float outlier) {
    const float all = others + logf(a.chunks.n_other());
    return fmaxf(all, outlier) + log1pf(expf(-fabsf(all - outlier)));
}

static __device__ inline const char * lctx_summaries_of(const lctx_select_args & a, int head, int32_t seq) {
    return a.summaries + head / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
}

// Elements [d, d + 8) of a summary.
static __device__ inline void lctx_summary_8(const lctx_select_args & a, const char * summary, int d, float (&x)[8]) {
    if (a.summary_type == GGML_TYPE_Q8_0) {
        lctx_load_8<lctx_cuda_q8_0>(summary, d, x);
    } else {
        lctx_load_8<lctx_cuda_f16>(summary, d, x);
    }
}

// Tokens [begin, end) of a tile, of one sequence; limit: chunks that any token of the tile scores.
struct lctx_score_run {
    int begin, end, limit;
};

// 64 tokens against 64 chunks; every run of tokens of one sequence meets its own summaries.
struct lctx_score_tile {
    const lctx_select_args & a;
    const lctx_select_plan & p;
    lctx_product product;
    int32_t * seq;     // [TILE] -1: no token
    int32_t * scored;  // [TILE]
    int list, first, chunk0;

    static constexpr size_t SHARED = lctx_product::N_FLOAT * sizeof(float) + lctx_product::TILE * 2 * sizeof(int32_t);

    __device__ lctx_score_tile(const lctx_select_args & a, const lctx_select_plan & p) : a(a), p(p), product{(float *)lctx_shared()} {
        seq = (int32_t *)(product.slabs + lctx_product::N_FLOAT);
        scored = seq + lctx_product::TILE;
        chunk0 = (int)blockIdx.x * lctx_product::TILE;
        list = (int)blockIdx.y;
        first = (int)blockIdx.z * lctx_product::TILE;
    }
    __device__ void load_tokens() const {
        const int i = (int)threadIdx.x;
        if (i < lctx_product::TILE) {
            const int32_t token = p.at(first + i);
            seq[i] = token >= 0 ? a.rows[token].seq : -1;
            scored[i] = lctx_n_scored(a, token);
        }
        __syncthreads();
    }
    __device__ int most_scored() const { return -lctx_warp_min(-lctx_max(scored[lctx_lane()], scored[lctx_lane() + LCTX_WARP])); }

    // One bit per token that begins a run; the first always does.
    __device__ uint64_t runs() const {
        const int low = lctx_lane(), high = low + LCTX_WARP;
        const uint32_t in_low = lctx_ballot(low == 0 || seq[low] != seq[low - 1]), in_high = lctx_ballot(seq[high] != seq[high - 1]);
        return in_low | (uint64_t)in_high << 32;
    }
    // score += products of the run's queries of a head with elements [from, from + dim) of summaries.
    __device__ void multiply(const lctx_score_run & run, int head, int from, int dim, float (&score)[4][4]) const {
        const char * summaries = lctx_summaries_of(a, head, seq[run.begin]);
        const auto query = [&](int row, int d, float(&x)[8]) {
            if (seq[row] >= 0) {
                lctx_wide_query_8(a, p.at(first + row), head, p.heads_per_product, d, x);
            }
        };
        const auto summary = [&](int row, int d, float(&x)[8]) {
            if (chunk0 + row < run.limit) {
                lctx_summary_8(a, summaries + (chunk0 + row) * a.summary_stride, from + d, x);
            }
        };
        const bool is_mine = product.a(0) < run.end && product.a(3) >= run.begin;
        product.add(dim, query, summary, score, is_mine);
    }
    __device__ void multiply_both(const lctx_score_run & run, int head, float (&score)[4][4]) const {
        const int query_dim = a.chunks.query_dim(a.head_dim);
        float others[4][4] = {}, outlier[4][4] = {};
        multiply(run, head, 0, query_dim, others);
        multiply(run, head, query_dim, a.head_dim, outlier);
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                score[i][j] += lctx_log_sum(a, others[i][j], outlier[i][j]);
            }
        }
    }
    __device__ void score_run(const lctx_score_run & run) const {
        float score[4][4] = {};
        for (int i = 0; i < p.n_product; i++) {
            const int head = list * p.heads_per_list + i * p.heads_per_product;
            if (a.chunks.has_outlier()) {
                multiply_both(run, head, score);
            } else {
                multiply(run, head, 0, a.chunks.query_dim(a.head_dim), score);
            }
        }
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                const int row = product.a(i), chunk = chunk0 + product.b(j);
                if (row >= run.begin && row < run.end && chunk < scored[row]) {
                    p.scores_of(a, first + row, list)[chunk] = score[i][j];
                }
            }
        }
    }
};
