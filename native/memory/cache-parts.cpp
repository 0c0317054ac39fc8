#include "cache-parts.h"

#include "llama-cparams.h"
#include "plane-runs.h"

lctx_cache_parts::lctx_cache_parts(const llama_model & model, const llama_memory_params & params,
                                   const llama_cparams & cparams, const std::vector<lctx_claimed> & layers,
                                   const lctx_method & method, uint32_t n_ctx, uint64_t kv_limit,
                                   const lctx_offload & offload)
    : rope{cparams.rope_freq_base, cparams.rope_freq_scale, cparams.yarn_ext_factor, cparams.yarn_attn_factor,
           cparams.yarn_beta_fast, cparams.yarn_beta_slow,  cparams.n_ctx_orig_yarn},
      placement(model, params, layers, method, lctx_kv_sizes(n_ctx, cparams), cparams.offload_kqv, offload),
      seqs(placement),
      blocks(placement, seqs, kv_limit) {}

void lctx_cache_parts::truncate(int32_t seq, int32_t n_pos) {
    take_votes_back(seq, n_pos);
    blocks.cut(seq, n_pos);
    seqs.forget_beyond(seq);
    if (n_pos == 0) {
        seqs[seq] = lctx_sequence{};
        for (const auto & store : placement.stores()) {
            store->forget_evictions(seq);
        }
    }
    for (const auto & store : placement.stores()) {
        store->return_pages();
    }
}

void lctx_cache_parts::take_votes_back(int32_t seq, int32_t n_pos) {
    if (seqs.take_votes_back(seq, n_pos)) {
        for (const auto & store : placement.stores()) {
            store->take_votes_back(seq, n_pos);
        }
    }
}

std::string lctx_cache_parts::copy(int32_t src, int32_t dst, int32_t n_pos) {
    truncate(dst, 0);
    if (n_pos == 0) {
        return "";
    }
    const std::string why = blocks.share(src, dst, n_pos);
    if (!why.empty()) {
        truncate(dst, 0);
        return why + "; the copy is empty";
    }
    for (const auto & store : placement.stores()) {
        store->forget_staged(dst);
    }
    seqs[dst].n_pos = n_pos;
    seqs.forget_beyond(dst);
    lctx_copy_planes(placement, seqs, src, dst);
    take_votes_back(dst, n_pos);
    blocks.note_peak();
    return "";
}

void lctx_cache_parts::index_rows(int32_t seq, int32_t first, int32_t end) const {
    for (const auto & store : placement.stores()) {
        store->index_rows(seq, first, end, placement.sizes().n_threads);
    }
}
