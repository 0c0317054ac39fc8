// The C API: evaluation.
#include "base/firewall.h"
#include "base/log.h"
#include "context-sequences.h"
#include "handles.h"
#include "llama-ext.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

int32_t fail(lctx_context * ctx, int32_t status, const std::string & reason) {
    ctx->error = reason;
    return status;
}

// Return what is wrong with a batch; empty when it can be decoded. next: the next position of every sequence.
std::string check_batch(const lctx_context * ctx, const llama_batch & batch, std::vector<int32_t> next) {
    const int32_t n_vocab = llama_vocab_n_tokens(ctx->model->vocab), n_position = lctx_positions(*ctx->model);
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (batch.token[i] < 0 || batch.token[i] >= n_vocab) {
            return "token id " + std::to_string(batch.token[i]) + " is outside the vocabulary of " +
                   std::to_string(n_vocab);
        }
        if (!lctx_is_sequence(ctx, seq)) {
            return lctx_no_sequence(ctx, seq);
        }
        if (batch.pos[i] >= n_position) {
            return "the model learned " + std::to_string(n_position) + " positions, and position " +
                   std::to_string(batch.pos[i]) + " is beyond them";
        }
        if (batch.pos[i] != next[seq]++) {
            return "the next position of sequence " + std::to_string(seq) + " is " + std::to_string(next[seq] - 1) +
                   ", not " + std::to_string(batch.pos[i]);
        }
    }
    return "";
}

// Put the sequences back to what they were; methods keep what a withdrawn batch needs. One that evicts ends where the
// ubatch that failed began, when others of the same batch were before it. One with a recurrent state ends at its last
// checkpoint.
void withdraw(lctx_context * ctx, const std::vector<int32_t> & before) {
    for (int32_t seq = 0; seq < (int32_t)before.size(); seq++) {
        if (ctx->memory) {
            ctx->memory->withdraw(seq, before[seq]);
        } else {
            ctx->foreign.withdraw(seq, before[seq]);
        }
        lctx_cut_mtp(ctx, seq, lctx_n_held(ctx, seq));
    }
}

int32_t run_batch(lctx_context * ctx, const llama_batch & batch, float * logits) {
    std::vector<int32_t> before;
    for (uint32_t seq = 0; seq < llama_n_seq_max(ctx->ctx); seq++) {
        before.push_back(lctx_n_held(ctx, seq));
    }
    const std::string wrong = check_batch(ctx, batch, before);
    if (!wrong.empty()) {
        return fail(ctx, LCTX_INVALID, wrong);
    }
    lctx_log_begin();
    int32_t status = llama_decode(ctx->ctx, batch);
    std::string reason;
    if (status != LCTX_OK) {
        reason = status == LCTX_ABORTED ? "aborted" : lctx_failure(ctx, "llama_decode failed");
    } else if (ctx->memory && !(reason = ctx->memory->cache().take_io_error()).empty()) {
        status = LCTX_FAILED;
    } else if (ctx->mtp &&
               !lctx_guard(&reason, [&] { ctx->mtp->follow(batch, llama_get_embeddings_nextn(ctx->ctx)); })) {
        status = LCTX_FAILED;
    }
    if (status != LCTX_OK) {
        withdraw(ctx, before);
        return fail(ctx, status == LCTX_NO_SLOT || status == LCTX_ABORTED ? status : LCTX_FAILED, reason);
    }
    if (logits) {
        const int64_t n_row =
            std::count_if(batch.logits, batch.logits + batch.n_tokens, [](int8_t wanted) { return wanted != 0; });
        const int64_t n_vocab = llama_vocab_n_tokens(ctx->model->vocab);
        memcpy(logits, llama_get_logits(ctx->ctx), n_row * n_vocab * sizeof(float));
        for (int64_t i = 0; i < n_row; i++) {
            ctx->has_nan = ctx->has_nan || std::isnan(logits[i * n_vocab]);  // that of a hidden state is in every logit
        }
    }
    return LCTX_OK;
}

// Decode a batch in the context's own arrays: fill(i) sets pos, seq and output of token i.
template <typename F>
int32_t decode(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, float * logits, F && fill) {
    return lctx_evaluate(ctx, LCTX_FAILED, [&](int32_t & status) {
        const int32_t n_batch = (int32_t)llama_n_batch(ctx->ctx);
        if (n_tokens < 1 || n_tokens > n_batch) {
            status = fail(ctx, LCTX_INVALID,
                          "a batch holds 1 .. " + std::to_string(n_batch) + " tokens, not " + std::to_string(n_tokens));
            return;
        }
        for (int32_t i = 0; i < n_tokens; i++) {
            fill(i);
        }
        status = run_batch(ctx, lctx_batch_of(ctx, n_tokens, tokens), logits);
    });
}

}  // namespace

int32_t lctx_decode(lctx_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t pos, float * logits,
                    int32_t all) {
    return decode(ctx, n_tokens, tokens, logits, [&](int32_t i) {
        ctx->pos[i] = pos + i;
        ctx->seq[i] = 0;
        ctx->output[i] = logits && (all || i == n_tokens - 1);
    });
}

int32_t lctx_decode_batch(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, const int32_t * pos,
                          const int32_t * seqs, const int8_t * outputs, float * logits) {
    return decode(ctx, n_tokens, tokens, logits, [&](int32_t i) {
        ctx->pos[i] = pos[i];
        ctx->seq[i] = seqs[i];
        ctx->output[i] = logits && outputs[i] != 0;
    });
}

int32_t lctx_n_past(const lctx_context * ctx, int32_t seq) {
    return lctx_is_sequence(ctx, seq) ? lctx_n_held(ctx, seq) : 0;
}
