#include "hooks.h"

#include "llama-arch.h"
#include "llama-impl.h"
#include "memory/memory.h"
#include "pending.h"

#include <algorithm>
#include <cstdlib>

namespace {

// Architectures proven equal to llama.cpp by tests/test_parity.py.
bool is_proven(llm_arch arch) {
    return arch == LLM_ARCH_LLAMA || arch == LLM_ARCH_QWEN2;
}

// Why a model cannot run with a method; empty when it can.
std::string why_unsupported(const llama_model & model, const llama_cparams & cparams) {
    const llama_hparams & hparams = model.hparams;
    if (llm_arch_is_recurrent(model.arch)) {
        return "its memory is recurrent, there is no KV cache to manage";
    }
    if (llm_arch_is_hybrid(model.arch)) {
        return "it mixes recurrent and attention layers";
    }
    if (llama_model_has_encoder(&model) || !cparams.causal_attn || !llama_model_has_decoder(&model)) {
        return "it is an encoder, methods need causal attention";
    }
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE) {
        return "it uses sliding-window attention";
    }
    if (hparams.is_mla()) {
        return "it uses multi-head latent attention";
    }
    if (hparams.rope_type != LLAMA_ROPE_TYPE_NORM && hparams.rope_type != LLAMA_ROPE_TYPE_NEOX) {
        return hparams.rope_type == LLAMA_ROPE_TYPE_NONE ? "it has no rotary positions" : "it uses multi-section RoPE";
    }
    return is_proven(model.arch) ? "" : "this architecture is not proven yet (proven: llama, qwen2)";
}

void check_supported(const llama_model & model, const llama_cparams & cparams) {
    const std::string why = why_unsupported(model, cparams);
    if (!why.empty()) {
        throw lctx_refusal("architecture '" + model.arch_name() + "' cannot run with a method: " + why +
                           "; without a method it runs as in llama.cpp");
    }
    if (cparams.n_seq_max != 1) {
        throw lctx_refusal("a context with a method serves one sequence in this version, not n_seq_max " +
                           std::to_string(cparams.n_seq_max));
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

std::unique_ptr<lctx_method> make_method(const llama_model & model, const llama_cparams & cparams, const std::string & text,
                                         uint32_t n_ctx) {
    check_supported(model, cparams);
    return lctx_method_create(lctx_method_parse(text), {trained_context(model, cparams), (int32_t)n_ctx});
}

std::string pending_method(const lctx_pending & pending) {
    const char * env = getenv("LCTX_METHOD");
    return pending.active ? pending.method : env ? env : "";
}

}  // namespace

lctx_pending & lctx_pending_settings() {
    static thread_local lctx_pending pending;
    return pending;
}

llama_memory_i * lctx_create_memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams) {
    const lctx_pending & pending = lctx_pending_settings();
    const std::string text = pending_method(pending);
    if (text.empty()) {
        return nullptr;
    }
    const uint32_t n_ctx = pending.active ? pending.n_ctx : cparams.n_ctx_seq;
    auto memory = std::make_unique<lctx_memory>(model, params, cparams, make_method(model, cparams, text, n_ctx), n_ctx);
    LLAMA_LOG_INFO("lctx: %s\n", memory->method().why().c_str());
    return memory.release();
}
