// Defines what a query compares itself with to score a chunk: the names of option `representation`, what a summary of a
// chunk is, and how a query meets it. cpu/summarize.cpp and cuda/channels.h compute the summaries, of keys as they are
// stored.
//
// attention, per query head: the mean key of LongHeads (arXiv 2402.10685, eq. 1-2); the score is the product with it.
// The rest is per KV head. minmax: the largest and smallest value of every channel (Quest, arXiv 2406.10774); the score
// is the sum over channels of max(q, 0) * maximum + min(q, 0) * minimum, an upper bound of the best key's. outlier: the
// key farthest from the mean of the chunk, after mean and scale^2/2 times variance of the l - 1 others; the score is
// the log of what it attracts and, were they normally distributed, the others do: log(exp(scale * q . outlier) + (l -
// 1) exp(scale * q . mean + scale^2/2 * q^2 . variance)). keys1, keys2: every key in one or two bits a channel
// (index.h); the score is the log of the sum over the rows of a chunk of exp(scale * q . key).
#pragma once

#include "ggml.h"
#include "portable.h"

#include <cstdint>

enum lctx_representation : int32_t {
    LCTX_REPRESENT_ATTENTION,
    LCTX_REPRESENT_MINMAX,
    LCTX_REPRESENT_OUTLIER,
    LCTX_REPRESENT_KEYS1,
    LCTX_REPRESENT_KEYS2,
};

inline constexpr const char * LCTX_REPRESENTATIONS[] = {"attention", "minmax", "outlier", "keys1", "keys2"};

// A summary is n_vector vectors of head_dim numbers.
struct lctx_summary_kind {
    int32_t n_vector;  // 0: every key is compared
    bool in_bytes;     // q8_0 where its blocks fit: chunks are ranked as well by them; else halves
    bool has_bounds;   // of halves the first vector is rounded up and the second down
    bool has_outlier;  // the last vector is a key by itself: the score is the log of what it attracts and the other
                       // keys do

    LCTX_HD constexpr int32_t n_sum() const { return n_vector - has_outlier; }
};

LCTX_HD constexpr lctx_summary_kind lctx_summary_kind_of(lctx_representation representation) {
    switch (representation) {
        case LCTX_REPRESENT_ATTENTION: return {1, false, false, false};
        case LCTX_REPRESENT_MINMAX:    return {2, false, true, false};
        case LCTX_REPRESENT_OUTLIER:   return {3, true, false, true};
        case LCTX_REPRESENT_KEYS1:
        case LCTX_REPRESENT_KEYS2:     break;
    }
    return {0, false, false, false};
}
constexpr int32_t LCTX_MOST_VECTORS = 3, LCTX_MOST_SUM = 2;

// Return what a number of a query becomes to be multiplied with its number in a vector of a summary.
LCTX_HD inline float lctx_meet(lctx_representation representation, int32_t vector, float q, float scale) {
    switch (representation) {
        case LCTX_REPRESENT_MINMAX:    return (q < 0.0f) == (vector == 0) ? 0.0f : q;
        case LCTX_REPRESENT_OUTLIER:   return vector == 1 ? q * q : scale * q;
        case LCTX_REPRESENT_ATTENTION:
        case LCTX_REPRESENT_KEYS1:
        case LCTX_REPRESENT_KEYS2:     break;
    }
    return q;
}

// Type of the summaries. The paper's mean keys must rank chunks as its equations do where K is exact.
LCTX_HD constexpr ggml_type lctx_summary_type(lctx_representation representation, int32_t head_dim, ggml_type type_k) {
    constexpr int32_t BLOCK = 32;
    return lctx_summary_kind_of(representation).in_bytes && head_dim % BLOCK == 0  ? GGML_TYPE_Q8_0
           : representation == LCTX_REPRESENT_ATTENTION && type_k == GGML_TYPE_F32 ? GGML_TYPE_F32
                                                                                   : GGML_TYPE_F16;
}
