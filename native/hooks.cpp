#include "hooks.h"

#include "base/architectures.h"
#include "base/pending.h"
#include "graph/chain.h"
#include "llama-arch.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "memory/context-memory.h"

#include <algorithm>
#include <cstdlib>
#include <typeinfo>

namespace {

constexpr int32_t N_CHECKPOINT = 16;  // of a sequence: more than a chat turns back to

void check_supported(const llama_model & model, const llama_cparams & cparams) {
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        throw lctx_refusal(
            "split_mode=tensor divides K and V of a layer among devices, and pages are not divided; use "
            "split_mode=layer");
    }
    const std::string why = lctx_why_unsupported(model, cparams);
    if (!why.empty()) {
        throw lctx_refusal("architecture '" + model.arch_name() + "' cannot run with a method: " + why +
                           "; without a method it runs as in llama.cpp");
    }
}

// Positions that the model can tell apart: linear and YaRN scaling stretch them.
int32_t trained_context(const llama_model & model, const llama_cparams & cparams) {
    if (cparams.rope_scaling_type == LLAMA_ROPE_SCALING_TYPE_YARN) {
        return (int32_t)((float)cparams.n_ctx_orig_yarn / cparams.rope_freq_scale);
    }
    const float stretch = model.hparams.rope_freq_scale_train / cparams.rope_freq_scale;
    return (int32_t)((float)model.hparams.n_ctx_train * std::max(1.0f, stretch));
}

std::string pending_method(const lctx_pending & pending) {
    const char * env = getenv("LCTX_METHOD");
    return pending.active ? pending.method : env ? env : "";
}

}  // namespace

void lctx_memory_begin(const llama_model & model, const llama_memory_params &, const llama_cparams & cparams) {
    lctx_check_ubatches(model, cparams);
    lctx_pending & pending = lctx_pending_settings();
    pending.claims = !pending_method(pending).empty();
    pending.layers.clear();
    if (pending.claims) {
        check_supported(model, cparams);
    }
}

uint32_t lctx_claim_cells(const llama_model & model, uint32_t n_cell) {
    constexpr uint32_t FEW = 256;
    const bool alone = !llm_arch_is_hybrid(model.arch) && model.hparams.swa_type == LLAMA_SWA_TYPE_NONE;
    return lctx_pending_settings().claims && alone ? std::min(n_cell, FEW) : n_cell;
}

bool lctx_claim_layer(uint32_t il, int32_t source, int swa_type) {
    lctx_pending & pending = lctx_pending_settings();
    if (!pending.claims || swa_type != LLAMA_SWA_TYPE_NONE) {
        return false;
    }
    pending.layers.push_back({(int32_t)il, source});
    return true;
}

llama_memory_i * lctx_memory_end(const llama_model & model, const llama_memory_params & params,
                                 const llama_cparams & cparams, llama_memory_i * memory) {
    lctx_pending & pending = lctx_pending_settings();
    if (!pending.claims) {
        return memory;
    }
    pending.claims = false;
    std::unique_ptr<llama_memory_i> own(memory);
    std::unique_ptr<lctx_foreign_memory> foreign;
    const llama_memory_i & kind = *memory;
    if (typeid(kind) != typeid(llama_kv_cache)) {
        foreign = lctx_foreign_memory::create(std::move(own), model, cparams);
        if (!foreign) {
            throw lctx_refusal("architecture '" + model.arch_name() +
                               "' cannot run with a method: it selects keys itself, with an indexer");
        }
    }
    const std::string text = pending_method(pending);
    const uint32_t n_ctx = pending.active ? pending.n_ctx : cparams.n_ctx_seq;
    const int32_t first = pending.layers.empty() ? -1 : pending.layers.front().il;
    const int32_t head_dim = first < 0 ? 0 : (int32_t)model.hparams.n_embd_head_k(first);
    const int32_t n_rep = first < 0 ? 0 : (int32_t)model.hparams.n_gqa(first);
    const bool fixed = pending.active && pending.fixed;
    auto method = lctx_method_create(lctx_method_parse(text), {trained_context(model, cparams), (int32_t)n_ctx,
                                                               head_dim, (int32_t)cparams.n_ubatch, fixed, n_rep});
    auto cache = std::make_unique<lctx_kv_cache>(model, params, cparams, pending.layers, std::move(method), n_ctx,
                                                 pending.active ? pending.kv_limit : 0,
                                                 pending.active ? pending.offload : lctx_offload());
    if (foreign && foreign->n_keep_tail() > 0 && cache->method().retain()) {
        throw lctx_refusal(
            "snapshots of recurrent states (n_rs_seq) do not go with an eviction rule, which divides batches "
            "elsewhere");
    }
    cache->fix(fixed);
    if (cache->is_fixed() && cache->method().retain()) {
        throw lctx_refusal(
            "deterministic: what a rule evicts depends on where batches end; use a method without a rule");
    }
    const std::string why = lctx_why_not_there(model, *cache);
    if (!why.empty()) {
        throw lctx_refusal(why);
    }
    LLAMA_LOG_INFO("lctx: %s\n", cache->placement().full_why().c_str());
    return new lctx_context_memory(std::move(cache), std::move(foreign), N_CHECKPOINT);
}
