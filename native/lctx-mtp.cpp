// The C API: drafts by the MTP block of a model.
#include "base/firewall.h"
#include "base/log.h"
#include "base/refusal.h"
#include "context-sequences.h"
#include "handles.h"

#include <cstring>
#include <set>

namespace {

// Throws unless every token can follow its sequence, and none is there twice.
void check(const lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, const int32_t * pos,
           const int32_t * seqs) {
    if (!ctx->mtp) {
        throw lctx_refusal("the context was created without mtp");
    }
    if (n_tokens < 1 || n_tokens > (int32_t)std::min(llama_n_seq_max(ctx->ctx), llama_n_batch(ctx->ctx))) {
        throw lctx_refusal("a step takes 1 .. " + std::to_string(llama_n_seq_max(ctx->ctx)) + " tokens, not " +
                           std::to_string(n_tokens));
    }
    std::set<int32_t> used;
    for (int32_t i = 0; i < n_tokens; i++) {
        if (tokens[i] < 0 || tokens[i] >= llama_vocab_n_tokens(ctx->model->vocab)) {
            throw lctx_refusal("token id " + std::to_string(tokens[i]) + " is outside the vocabulary");
        }
        if (!lctx_is_sequence(ctx, seqs[i]) || !used.insert(seqs[i]).second) {
            throw lctx_refusal("a step takes one token of each sequence, of 0 .. " +
                               std::to_string(llama_n_seq_max(ctx->ctx) - 1));
        }
        if (pos[i] < lctx_n_past(ctx, seqs[i]) || !ctx->mtp->knows(seqs[i], pos[i] - 1)) {
            throw lctx_refusal("the hidden state before position " + std::to_string(pos[i]) + " of sequence " +
                               std::to_string(seqs[i]) + " is not known");
        }
    }
}

}  // namespace

int32_t lctx_mtp_ready(const lctx_context * ctx, int32_t seq) {
    return ctx->mtp && lctx_is_sequence(ctx, seq) && ctx->mtp->knows(seq, lctx_n_past(ctx, seq) - 1);
}

int32_t lctx_mtp_step(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, const int32_t * pos,
                      const int32_t * seqs, float * logits) {
    return lctx_evaluate(ctx, LCTX_INVALID, [&](int32_t & status) {
        check(ctx, n_tokens, tokens, pos, seqs);
        for (int32_t i = 0; i < n_tokens; i++) {
            ctx->pos[i] = pos[i];
            ctx->seq[i] = seqs[i];
            ctx->output[i] = 1;
        }
        lctx_log_begin();
        const int32_t found = ctx->mtp->step(lctx_batch_of(ctx, n_tokens, tokens));
        status = found == LCTX_OK || found == LCTX_NO_SLOT ? found : LCTX_FAILED;
        if (status != LCTX_OK) {
            throw lctx_refusal(lctx_log_errors("the MTP block could not be evaluated"));
        }
        const size_t n_vocab = llama_vocab_n_tokens(ctx->model->vocab);
        memcpy(logits, llama_get_logits(ctx->mtp->context()), n_tokens * n_vocab * sizeof(float));
    });
}
