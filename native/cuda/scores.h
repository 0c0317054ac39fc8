// How *select* scores chunks: where queries and scores stand in the work buffer, those of some tokens at a time.
#pragma once

#include "../ops/ranges.h"
#include "hadamard.h"
#include "index.h"
#include "kernels.h"

#include <cfloat>
#include <cmath>

// A query by keys: its levels in the order of lctx_key_order, and what its products are multiplied by. 16 bytes more than a multiple of
// 128: the same levels of eight queries are in different banks of shared memory.
struct lctx_key_query {
    float scale;
    int32_t unused[3];

    static size_t size(const lctx_index_shape & shape) { return sizeof(lctx_key_query) + lctx_key_order(shape).size() * sizeof(uint16_t); }
    __device__ uint16_t * levels() { return (uint16_t *)(this + 1); }
};

// How the work is cut and where it lies.
struct lctx_select_plan {
    float * scores;     // [n_slab][n_head][n_chunk_max] of the tokens from `first` on
    char * queries;     // [n_slab][n_head][n_range] of query_size bytes
    size_t query_size;  // lctx_key_query, or by summaries a rotated query
    int32_t first = 0;
    int32_t n_slab;  // tokens at a time

    lctx_select_plan(const lctx_cuda_device & device, const lctx_select_args & a, char * work) {
        constexpr size_t BYTES = 256 * 1024;  // per multiprocessor: enough to keep all of them busy
        query_size = a.chunks.by_keys() ? lctx_key_query::size(a.index) : a.head_dim * sizeof(float);
        const int64_t most = (int64_t)(BYTES * device.n_multiprocessor / (of_scores(a) + of_queries(a)));
        n_slab = (int32_t)lctx_min(lctx_max(most, (int64_t)1), (int64_t)a.n_tokens);
        queries = work;
        scores = (float *)(work + n_slab * of_queries(a));
    }
    size_t size(const lctx_select_args & a) const { return n_slab * (of_queries(a) + of_scores(a)); }
    // Bytes for a token.
    static size_t of_scores(const lctx_select_args & a) { return (size_t)a.n_head * a.n_chunk_max * sizeof(float); }
    size_t of_queries(const lctx_select_args & a) const { return (size_t)a.n_head * a.chunks.n_range * query_size; }

    __device__ float * scores_of(const lctx_select_args & a, int i, int head) const {
        return scores + ((size_t)i * a.n_head + head) * a.n_chunk_max;
    }
    __device__ char * query(const lctx_select_args & a, int i, int head, int slot) const {
        return queries + (((size_t)i * a.n_head + head) * a.chunks.n_range + slot) * query_size;
    }
};
