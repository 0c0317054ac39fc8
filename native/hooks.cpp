#include "hooks.h"

#include "graph/chain.h"
#include "llama-arch.h"
#include "llama-impl.h"
#include "memory/memory.h"
#include "pending.h"

#include <algorithm>
#include <cstdlib>

namespace {

// Architectures that tests/test_models.py proves equal to llama.cpp.
constexpr llm_arch PROVEN[] = {
    LLM_ARCH_LLAMA,       LLM_ARCH_ARCEE,     LLM_ARCH_ARCTIC,    LLM_ARCH_BAICHUAN,     LLM_ARCH_BAILINGMOE, LLM_ARCH_BAILINGMOE2,
    LLM_ARCH_BITNET,      LLM_ARCH_CHATGLM,   LLM_ARCH_CODESHELL, LLM_ARCH_COMMAND_R,    LLM_ARCH_DBRX,       LLM_ARCH_DECI,
    LLM_ARCH_DEEPSEEK,    LLM_ARCH_DOTS1,     LLM_ARCH_ERNIE4_5,  LLM_ARCH_ERNIE4_5_MOE, LLM_ARCH_EXAONE,     LLM_ARCH_EXAONE4,
    LLM_ARCH_FALCON,      LLM_ARCH_GEMMA,     LLM_ARCH_GLM4,      LLM_ARCH_GLM4_MOE,     LLM_ARCH_GPTNEOX,    LLM_ARCH_GRANITE,
    LLM_ARCH_GRANITE_MOE, LLM_ARCH_INTERNLM2, LLM_ARCH_JAIS2,     LLM_ARCH_MINICPM,      LLM_ARCH_MINIMAX_M2, LLM_ARCH_MISTRAL3,
    LLM_ARCH_NEMOTRON,    LLM_ARCH_OLMO,      LLM_ARCH_OLMO2,     LLM_ARCH_OLMOE,        LLM_ARCH_OPENELM,    LLM_ARCH_ORION,
    LLM_ARCH_PANGU_EMBED, LLM_ARCH_PHI2,      LLM_ARCH_PHI3,      LLM_ARCH_PHIMOE,       LLM_ARCH_PLAMO,      LLM_ARCH_QWEN,
    LLM_ARCH_QWEN2,       LLM_ARCH_QWEN2MOE,  LLM_ARCH_QWEN3,     LLM_ARCH_QWEN3MOE,     LLM_ARCH_SEED_OSS,   LLM_ARCH_STABLELM,
    LLM_ARCH_STARCODER2,  LLM_ARCH_XVERSE,
};

// Architectures that keep a KV cache and rotate, yet in a way that cannot be peeled.
constexpr struct {
    llm_arch arch;
    const char * why;
} OBSTACLES[] = {
    {LLM_ARCH_HUNYUAN_DENSE, "it normalizes queries and keys after the rotation"},
    {LLM_ARCH_HUNYUAN_MOE, "it normalizes queries and keys after the rotation"},
    {LLM_ARCH_MAINCODER, "it normalizes queries and keys after the rotation"},
    {LLM_ARCH_SMOLLM3, "some of its layers have no rotary positions"},
    {LLM_ARCH_MINICPM3, "it joins a rotated and an unrotated part of each head"},
    {LLM_ARCH_PLM, "it joins a rotated and an unrotated part of each head"},
    {LLM_ARCH_GROK, "it scales attention scores in a way of its own"},
};

// Why an architecture that passed the general checks is not served; empty when it is.
std::string why_not_proven(llm_arch arch) {
    std::string names;
    for (llm_arch proven : PROVEN) {
        if (proven == arch) {
            return "";
        }
        names += (names.empty() ? "" : ", ") + std::string(llm_arch_name(proven));
    }
    for (const auto & obstacle : OBSTACLES) {
        if (obstacle.arch == arch) {
            return obstacle.why;
        }
    }
    return "this architecture is not proven yet (proven: " + names + ")";
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
    if (hparams.use_alibi) {
        return "it uses ALiBi, a bias on distance instead of rotary positions";
    }
    if (hparams.rope_type != LLAMA_ROPE_TYPE_NORM && hparams.rope_type != LLAMA_ROPE_TYPE_NEOX) {
        return hparams.rope_type == LLAMA_ROPE_TYPE_NONE ? "it has no rotary positions" : "it uses multi-section RoPE";
    }
    return why_not_proven(model.arch);
}

void check_supported(const llama_model & model, const llama_cparams & cparams) {
    if (model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        throw lctx_refusal("split_mode=tensor divides K and V of a layer among devices, and pages are not divided; use split_mode=layer");
    }
    const std::string why = why_unsupported(model, cparams);
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
    auto memory = std::make_unique<lctx_memory>(model, params, cparams, make_method(model, cparams, text, n_ctx), n_ctx,
                                                pending.active ? pending.kv_limit : 0, pending.active ? pending.kv_offload : 0);
    const std::string why = lctx_why_not_there(model, *memory);
    if (!why.empty()) {
        throw lctx_refusal(why);
    }
    LLAMA_LOG_INFO("lctx: %s\n", memory->full_why().c_str());
    return memory.release();
}
