#include "mtp.h"

#include "../base/refusal.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <string>

namespace {

// tests/engine/test_mtp.py compares their drafts with llama.cpp
const llm_arch SERVED[] = {LLM_ARCH_COHERE2MOE, LLM_ARCH_DEEPSEEK2, LLM_ARCH_DEEPSEEK32, LLM_ARCH_GLM4_MOE,
                           LLM_ARCH_GLM_DSA,    LLM_ARCH_HY_V3,     LLM_ARCH_QWEN35,     LLM_ARCH_QWEN35MOE,
                           LLM_ARCH_QWEN3NEXT,  LLM_ARCH_STEP35};

std::string served() {
    std::string names;
    for (const llm_arch arch : SERVED) {
        names += (names.empty() ? "" : ", ") + std::string(llm_arch_name(arch));
    }
    return names;
}

bool has_block(const llama_model & model) {
    const auto & nextn = model.layers[model.hparams.n_layer()].nextn;
    return nextn.eh_proj && nextn.enorm && nextn.hnorm;
}

std::string why_not(const llama_model & model) {
    const uint32_t n = model.hparams.router_layer < 0 ? model.hparams.n_layer_nextn : 0;
    if (n == 0) {
        return "it has no block that drafts (MTP)";
    }
    if (std::find(std::begin(SERVED), std::end(SERVED), model.arch) == std::end(SERVED)) {
        return "drafts of its MTP block were not compared with llama.cpp; those of " + served() + " were";
    }
    if (n > 1) {
        return "its " + std::to_string(n) + " MTP blocks draft in turn, and only models with one are served";
    }
    return has_block(model) ? "" : "its MTP block is not in the file, or was not loaded";
}

}  // namespace

void lctx_check_mtp(const llama_model & model) {
    const std::string why = why_not(model);
    if (!why.empty()) {
        throw lctx_refusal("architecture '" + model.arch_name() + "' cannot draft by itself: " + why +
                           "; use drafts from the text (ngram-simple) or of a smaller model");
    }
}

lctx_mtp::lctx_mtp(llama_context * ctx)
    : ctx(ctx), n_embd(llama_model_n_embd_out(llama_get_model(ctx))), seqs(llama_n_seq_max(ctx)) {
    llama_set_embeddings_nextn(ctx, true, true);
}

lctx_mtp::~lctx_mtp() {
    llama_free(ctx);
}

void lctx_mtp::follow(const llama_batch & batch, const float * hidden) {
    if (!hidden) {
        throw lctx_refusal("the graph of the model has no hidden states for its MTP block");
    }
    std::vector<int32_t> last(seqs.size(), -1);
    before.assign(batch.n_tokens * n_embd, 0.0f);
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (const float * known = last[seq] < 0 ? begin(seq, batch.pos[i]) : hidden + last[seq] * n_embd) {
            std::copy_n(known, n_embd, &before[i * n_embd]);
        }
        last[seq] = i;
    }
    std::vector<int8_t> none(batch.n_tokens, 0);
    llama_batch silent = batch;
    silent.logits = none.data();
    if (const int32_t status = decode(silent)) {
        throw lctx_refusal("the MTP block could not be evaluated (status " + std::to_string(status) + ")");
    }
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        append(batch.seq_id[i][0], hidden + i * n_embd);
    }
}

bool lctx_mtp::knows(int32_t seq, int32_t pos) const {
    return pos >= seqs[seq].first && pos < end(seq);
}

int32_t lctx_mtp::step(const llama_batch & batch) {
    before.resize(batch.n_tokens * n_embd);
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        cut(seq, batch.pos[i]);
        std::copy_n(row(seq, batch.pos[i] - 1), n_embd, &before[i * n_embd]);
    }
    const int32_t status = decode(batch);
    for (int32_t i = 0; status == 0 && i < batch.n_tokens; i++) {
        append(batch.seq_id[i][0], llama_get_embeddings_nextn_ith(ctx, i));
    }
    return status;
}

void lctx_mtp::cut(int32_t seq, int32_t n) {
    states & s = seqs[seq];
    s.rows.resize(std::min(s.rows.size(), std::max(n - s.first, 0) * n_embd));
    if (llama_memory_seq_pos_max(llama_get_memory(ctx), seq) >= n) {
        llama_memory_seq_rm(llama_get_memory(ctx), seq, n, -1);
    }
}

void lctx_mtp::copy(int32_t src, int32_t dst, int32_t n) {
    if (src == dst) {
        return;
    }
    llama_memory_seq_rm(llama_get_memory(ctx), dst, -1, -1);
    if (llama_memory_seq_pos_max(llama_get_memory(ctx), src) >= 0) {
        llama_memory_seq_cp(llama_get_memory(ctx), src, dst, -1, -1);
        ctx->memory_update(false);  // what llama.cpp copies, it copies now: dst may be cut next
    }
    seqs[dst] = seqs[src];
    if (n >= 0) {
        cut(dst, n);
    }
}

void lctx_mtp::clear(bool has_nan) {
    llama_memory_clear(llama_get_memory(ctx), has_nan);
    seqs.assign(seqs.size(), {});
}

// The position after the last known state.
int32_t lctx_mtp::end(int32_t seq) const {
    return seqs[seq].first + (int32_t)(seqs[seq].rows.size() / n_embd);
}

const float * lctx_mtp::row(int32_t seq, int32_t pos) const {
    return &seqs[seq].rows[(pos - seqs[seq].first) * n_embd];
}

// Prepare a sequence for a batch from pos on; returns the state before it, or nullptr. Positions must follow each other
// in llama.cpp's cache: where tokens are missing, those before them go too.
const float * lctx_mtp::begin(int32_t seq, int32_t pos) {
    cut(seq, pos);
    if (llama_memory_seq_pos_max(llama_get_memory(ctx), seq) < pos - 1) {
        cut(seq, 0);
    }
    states & s = seqs[seq];
    const bool known = pos > 0 && knows(seq, pos - 1);
    s.rows.erase(s.rows.begin(), s.rows.end() - (known ? n_embd : 0));
    s.first = known ? pos - 1 : pos;
    return known ? s.rows.data() : nullptr;
}

void lctx_mtp::append(int32_t seq, const float * hidden) {
    seqs[seq].rows.insert(seqs[seq].rows.end(), hidden, hidden + n_embd);
}

// Evaluate tokens with the states before them; after a failure their sequences end before them.
int32_t lctx_mtp::decode(const llama_batch & batch) {
    llama_batch both = batch;
    both.embd = before.data();
    const int32_t status = llama_decode(ctx, both);
    for (int32_t i = batch.n_tokens - 1; status != 0 && i >= 0; i--) {
        cut(batch.seq_id[i][0], batch.pos[i]);
    }
    return status;
}
