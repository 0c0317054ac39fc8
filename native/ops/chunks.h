// How a method chooses chunks: settings, and the arithmetic that host and kernels share.
//
// Chunk i is the rows [i*chunk_size, (i+1)*chunk_size) of a sequence. A query at position p in chunk o = p / chunk_size reads all
// chunks while o < n_chunk; else chunk 0, its own, the n_recent before it, and the best of the others (LongHeads, arXiv 2402.10685,
// eq. 3).
//
// Keys are stored at their place in their chunk, j mod chunk_size. A query is rotated to p mod chunk_size, and sees a chunk from a
// *place*: that many chunks further on.
#pragma once

#include "ggml.h"
#include "portable.h"

#include <cstdint>

// Ablations of table 4, for tests.
enum lctx_ablation : int32_t { LCTX_ABLATE_NONE, LCTX_ABLATE_RANDOM, LCTX_ABLATE_RANDOM_ALL, LCTX_ABLATE_NO_FIRST, LCTX_ABLATE_LAST };

// What stands for a chunk. attention: the paper's mean key (eq. 1-2), of keys at their place in the chunk, per query head. The others
// are of keys at their own positions, per KV head: minmax, the largest and smallest value of every channel (Quest, arXiv 2406.10774);
// moments, mean and variance of every channel; outlier, the key farthest from the mean, after the moments of the others.
enum lctx_representation : int32_t { LCTX_REPRESENT_ATTENTION, LCTX_REPRESENT_MINMAX, LCTX_REPRESENT_MOMENTS, LCTX_REPRESENT_OUTLIER };

// Elements of one summary.
LCTX_HD constexpr int32_t lctx_summary_dim(lctx_representation representation, int32_t head_dim) {
    return head_dim * (representation == LCTX_REPRESENT_ATTENTION ? 1 : representation == LCTX_REPRESENT_OUTLIER ? 3 : 2);
}

// Type of the summaries. Chunks are ranked as well by an outlier and the moments beside it in eight bits; bounds must stay bounds, which
// halves that are rounded outwards do.
LCTX_HD constexpr ggml_type lctx_summary_type(lctx_representation representation, int32_t head_dim) {
    constexpr int32_t BLOCK = 32;
    return representation == LCTX_REPRESENT_OUTLIER && head_dim % BLOCK == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

// Most query heads that add up their shares of the attention, with mass and by_group.
constexpr int32_t LCTX_MOST_SHARES = 128;

struct lctx_chunks {
    int32_t chunk_size;
    int32_t n_chunk;   // chunks that a query reads at most
    int32_t n_recent;  // chunks before its own that a query always reads
    int32_t by_group;  // 1: the query heads of a KV head choose together
    lctx_representation representation;
    int32_t n_exact;     // queries in chunks before this one see every chunk at its own distance; later ones:
    int32_t n_near;      // so many chunks back too; and what is farther
    int32_t group_size;  // 0: side by side (packed), with n_near 0; else with distances divided by it
    int32_t n_neighbor;  // places given to the neighbours of the best chunks
    lctx_ablation ablation;
    float mass;  // > 0: the best chunks until the estimated share of the attention that is read reaches it; 0: as many as fit

    LCTX_HD bool by_attention() const { return representation == LCTX_REPRESENT_ATTENTION; }

    LCTX_HD int32_t summary_dim(int32_t head_dim) const { return lctx_summary_dim(representation, head_dim); }

    LCTX_HD ggml_type summary_type(int32_t head_dim) const { return lctx_summary_type(representation, head_dim); }

    // Whether a key stands at the end of a summary, by itself: the score is the log of what it attracts and the other keys do.
    LCTX_HD bool has_outlier() const { return representation == LCTX_REPRESENT_OUTLIER; }

    // Elements of what is made of a query to multiply a summary up to its outlier.
    LCTX_HD int32_t query_dim(int32_t head_dim) const { return by_attention() ? head_dim : 2 * head_dim; }

    // How many keys the others are.
    LCTX_HD float n_other() const { return (float)(chunk_size - 1); }

    // Segments of a query: its chunks, and with mass an empty one {rows read, rows read, estimated share that is not read, seq}.
    LCTX_HD int32_t n_segment() const { return n_chunk + (mass > 0.0f ? 1 : 0); }

    // From which place a query in chunk own sees the chunk that is number i of the n it reads, in ascending order.
    LCTX_HD int32_t place(int32_t own, int32_t chunk, int32_t i, int32_t n) const {
        const int32_t distance = own - chunk;
        if (own < n_exact || distance < n_near) {
            return distance;
        }
        return group_size == 0 ? n - 1 - i : n_near + (distance - n_near) / group_size;
    }

    // Whether a query in chunk own reads all chunks.
    LCTX_HD bool reads_all(int32_t own) const { return own < (mass > 0.0f ? n_recent + 2 : n_chunk); }

    // Candidates [first, end) and how many of them can be chosen, for a query in chunk own that does not read everything.
    LCTX_HD int32_t first_candidate() const { return ablation == LCTX_ABLATE_NO_FIRST || ablation == LCTX_ABLATE_RANDOM_ALL ? 0 : 1; }
    LCTX_HD int32_t end_candidate(int32_t own) const { return ablation == LCTX_ABLATE_RANDOM_ALL ? own : own - n_recent; }
    LCTX_HD int32_t n_free(int32_t own) const {
        return lctx_min(n_chunk - first_candidate() - (own - end_candidate(own)) - 1, end_candidate(own) - first_candidate());
    }
};

// Rows of the angle table of one token at p, from its first one on.
constexpr int32_t LCTX_ANGLE_LOCAL = 0;  // p mod chunk_size: where its key is stored
constexpr int32_t LCTX_ANGLE_START = 1;  // where its chunk begins: takes a key from its place in the chunk to where it is compared
constexpr int32_t LCTX_N_ANGLE_CHUNKS = 2;
