// Says how a method chooses chunks: settings, and the arithmetic that host and kernels share.
//
// Selection is a filter on a base (full, string, dca, selfextend). The base says which rows a query reads and from
// which angle it sees them. Of these the filter leaves some whole, the *runs*: the first chunk, the last ones up to the
// query's own row, and chunks in which an angle ends. The rest are the *far ranges*, one for each angle at most: chunks
// of them are scored at their angle, and the best n_free are read. Where there are no more than n_free far chunks, the
// runs are the base's own segments and there are no ranges.
//
// In a prompt, the queries of a tile share what they read of the far ranges: its tokens and the query heads of a KV
// head have one list of chunks. Every step-th query of a head is compared; v(i) = max over these of (largest score of a
// key of chunk i - r), where r is the log of the sum over the rows that the query reads anyway. The list has the
// n_shared best chunks of those whose v reaches -cutoff. A token outside of a whole tile chooses for itself.
#pragma once

#include "summaries.h"

#include <cstdint>

struct lctx_chunks {
    int32_t chunk_size;
    int32_t n_free;    // far chunks that a query reads at most
    int32_t n_recent;  // chunks before its own that a query always reads
    int32_t n_run;     // segments of a query for its runs
    int32_t n_range;   // and for its far ranges
    int32_t by_group;  // 1: the query heads of a KV head choose together
    int32_t packed;  // 1: what is read stands side by side in front of the query (LongHeads, figure 3), seen from row n
                     // - 1 - i of the token's angles: chunk i of the n that it reads
    lctx_representation representation;
    int32_t tile;      // tokens of a tile; 1: every query of a prompt chooses for itself
    int32_t n_shared;  // chunks in the list of a tile at most
    int16_t step;      // one of that many queries of a head is compared for a tile
    int16_t cutoff;    // a tile does not read chunks with v below -cutoff

    LCTX_HD bool by_attention() const { return representation == LCTX_REPRESENT_ATTENTION; }

    // Every key is compared, not a summary of a chunk.
    LCTX_HD bool by_keys() const { return representation >= LCTX_REPRESENT_KEYS1; }
    LCTX_HD int32_t key_bits() const { return representation - LCTX_REPRESENT_KEYS1 + 1; }

    LCTX_HD lctx_summary_kind summary() const { return lctx_summary_kind_of(representation); }
    LCTX_HD int32_t summary_dim(int32_t head_dim) const { return summary().n_vector * head_dim; }

    // Elements of what is made of a query to multiply a summary up to its outlier.
    LCTX_HD int32_t query_dim(int32_t head_dim) const { return summary().n_sum() * head_dim; }

    // Return how many keys the others are.
    LCTX_HD float n_other() const { return (float)(chunk_size - 1); }

    // Segments that *select* writes for a query: its runs, then one inside a chunk for each far chunk that it reads;
    // packed: its chunks.
    LCTX_HD int32_t n_segment() const { return packed ? n_free + n_recent + 2 : n_run + n_free; }
    LCTX_HD int32_t n_whole() const { return packed ? 0 : n_run; }

    // Segments of a query that the host writes: runs, then ranges.
    LCTX_HD int32_t n_given() const { return n_run + n_range; }

    // Chunks that a query reads at most, where none is longer than the filter makes it.
    LCTX_HD int32_t n_chunk() const { return n_free + n_recent + 2; }

    LCTX_HD bool has_tiles() const { return tile > 1; }
    // Chunks that a query of a tile reads, counted as in n_chunk.
    LCTX_HD int32_t n_listed() const { return n_shared + n_recent + 2; }
};
