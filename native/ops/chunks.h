// How a method chooses chunks: settings, and the arithmetic that host and kernels share.
//
// Chunk i is the rows [i*chunk_size, (i+1)*chunk_size) of a sequence. A query at position p in chunk o = p / chunk_size reads all
// chunks while o < n_chunk; else chunk 0, its own, the n_recent before it, and the best of the others (LongHeads, arXiv 2402.10685,
// eq. 3).
#pragma once

#include "portable.h"

#include <cstdint>

// Ablations of table 4, for tests.
enum lctx_ablation : int32_t { LCTX_ABLATE_NONE, LCTX_ABLATE_RANDOM, LCTX_ABLATE_RANDOM_ALL, LCTX_ABLATE_NO_FIRST, LCTX_ABLATE_LAST };

struct lctx_chunks {
    int32_t chunk_size;
    int32_t n_chunk;       // chunks that a query reads
    int32_t n_recent;      // chunks before its own that a query always reads
    int32_t by_group;      // 1: the query heads of a KV head choose together
    int32_t select_block;  // neighbouring queries that choose together
    int32_t minmax;        // 1: extremes of the keys; 0: the paper's summary, eq. 1-2
    int32_t near_window;   // > 0: grouped positions, exact for distances below it; 0: packed
    int32_t n_neighbor;    // places given to the neighbours of the best chunks
    lctx_ablation ablation;

    // Elements of one summary.
    LCTX_HD int32_t summary_dim(int32_t head_dim) const { return minmax ? 2 * head_dim : head_dim; }

    // Segments per query: the chunks, and with grouped positions the chunks that the near window touches once more.
    LCTX_HD int32_t n_segment() const { return n_chunk + (near_window > 0 ? n_near_chunk() : 0); }
    LCTX_HD int32_t n_near_chunk() const { return (near_window + chunk_size - 1) / chunk_size + 1; }
    // The segments that read the near ring begin here.
    LCTX_HD int32_t near_segment() const { return n_chunk; }

    // The first row that the query at p reads at its exact distance.
    LCTX_HD int32_t near_row(int32_t p) const {
        return near_window == 0 ? p + 1 : lctx_max(lctx_max(0, p - near_window + 1), (p / chunk_size - n_recent) * chunk_size);
    }

    // Candidates [first, end) and how many of them are chosen, for a query in chunk own. Everything is read while own < n_chunk.
    LCTX_HD int32_t first_candidate() const { return ablation == LCTX_ABLATE_NO_FIRST || ablation == LCTX_ABLATE_RANDOM_ALL ? 0 : 1; }
    LCTX_HD int32_t end_candidate(int32_t own) const { return ablation == LCTX_ABLATE_RANDOM_ALL ? own : own - n_recent; }
    LCTX_HD int32_t n_free(int32_t own) const { return n_chunk - first_candidate() - (own - end_candidate(own)) - 1; }
};

// Rows of the angle table of one token, from its first one on.
//   packed:  row s, s < n_chunk, is the position s*chunk_size + p % chunk_size: from there a query sees the chunk s places before
//            its own; row 0 is also where the token's key is stored.
//   grouped: as named below.
constexpr int32_t LCTX_ANGLE_LOCAL = 0;   // p % chunk_size, both
constexpr int32_t LCTX_ANGLE_SHIFT = 1;   // -(p / chunk_size * chunk_size): takes a key from p to p % chunk_size
constexpr int32_t LCTX_ANGLE_STORED = 2;  // floor(p / G)
constexpr int32_t LCTX_ANGLE_EXACT = 3;   // p
constexpr int32_t LCTX_ANGLE_FAR = 4;     // from where the query looks at far chunks
constexpr int32_t LCTX_N_ANGLE_GROUPED = 5;
