// The C API: embeddings, by llama.cpp's own memory.
#include "base/firewall.h"
#include "base/log.h"
#include "handles.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>

namespace {

// llama.cpp reads as many numbers of a token as the model says, and its graph gives another number where nothing
// projects them.
std::string why_no_embedding(const llama_model & model) {
    const uint32_t n = model.hparams.n_embd_out();
    return n == model.hparams.n_embd || model.dense_2_out_layers
               ? ""
               : "llama.cpp does not embed texts with " + model.arch_name() + ": vectors of " + std::to_string(n) +
                     " numbers are expected, and its layers make " + std::to_string(model.hparams.n_embd);
}

// Return what is wrong with the texts; empty when they can be embedded.
std::string check(const lctx_context * ctx, const std::vector<int32_t> & lengths, const int32_t * tokens) {
    const int32_t n_vocab = llama_vocab_n_tokens(ctx->model->vocab);
    const uint32_t most = std::min(ctx->n_batch, llama_n_ubatch(ctx->ctx));
    const int32_t n_position = lctx_positions(*ctx->model);
    const std::string why = why_no_embedding(*ctx->model->model);
    if (!why.empty()) {
        return why;
    }
    uint32_t n = 0;
    for (const int32_t length : lengths) {
        if (length < 1 || (uint32_t)length > most - n) {
            return "the texts of one call must hold 1 .. " + std::to_string(most) +
                   " tokens together, none of them empty";
        }
        if (length > n_position) {
            return "a text has " + std::to_string(length) + " tokens, and the model learned " +
                   std::to_string(n_position) + " positions";
        }
        n += length;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            return "token id " + std::to_string(tokens[i]) + " is outside the vocabulary of " + std::to_string(n_vocab);
        }
    }
    return lengths.empty() || lengths.size() > llama_n_seq_max(ctx->ctx)
               ? "one call embeds 1 .. " + std::to_string(llama_n_seq_max(ctx->ctx)) + " texts"
               : "";
}

// One text per sequence, every token an output; returns the number of tokens.
int32_t fill(lctx_context * ctx, const std::vector<int32_t> & lengths) {
    int32_t n = 0;
    for (int32_t seq = 0; seq < (int32_t)lengths.size(); seq++) {
        for (int32_t pos = 0; pos < lengths[seq]; pos++, n++) {
            ctx->pos[n] = pos;
            ctx->seq[n] = seq;
            ctx->output[n] = 1;
        }
    }
    return n;
}

void read(lctx_context * ctx, int32_t n_text, int32_t n_tokens, float * out) {
    const size_t size = lctx_embedding_size(ctx);
    if (llama_pooling_type(ctx->ctx) == LLAMA_POOLING_TYPE_NONE) {
        memcpy(out, llama_get_embeddings(ctx->ctx), n_tokens * size * sizeof(float));
        return;
    }
    for (int32_t seq = 0; seq < n_text; seq++) {
        const float * row = llama_get_embeddings_seq(ctx->ctx, seq);
        if (!row) {
            throw lctx_refusal("the model gave no embedding");
        }
        memcpy(out + seq * size, row, size * sizeof(float));
    }
}

void embed(lctx_context * ctx, const std::vector<int32_t> & lengths, const int32_t * tokens, float * out) {
    const int32_t n = fill(ctx, lengths);
    const llama_batch batch = {n,
                               const_cast<llama_token *>(tokens),
                               nullptr,
                               ctx->pos.data(),
                               ctx->n_seq_id.data(),
                               ctx->seq_id.data(),
                               ctx->output.data()};
    lctx_clear(ctx);
    lctx_log_begin();
    const bool encodes = llama_model_has_encoder(ctx->model->model);
    const int32_t status = encodes ? llama_encode(ctx->ctx, batch) : llama_decode(ctx->ctx, batch);
    if (status != 0) {
        throw lctx_refusal(status == LCTX_ABORTED ? "aborted" : lctx_log_errors("llama_decode failed"));
    }
    read(ctx, (int32_t)lengths.size(), n, out);
}

}  // namespace

int32_t lctx_context_pooling(const lctx_context * ctx) {
    return llama_pooling_type(ctx->ctx);
}

int32_t lctx_embedding_size(const lctx_context * ctx) {
    const llama_model * model = ctx->model->model;
    return llama_pooling_type(ctx->ctx) == LLAMA_POOLING_TYPE_RANK ? (int32_t)llama_model_n_cls_out(model)
                                                                   : llama_model_n_embd_out(model);
}

int32_t lctx_embed(lctx_context * ctx, int32_t n_text, const int32_t * lengths, const int32_t * tokens, float * out) {
    int32_t status = LCTX_FAILED;
    ctx->error.clear();
    lctx_guard(&ctx->error, [&] {
        const std::vector<int32_t> sizes(lengths, lengths + std::max(n_text, 0));
        const std::string wrong =
            ctx->memory ? "embeddings need a context without a method" : check(ctx, sizes, tokens);
        if (!wrong.empty()) {
            status = LCTX_INVALID;
            throw lctx_refusal(wrong);
        }
        llama_set_embeddings(ctx->ctx, true);
        std::string reason;
        const bool done = lctx_guard(&reason, [&] { embed(ctx, sizes, tokens, out); });
        llama_set_embeddings(ctx->ctx, false);  // or lctx_decode would compute the logits of every token
        lctx_clear(ctx);
        if (!done) {
            throw lctx_refusal(reason);
        }
        status = LCTX_OK;
    });
    return status;
}
