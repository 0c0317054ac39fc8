#include "architectures.h"

#include "llama-cparams.h"
#include "llama-model.h"
#include "refusal.h"

#include <algorithm>
#include <vector>

namespace {

constexpr bool FLOAT = true, PAIRS = true, CAPPED = true, MIXES = true, EVEN = true;

const char * const INDEXER = "it selects keys itself, with an indexer";

// clang-format off
const std::vector<lctx_architecture> & table() {
    static const std::vector<lctx_architecture> rows = {
        {LLM_ARCH_APERTUS}, {LLM_ARCH_ARCEE}, {LLM_ARCH_ARCTIC}, {LLM_ARCH_BAICHUAN}, {LLM_ARCH_BAILINGMOE},
        {LLM_ARCH_BAILINGMOE2},
        {LLM_ARCH_BITNET}, {LLM_ARCH_CHAMELEON}, {LLM_ARCH_CHATGLM, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_CODESHELL},
        {LLM_ARCH_COGVLM},
        {LLM_ARCH_COMMAND_R, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_DBRX}, {LLM_ARCH_DECI}, {LLM_ARCH_DEEPSEEK},
        {LLM_ARCH_DEEPSEEK2OCR},
        {LLM_ARCH_DOTS1}, {LLM_ARCH_ERNIE4_5, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_ERNIE4_5_MOE, nullptr, !FLOAT, PAIRS},
        {LLM_ARCH_EXAONE}, {LLM_ARCH_FALCON}, {LLM_ARCH_GEMMA}, {LLM_ARCH_GLM4, nullptr, FLOAT, PAIRS},
        {LLM_ARCH_GLM4_MOE, nullptr, FLOAT}, {LLM_ARCH_GPTNEOX}, {LLM_ARCH_GRANITE}, {LLM_ARCH_GRANITE_MOE},
        {LLM_ARCH_GROK, nullptr, !FLOAT, !PAIRS, CAPPED},
        {LLM_ARCH_GROVEMOE}, {LLM_ARCH_HRM_TEXT}, {LLM_ARCH_HY_V3}, {LLM_ARCH_INTERNLM2},
        {LLM_ARCH_JAIS2, nullptr, FLOAT}, {LLM_ARCH_LLAMA},
        {LLM_ARCH_MINICPM}, {LLM_ARCH_MINIMAX_M2}, {LLM_ARCH_MISTRAL3}, {LLM_ARCH_NANBEIGE}, {LLM_ARCH_NEMOTRON},
        {LLM_ARCH_OLMO},
        {LLM_ARCH_OLMOE}, {LLM_ARCH_OPENELM}, {LLM_ARCH_ORION}, {LLM_ARCH_PANGU_EMBED}, {LLM_ARCH_PHI2},
        {LLM_ARCH_PHI3},
        {LLM_ARCH_PHIMOE}, {LLM_ARCH_PLAMO}, {LLM_ARCH_POCKETTTS}, {LLM_ARCH_QWEN}, {LLM_ARCH_QWEN2},
        {LLM_ARCH_QWEN2MOE},
        {LLM_ARCH_QWEN3}, {LLM_ARCH_QWEN3MOE}, {LLM_ARCH_SEED_OSS}, {LLM_ARCH_STABLELM}, {LLM_ARCH_STARCODER2},
        {LLM_ARCH_TALKIE},
        {LLM_ARCH_XVERSE},
        // latent attention, or its parts joined to heads
        {LLM_ARCH_BAILINGMOE3, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_DEEPSEEK2, nullptr, !FLOAT, PAIRS},
        {LLM_ARCH_HY_V4, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_KIMI_K3},
        {LLM_ARCH_KIMI_LINEAR, nullptr, !FLOAT, !PAIRS, !CAPPED, !MIXES, EVEN}, {LLM_ARCH_MINICPM3},
        {LLM_ARCH_MISTRAL4, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_PLM, nullptr, !FLOAT, PAIRS},
        // norms with weights after the rotation: methods that keep every position (graph/rope.cpp)
        {LLM_ARCH_HUNYUAN_DENSE}, {LLM_ARCH_HUNYUAN_MOE}, {LLM_ARCH_HUNYUAN_VL}, {LLM_ARCH_MAINCODER},
        // layers without rotation
        {LLM_ARCH_SMOLLM3},
        // sections of RoPE, which are one on text
        {LLM_ARCH_PADDLEOCR}, {LLM_ARCH_QWEN2VL}, {LLM_ARCH_QWEN3TTS}, {LLM_ARCH_QWEN3VL}, {LLM_ARCH_QWEN3VLMOE},
        // sliding windows in addition to full attention
        {LLM_ARCH_AFMOE}, {LLM_ARCH_COHERE2, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_COHERE2MOE, nullptr, !FLOAT, PAIRS},
        {LLM_ARCH_EXAONE4},
        {LLM_ARCH_EXAONE_MOE}, {LLM_ARCH_GEMMA2}, {LLM_ARCH_GEMMA3}, {LLM_ARCH_GEMMA3N}, {LLM_ARCH_GEMMA4},
        {LLM_ARCH_GRANITE_SWA},
        {LLM_ARCH_LAGUNA}, {LLM_ARCH_LLAMA4, nullptr, !FLOAT, PAIRS}, {LLM_ARCH_MAPLE}, {LLM_ARCH_MELLUM},
        {LLM_ARCH_MIMO2},
        {LLM_ARCH_MUSE_GLIMMER}, {LLM_ARCH_OLMO2}, {LLM_ARCH_OPENAI_MOE}, {LLM_ARCH_PLAMO3}, {LLM_ARCH_SMALLTHINKER},
        {LLM_ARCH_SPARK2_5}, {LLM_ARCH_STEP35},
        // recurrent layers in addition to attention
        {LLM_ARCH_FALCON_H1}, {LLM_ARCH_GRANITE_HYBRID}, {LLM_ARCH_JAMBA}, {LLM_ARCH_LFM2}, {LLM_ARCH_LFM2MOE},
        {LLM_ARCH_MINIMAX_01, nullptr, !FLOAT, !PAIRS, !CAPPED, !MIXES, EVEN},
        {LLM_ARCH_NEMOTRON_H}, {LLM_ARCH_NEMOTRON_H_MOE}, {LLM_ARCH_PLAMO2, nullptr, !FLOAT, !PAIRS, !CAPPED, MIXES},
        {LLM_ARCH_QWEN3NEXT}, {LLM_ARCH_QWEN35},
        {LLM_ARCH_QWEN35MOE},
        // not served
        {LLM_ARCH_DEEPSEEK32, INDEXER}, {LLM_ARCH_DEEPSEEK4, INDEXER}, {LLM_ARCH_DOTS3NOTE, INDEXER},
        {LLM_ARCH_GLM5_NEXT, INDEXER},
        {LLM_ARCH_GLM_DSA, INDEXER}, {LLM_ARCH_MINIMAX_M3, INDEXER}, {LLM_ARCH_QWEN4EXP, INDEXER},
        {LLM_ARCH_GRANITE_SWITCH, "one of its layers is a router that must read every token exactly"},
        {LLM_ARCH_STARCODER, "it has learned positions, no rotary ones"},
    };
    return rows;
}
// clang-format on

}  // namespace

const lctx_architecture * lctx_find_architecture(llm_arch arch) {
    const auto it =
        std::find_if(table().begin(), table().end(), [&](const lctx_architecture & row) { return row.arch == arch; });
    return it == table().end() ? nullptr : &*it;
}

void lctx_check_ubatches(const llama_model & model, const llama_cparams & cparams) {
    const lctx_architecture * row = lctx_find_architecture(model.arch);
    const uint32_t n_token = std::min(cparams.n_ctx, cparams.n_ubatch);
    if (row && row->even_ubatches && n_token % cparams.n_seq_max != 0) {
        throw lctx_refusal("architecture '" + model.arch_name() +
                           "' needs an n_ubatch that is a multiple of n_seq_max, not " + std::to_string(n_token) +
                           " for " + std::to_string(cparams.n_seq_max) + " sequences");
    }
}

std::string lctx_why_unsupported(const llama_model & model, const llama_cparams & cparams) {
    if (llm_arch_is_recurrent(model.arch)) {
        return "its memory is recurrent, there is no KV cache to manage";
    }
    if (llama_model_is_diffusion(&model)) {
        return "it is a diffusion model, whose tokens see those after them, methods need causal attention";
    }
    if (llama_model_has_encoder(&model) || !cparams.causal_attn || !llama_model_has_decoder(&model)) {
        return "it is an encoder, methods need causal attention";
    }
    if (model.hparams.use_alibi) {
        return "it uses ALiBi, a bias on distance instead of rotary positions";
    }
    const lctx_architecture * row = lctx_find_architecture(model.arch);
    if (row) {
        return row->why_not ? row->why_not : "";
    }
    if (model.hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
        return "it has no rotary positions";
    }
    return "this architecture has not been compared with llama.cpp under a method; docs/models.md lists those that "
           "have";
}
