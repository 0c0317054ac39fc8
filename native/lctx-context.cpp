// The C API: contexts.
#include "base/firewall.h"
#include "base/log.h"
#include "base/pending.h"
#include "deterministic.h"
#include "handles.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>

namespace {

constexpr uint32_t MAX_N_CTX = 1u << 30;
constexpr int32_t MAX_THREADS = 512;
constexpr uint32_t MAX_SEQ = 256;         // LLAMA_MAX_SEQ
constexpr uint32_t MAX_BATCH = 1u << 22;  // llama.cpp and we take 40 bytes for each of them at once

void check_params(const lctx_context_params & p) {
    if (p.n_ctx > MAX_N_CTX) {
        throw lctx_refusal("n_ctx " + std::to_string(p.n_ctx) + " is beyond " + std::to_string(MAX_N_CTX));
    }
    if (p.n_seq_max < 1 || p.n_seq_max > MAX_SEQ || (uint64_t)p.n_ctx * p.n_seq_max > MAX_N_CTX) {
        throw lctx_refusal("n_seq_max must be 1 .. " + std::to_string(MAX_SEQ) + ", and n_ctx * n_seq_max at most " +
                           std::to_string(MAX_N_CTX));
    }
    if (p.n_batch < 1 || p.n_ubatch < 1) {
        throw lctx_refusal("n_batch and n_ubatch must be at least 1");
    }
    if (p.n_threads < 1 || p.n_threads_batch < 1 || p.n_threads > MAX_THREADS || p.n_threads_batch > MAX_THREADS) {
        throw lctx_refusal("n_threads and n_threads_batch must be 1 .. " + std::to_string(MAX_THREADS));
    }
    if (!lctx_is_kv_type(p.type_k) || !lctx_is_kv_type(p.type_v)) {
        throw lctx_refusal("type_k and type_v must be one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl");
    }
}

void check_embedding(const lctx_context_params & p) {
    if (p.pooling_type < LLAMA_POOLING_TYPE_UNSPECIFIED || p.pooling_type > LLAMA_POOLING_TYPE_RANK) {
        throw lctx_refusal("pooling_type must be -1 (that of the model), 0 none, 1 mean, 2 cls, 3 last or 4 rank");
    }
    if (p.attention_type < LLAMA_ATTENTION_TYPE_UNSPECIFIED || p.attention_type > LLAMA_ATTENTION_TYPE_NON_CAUSAL) {
        throw lctx_refusal("attention_type must be -1 (that of the model), 0 causal or 1 not causal");
    }
}

// Throws unless a number is finite and least .. most, or, as a sign that it is the model's, as `own` says.
void check_number(const char * name, float value, float least, float most, bool is_own, const char * own) {
    if (!is_own && !(value >= least && value <= most)) {
        char text[160];
        snprintf(text, sizeof(text), "%s must be from %g to %g, or %s for that of the model, not %g", name, least, most,
                 own, value);
        throw lctx_refusal(text);
    }
}

// Numbers that make no angles: NaN, infinity, and those that would put all tokens at one position or reach beyond any
// context.
void check_rope(const lctx_context_params & p, const llama_hparams & hparams) {
    if (p.rope_scaling_type < LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED ||
        p.rope_scaling_type > LLAMA_ROPE_SCALING_TYPE_MAX_VALUE) {
        throw lctx_refusal(
            "rope_scaling_type must be -1 (that of the model), 0 none, 1 linear, 2 yarn or 3 longrope, not " +
            std::to_string(p.rope_scaling_type));
    }
    const auto below_0 = [](float x) { return x < 0.0f && std::isfinite(x); };
    check_number("rope_freq_base", p.rope_freq_base, 1.01f, 1e18f, p.rope_freq_base == 0.0f, "0");
    check_number("rope_freq_scale", p.rope_freq_scale, 1e-9f, 1e9f, p.rope_freq_scale == 0.0f, "0");
    check_number("yarn_ext_factor", p.yarn_ext_factor, 0.0f, 1.0f, below_0(p.yarn_ext_factor), "below 0");
    check_number("yarn_attn_factor", p.yarn_attn_factor, 1e-3f, 1e3f, below_0(p.yarn_attn_factor), "below 0");
    check_number("yarn_beta_fast", p.yarn_beta_fast, 0.0f, 1e6f, below_0(p.yarn_beta_fast), "below 0");
    check_number("yarn_beta_slow", p.yarn_beta_slow, 0.0f, 1e6f, below_0(p.yarn_beta_slow), "below 0");
    if (p.yarn_orig_ctx > MAX_N_CTX) {
        throw lctx_refusal("yarn_orig_ctx must be at most " + std::to_string(MAX_N_CTX) + ", not " +
                           std::to_string(p.yarn_orig_ctx));
    }
    const uint32_t orig = p.yarn_orig_ctx           ? p.yarn_orig_ctx
                          : hparams.n_ctx_orig_yarn ? hparams.n_ctx_orig_yarn
                                                    : hparams.n_ctx_train;
    const double stretched = p.rope_freq_scale == 0.0f ? 1.0 : orig / (double)p.rope_freq_scale;
    if (!(stretched >= 1.0 && stretched <= MAX_N_CTX)) {
        char text[160];
        snprintf(text, sizeof(text),
                 "rope_freq_scale %g makes %g of %u trained tokens; it must be one that makes 1 .. %u",
                 p.rope_freq_scale, stretched, orig, MAX_N_CTX);
        throw lctx_refusal(text);
    }
}

// llama.cpp reserves its graph for as many tokens of each sequence, and asserts that all of them are outputs where
// vectors are pooled: so a ubatch is a multiple of the sequences.
void for_pooling(llama_context_params & c) {
    const auto up = [](uint32_t n, uint32_t step) { return (n + step - 1) / step * step; };
    c.n_ubatch = up(std::min(c.n_ubatch, c.n_batch), c.n_seq_max);
    c.n_batch = std::max(c.n_batch, c.n_ubatch);
    if (c.n_ctx < c.n_ubatch) {
        c.n_ctx = std::min(up(c.n_ctx, std::lcm(lctx_padded_n_ctx(1), c.n_seq_max)), lctx_padded_n_ctx(c.n_ubatch));
    }
}

// llama.cpp reads n_cls_out scores of a text, whether a classifier made them or not.
void check_scores(const llama_model & model) {
    const ggml_tensor * last = model.cls_out ? model.cls_out : model.cls;
    if (!last || last->ne[1] != model.hparams.n_cls_out) {
        throw lctx_refusal(
            "pooling_type 4 (rank) needs a classifier: the model has no head that judges documents (tensors cls.*)");
    }
}

llama_context_params to_llama(const lctx_context_params & p) {
    llama_context_params c = llama_context_default_params();
    c.n_ctx = p.n_ctx;
    c.n_batch = std::min(p.n_batch, MAX_BATCH);
    c.n_ubatch = p.n_ubatch;
    c.n_seq_max = p.n_seq_max;
    c.n_threads = p.n_threads;
    c.n_threads_batch = p.n_threads_batch;
    c.type_k = (ggml_type)p.type_k;
    c.type_v = (ggml_type)p.type_v;
    c.rope_scaling_type = (llama_rope_scaling_type)p.rope_scaling_type;
    c.pooling_type = (enum llama_pooling_type)p.pooling_type;
    c.attention_type = (llama_attention_type)p.attention_type;
    c.rope_freq_base = p.rope_freq_base;
    c.rope_freq_scale = p.rope_freq_scale;
    c.yarn_ext_factor = p.yarn_ext_factor;
    c.yarn_attn_factor = p.yarn_attn_factor;
    c.yarn_beta_fast = p.yarn_beta_fast;
    c.yarn_beta_slow = p.yarn_beta_slow;
    c.yarn_orig_ctx = p.yarn_orig_ctx;
    c.embeddings = p.embeddings != 0;
    c.offload_kqv = p.offload_kqv != 0;
    c.op_offload = p.op_offload != 0;
    c.no_perf = p.no_perf != 0;
    // of the layers that stay llama.cpp's; its flash attention rounds rows to f16
    const bool is_exact = c.type_k == GGML_TYPE_F32 && c.type_v == GGML_TYPE_F32;
    c.flash_attn_type = is_exact ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
    return c;
}

bool on_abort(void * data) {
    const auto * ctx = (const lctx_context *)data;
    return ctx->abort_flag && *ctx->abort_flag != 0;
}

// llama_init_from_model with our settings pending for this thread.
llama_context * init(llama_model * model, const llama_context_params & params, const std::string & method,
                     uint32_t n_ctx, const lctx_context_params & ours) {
    lctx_pending & pending = lctx_pending_settings();
    const lctx_offload offload = {ours.kv_offload, ours.kv_offload_folder ? ours.kv_offload_folder : ""};
    pending = {true, method, n_ctx, ours.kv_limit, ours.deterministic != 0, offload};
    const uint32_t n_ctx_train =
        model->hparams.n_ctx_train;  // YaRN settings of a context change it for those that follow
    llama_context * ctx = llama_init_from_model(model, params);
    model->hparams.n_ctx_train = n_ctx_train;
    pending = {};
    return ctx;
}

// The context of a model's MTP block, in addition to one with these parameters: it has llama.cpp's own cache in f16,
// whatever they say.
llama_context * init_mtp(llama_model * model, llama_context_params params, uint32_t n_ctx) {
    params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    params.type_k = params.type_v = GGML_TYPE_F16;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.swa_full = true;
    params.abort_callback = nullptr;  // the tokens are those of an evaluation that was not aborted
    return init(model, params, "", n_ctx, {});
}

}  // namespace

uint32_t lctx_context_default_n_ctx(const lctx_model & model, const lctx_context_params & params,
                                    const std::string & method) {
    if (params.n_ctx > 0 || model.vocab_only) {
        return params.n_ctx;
    }
    const int32_t n_ctx_train = llama_model_n_ctx_train(model.model);
    return method.empty() ? n_ctx_train : lctx_method_default_n_ctx(lctx_method_parse(method), n_ctx_train);
}

int32_t lctx_positions(const lctx_model & model) {
    const ggml_tensor * learned = model.model->pos_embd;
    return learned ? (int32_t)learned->ne[1] : INT32_MAX;
}

void lctx_context_open(lctx_context * ctx, const lctx_context_params & params, const std::string & method) {
    const lctx_model * model = ctx->model;
    check_params(params);
    check_embedding(params);
    if (params.embeddings && !method.empty()) {
        throw lctx_refusal("embeddings need llama.cpp's own memory: no method");
    }
    if (params.kv_limit > 0 && method.empty()) {
        throw lctx_refusal("kv_limit needs a method; method=full behaves as llama.cpp's own cache");
    }
    if (params.embeddings && params.mtp) {
        throw lctx_refusal("embeddings are not drafted: leave mtp out");
    }
    if (params.kv_offload > 0 && method.empty()) {
        throw lctx_refusal("kv_offload needs method=longheads");
    }
    if (params.kv_offload == 0 && params.kv_offload_folder) {
        throw lctx_refusal("kv_offload_folder needs kv_offload, the bytes that lie close");
    }
    if (model->vocab_only) {
        throw lctx_refusal("the model was loaded with vocab_only and has no weights to run");
    }
    if (params.mtp) {
        lctx_check_mtp(*model->model);
    }
    check_rope(params, model->model->hparams);
    llama_context_params c = to_llama(params);
    if (params.deterministic) {
        lctx_check_deterministic(*model, params, method);
        c.op_offload = false;
        c.flash_attn_type = lctx_has_windows(*model) ? LLAMA_FLASH_ATTN_TYPE_DISABLED : c.flash_attn_type;
    }
    const uint32_t n_ctx = lctx_context_default_n_ctx(*model, params, method);
    c.kv_unified = c.embeddings;  // the texts of a call share one context
    c.swa_full = params.swa_full < 0 ? method.empty() || params.deterministic : params.swa_full != 0;
    c.n_ctx = lctx_padded_n_ctx(n_ctx) *
              (c.kv_unified ? 1 : c.n_seq_max);  // llama.cpp pads, and shares n_ctx among the sequences
    if (c.embeddings) {
        for_pooling(c);
    }
    c.abort_callback = on_abort;
    c.abort_callback_data = ctx;
    lctx_log_begin();
    ctx->ctx = init(model->model, c, method, n_ctx, params);
    lctx_rpc_forget_graphs(model->servers);
    if (!ctx->ctx) {
        throw lctx_refusal(lctx_log_errors("the context could not be created"));
    }
    if (c.embeddings && llama_pooling_type(ctx->ctx) == LLAMA_POOLING_TYPE_RANK) {
        check_scores(*model->model);
    }
    llama_set_embeddings(ctx->ctx, false);  // lctx_embed asks for them
    if (params.mtp) {
        llama_context * mtp = init_mtp(model->model, c, n_ctx);
        if (!mtp) {
            throw lctx_refusal(lctx_log_errors("the context of the MTP block could not be created"));
        }
        ctx->mtp = std::make_unique<lctx_mtp>(mtp);
        llama_set_embeddings_nextn(ctx->ctx, true, false);
    }
    ctx->n_ctx = std::min(n_ctx, (uint32_t)lctx_positions(*model));
    ctx->n_batch = std::min(params.n_batch, llama_n_batch(ctx->ctx));
    ctx->memory = dynamic_cast<lctx_context_memory *>(llama_get_memory(ctx->ctx));
    ctx->foreign.open(ctx->ctx, ctx->memory == nullptr);
    if (ctx->memory) {
        ctx->method = ctx->memory->cache().method().full_spec();
        ctx->why = ctx->memory->cache().placement().full_why();
    }
    const uint32_t n_batch = llama_n_batch(ctx->ctx);
    ctx->pos.resize(n_batch);
    ctx->n_seq_id.assign(n_batch, 1);
    ctx->seq.resize(n_batch);
    ctx->seq_id.resize(n_batch);
    for (uint32_t i = 0; i < n_batch; i++) {
        ctx->seq_id[i] = &ctx->seq[i];
    }
    ctx->output.resize(n_batch);
}

void lctx_context_params_default(lctx_context_params * params) {
    const llama_context_params d = llama_context_default_params();
    *params = {};
    params->n_seq_max = 1;
    params->n_batch = d.n_batch;
    params->n_ubatch = d.n_ubatch;
    params->n_threads = d.n_threads;
    params->n_threads_batch = d.n_threads_batch;
    params->type_k = d.type_k;
    params->type_v = d.type_v;
    params->rope_scaling_type = d.rope_scaling_type;
    params->pooling_type = d.pooling_type;
    params->attention_type = d.attention_type;
    params->yarn_ext_factor = d.yarn_ext_factor;
    params->yarn_attn_factor = d.yarn_attn_factor;
    params->yarn_beta_fast = d.yarn_beta_fast;
    params->yarn_beta_slow = d.yarn_beta_slow;
    params->offload_kqv = d.offload_kqv;
    params->op_offload = d.op_offload;
    params->no_perf = d.no_perf;
    params->swa_full = -1;
}

lctx_context * lctx_context_create(lctx_model * model, const lctx_context_params * params, const char * method) {
    lctx_context * ctx = new (std::nothrow) lctx_context;
    if (!ctx) {
        return nullptr;
    }
    ctx->model = model;
    lctx_guard(&ctx->error, [&] {
        if (model->dry) {
            throw lctx_refusal("the model was loaded dry: it has no weights to run");
        }
        lctx_context_open(ctx, *params, method ? method : "");
    });
    return ctx;
}

const char * lctx_context_error(const lctx_context * ctx) {
    return !ctx ? "out of memory" : ctx->error.empty() ? nullptr : ctx->error.c_str();
}

void lctx_context_free(lctx_context * ctx) {
    if (ctx) {
        ctx->mtp.reset();
        llama_free(ctx->ctx);
        lctx_guard(nullptr, [&] { lctx_rpc_forget_graphs(ctx->model->servers); });
        delete ctx;
    }
}

const char * lctx_context_method(const lctx_context * ctx) {
    return ctx->method.c_str();
}

const char * lctx_context_why(const lctx_context * ctx) {
    return ctx->why.c_str();
}

uint32_t lctx_context_n_ctx(const lctx_context * ctx) {
    return ctx->n_ctx;
}

uint32_t lctx_context_n_batch(const lctx_context * ctx) {
    return ctx->n_batch;
}

uint32_t lctx_context_n_ubatch(const lctx_context * ctx) {
    return llama_n_ubatch(ctx->ctx);
}

void * lctx_context_llama(const lctx_context * ctx) {
    return ctx->ctx;
}

void lctx_context_set_abort(lctx_context * ctx, const volatile int32_t * flag) {
    ctx->abort_flag = flag;
}

int32_t lctx_context_step(const lctx_context * ctx, int32_t pos, int32_t n) {
    const auto most = (int32_t)std::min(llama_n_batch(ctx->ctx), llama_n_ubatch(ctx->ctx));
    pos = std::clamp(pos, 0, (int32_t)ctx->n_ctx);
    return std::max(1, ctx->memory ? ctx->memory->cache().sequences().step(pos, n) : std::min(n, most));
}

int32_t lctx_seq_held(const lctx_context * ctx, int32_t seq, int32_t layer, int32_t head, int32_t * rows,
                      int32_t * scores, int32_t n_max) {
    int32_t n = 0;
    ctx->error.clear();
    lctx_guard(&ctx->error,
               [&] { n = ctx->memory ? ctx->memory->cache().held_rows(seq, layer, head, rows, scores, n_max) : 0; });
    return n;
}

int32_t lctx_context_work(const lctx_context * ctx, lctx_work * work) {
    return lctx_ask(ctx, [&] {
        *work = ctx->memory->cache().placement().work();
        work->n_built = work->n_graph - llama_perf_context(ctx->ctx).n_reused;
    });
}

int32_t lctx_kv_usage(const lctx_context * ctx, lctx_kv_info * info, int32_t * rows) {
    return lctx_ask(ctx, [&] {
        ctx->memory->cache().blocks().usage(*info, rows);
        info->foreign_bytes = ctx->memory->foreign_bytes() + ctx->memory->checkpoint_bytes();
    });
}
