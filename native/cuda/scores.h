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

// Scores as integers that compare as they do. EMPTY: of a chunk that has no rows any more, or is in no range.
struct lctx_choice_key {
    static constexpr uint32_t EMPTY = 1;

    static __device__ uint32_t of(float score) {
        const uint32_t bits = score == 0.0f ? 0 : lctx_as_uint(fmaxf(score, -FLT_MAX));  // one zero
        return score != score ? EMPTY : bits >> 31 ? ~bits : bits | 1u << 31;
    }
};

// How the work is cut and where it lies. There are two kinds: the queries of tokens that choose for themselves, and those that are compared
// for tiles (../ops/chunks.h), n_compared of every head and tile.
struct lctx_select_plan {
    float * scores;      // [n_slab][n_head][n_chunk_max] of the queries from `first` on
    uint32_t * keys;     // of tiles in their place: [n_tile][n_list][n_chunk_max] values as lctx_choice_key
    float * references;  // [n_slab][n_head] where they are needed
    char * queries;      // [n_slab][n_head][n_range] of query_size bytes
    size_t query_size;   // lctx_key_query, or by summaries a rotated query
    int32_t n_compared;  // 0: of tokens that choose for themselves
    int32_t n_all;       // queries of a head
    int32_t first = 0;
    int32_t n_slab;  // of them at a time

    lctx_select_plan(const lctx_cuda_device & device, const lctx_select_args & a, bool of_tiles, char * work) {
        constexpr size_t BYTES = 256 * 1024;  // per multiprocessor: enough to keep all of them busy
        query_size = a.chunks.by_keys() ? lctx_key_query::size(a.index) : a.head_dim * sizeof(float);
        n_compared = of_tiles ? a.chunks.tile / a.chunks.step : 0;
        n_all = of_tiles ? a.n_tile * n_compared : a.choices().n_alone();
        const int64_t most = (int64_t)(BYTES * device.n_multiprocessor / (of_scores(a) + of_references(a) + of_queries(a)));
        n_slab = of_tiles ? n_all : (int32_t)lctx_min(lctx_max(most, (int64_t)1), (int64_t)n_all);
        queries = work;
        references = (float *)(work + n_slab * of_queries(a));
        scores = (float *)((char *)references + n_slab * of_references(a));
        keys = (uint32_t *)scores;
    }
    bool of_tiles() const { return n_compared > 0; }
    // Heads that choose together add their weights, which what they read anyway has a share of.
    static bool by_weights(const lctx_select_args & a) { return a.chunks.by_group && a.chunks.by_keys(); }
    bool has_references(const lctx_select_args & a) const { return of_tiles() || by_weights(a); }
    size_t n_key(const lctx_select_args & a) const { return of_tiles() ? (size_t)a.n_tile * a.n_list * a.n_chunk_max : 0; }
    size_t size(const lctx_select_args & a) const {
        return n_slab * (of_queries(a) + of_references(a) + of_scores(a)) + n_key(a) * sizeof(uint32_t);
    }
    // Bytes for a query of every head.
    size_t of_scores(const lctx_select_args & a) const { return of_tiles() ? 0 : (size_t)a.n_head * a.n_chunk_max * sizeof(float); }
    size_t of_references(const lctx_select_args & a) const { return has_references(a) ? a.n_head * sizeof(float) : 0; }
    size_t of_queries(const lctx_select_args & a) const { return (size_t)a.n_head * a.chunks.n_range * query_size; }

    // The token of query i of the slab.
    __device__ int32_t token(const lctx_select_args & a, int i, int head) const {
        return n_compared > 0 ? compared(a, i, head) : alone(a, first + i);
    }
    // Number i of the tokens outside of tiles.
    __device__ static int32_t alone(const lctx_select_args & a, int32_t i) {
        for (int tile = 0; tile < a.n_tile; tile++) {
            i += a.tiles[tile] <= i ? a.chunks.tile : 0;
        }
        return i;
    }
    // Every step-th token of a tile, other ones for each head of a KV head.
    __device__ int32_t compared(const lctx_select_args & a, int i, int head) const {
        const int step = a.chunks.step, skew = head % (a.n_head / a.n_list) % step;
        return a.tiles[i / n_compared] + (step - skew) % step + i % n_compared * step;
    }
    __device__ float * scores_of(const lctx_select_args & a, int i, int head) const {
        return scores + ((size_t)i * a.n_head + head) * a.n_chunk_max;
    }
    __device__ uint32_t * keys_of(const lctx_select_args & a, int tile, int list) const {
        return keys + ((size_t)tile * a.n_list + list) * a.n_chunk_max;
    }
    __device__ float & reference(const lctx_select_args & a, int i, int head) const { return references[(size_t)i * a.n_head + head]; }
    __device__ char * query(const lctx_select_args & a, int i, int head, int slot) const {
        return queries + (((size_t)i * a.n_head + head) * a.chunks.n_range + slot) * query_size;
    }
};
