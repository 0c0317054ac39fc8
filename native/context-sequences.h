// Sequences of a context, as several files of the C API ask for them.
#pragma once

#include "base/log.h"
#include "handles.h"

#include <algorithm>
#include <string>

// Return how many tokens a sequence has, which must exist.
inline int32_t lctx_n_held(const lctx_context * ctx, int32_t seq) {
    return llama_memory_seq_pos_max(llama_get_memory(ctx->ctx), seq) + 1;
}

// Return whether a context has a sequence of this number.
inline bool lctx_is_sequence(const lctx_context * ctx, int32_t seq) {
    return seq >= 0 && seq < (int32_t)llama_n_seq_max(ctx->ctx);
}

// Say which sequences there are, for one that does not exist.
inline std::string lctx_no_sequence(const lctx_context * ctx, int32_t seq) {
    return "sequences are 0 .. " + std::to_string(llama_n_seq_max(ctx->ctx) - 1) + ", not " + std::to_string(seq);
}

// A batch of the context's own arrays, of which pos, seq and output are filled.
inline llama_batch lctx_batch_of(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens) {
    return {n_tokens,
            const_cast<llama_token *>(tokens),
            nullptr,
            ctx->pos.data(),
            ctx->n_seq_id.data(),
            ctx->seq_id.data(),
            ctx->output.data()};
}

// Run f, which evaluates and sets the status: LCTX_LOST when an RPC server ended before or during it. What f throws is
// the error.
template <typename F> int32_t lctx_evaluate(lctx_context * ctx, int32_t status, F && f) {
    ctx->error = lctx_rpc_lost(ctx->model->servers);
    if (!ctx->error.empty()) {
        return LCTX_LOST;
    }
    lctx_guard(&ctx->error, [&] { f(status); });
    const std::string lost = lctx_rpc_lost(ctx->model->servers);
    if (!lost.empty()) {
        ctx->error = lost;
        return LCTX_LOST;
    }
    return status;
}

// Return why the last call failed: the memory's own words, else what llama.cpp logged.
inline std::string lctx_failure(lctx_context * ctx, const char * fallback) {
    const std::string own = ctx->memory ? ctx->memory->cache().take_error() : "";
    return own.empty() ? lctx_log_errors(fallback) : own;
}

// Cut what the MTP block has of a sequence before position n too.
inline void lctx_cut_mtp(lctx_context * ctx, int32_t seq, int32_t n) {
    if (ctx->mtp && lctx_is_sequence(ctx, seq)) {
        ctx->mtp->cut(seq, std::max(n, 0));
    }
}
