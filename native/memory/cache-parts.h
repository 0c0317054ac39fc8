// Puts a cache together: where rows lie, the sequences, and the pages that they hold. States, slices and evictions work
// on all three.
#pragma once

#include "blocks.h"
#include "placement.h"
#include "sequences.h"

#include <cstdint>
#include <vector>

// Holds what in a context determines how keys are rotated, in addition to the model and the method.
struct lctx_rope_settings {
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    uint32_t n_ctx_orig;
};

struct lctx_cache_parts {
    // As lctx_kv_cache; the method lives longer.
    lctx_cache_parts(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                     const std::vector<lctx_claimed> & layers, const lctx_method & method, uint32_t n_ctx,
                     uint64_t kv_limit, const lctx_offload & offload);

    // Cut a sequence back; why_not_back_to has nothing against it.
    void truncate(int32_t seq, int32_t n_pos);
    // The queries of a sequence from row n_pos on have not voted. A layer that a failed ubatch did not reach has
    // nothing to take back.
    void take_votes_back(int32_t seq, int32_t n_pos);
    // Make dst, which is empty, the first n_pos rows of src. Why that cannot be, and dst is empty; empty when it was
    // done.
    std::string copy(int32_t src, int32_t dst, int32_t n_pos);
    // The index is made from the rows: what was read from elsewhere has none.
    void index_rows(int32_t seq, int32_t first, int32_t end) const;

    const lctx_rope_settings rope;
    lctx_placement placement;
    lctx_sequences seqs;
    lctx_blocks blocks;
};
