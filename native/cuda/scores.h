// Lays out the work buffer in which *select* scores chunks: the queries and scores of some tokens at a time.
#pragma once

#include "../ops/ranges.h"
#include "hadamard.h"
#include "index.h"
#include "kernels.h"

#include <cfloat>
#include <cmath>

// A query by keys: its levels in the order of lctx_key_order, and what its products are multiplied by. 16 bytes more
// than a multiple of 128: the same levels of eight queries are in different banks of shared memory.
struct lctx_key_query {
    float scale;
    int32_t unused[3];

    static size_t size(const lctx_index_shape & shape) {
        return sizeof(lctx_key_query) + lctx_key_order(shape).size() * sizeof(uint16_t);
    }
    __device__ uint16_t * levels() { return (uint16_t *)(this + 1); }
};

// Scores as integers that compare as they do. EMPTY: of a chunk that has no rows any more, or is in no range.
struct lctx_choice_key {
    static constexpr uint32_t EMPTY = 1;

    static __device__ uint32_t of(float score) {
        const uint32_t bits = score == 0.0f ? 0 : lctx_as_uint(fmaxf(score, -FLT_MAX));  // one zero
        return score != score ? EMPTY : bits >> 31 ? ~bits : bits | 1u << 31;
    }
};

// Cuts the work for tokens that choose for themselves, and says where it lies.
struct lctx_select_plan {
    float * scores;     // [n_slab][n_head][n_chunk_max] of the queries from `first` on
    char * queries;     // [n_slab][n_head][n_range] of query_size bytes
    size_t query_size;  // lctx_key_query, or by summaries a rotated query
    int32_t n_all;      // queries of a head
    int32_t first = 0;
    int32_t n_slab;  // of them at a time

    lctx_select_plan(const lctx_cuda_device & device, const lctx_select_args & a, char * work) {
        constexpr size_t BYTES = 256 * 1024;  // per multiprocessor: enough to keep all of them busy
        query_size = a.chunks.by_keys() ? lctx_key_query::size(a.index) : a.head_dim * sizeof(float);
        n_all = a.choices().n_alone();
        const int64_t most = (int64_t)(BYTES * device.n_multiprocessor / (of_scores(a) + of_queries(a)));
        n_slab = (int32_t)lctx_min(lctx_max(most, (int64_t)1), (int64_t)n_all);
        queries = work;
        scores = (float *)(work + n_slab * of_queries(a));
    }
    // Heads that choose together add their weights, which what they read anyway has a share of.
    static bool by_weights(const lctx_select_args & a) { return a.chunks.by_group && a.chunks.by_keys(); }
    size_t size(const lctx_select_args & a) const { return n_slab * (of_queries(a) + of_scores(a)); }
    // Bytes for a query of every head.
    size_t of_scores(const lctx_select_args & a) const { return (size_t)a.n_head * a.n_chunk_max * sizeof(float); }
    size_t of_queries(const lctx_select_args & a) const { return (size_t)a.n_head * a.chunks.n_range * query_size; }

    // The token of query i of the slab, among those outside of tiles.
    __device__ int32_t token(const lctx_select_args & a, int i) const {
        i += first;
        for (int tile = 0; tile < a.n_tile; tile++) {
            i += a.tiles[tile] <= i ? a.chunks.tile : 0;
        }
        return i;
    }
    __device__ float * scores_of(const lctx_select_args & a, int i, int head) const {
        return scores + ((size_t)i * a.n_head + head) * a.n_chunk_max;
    }
    __device__ char * query(const lctx_select_args & a, int i, int head, int slot) const {
        return queries + (((size_t)i * a.n_head + head) * a.chunks.n_range + slot) * query_size;
    }
};
