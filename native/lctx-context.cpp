// The C API: contexts.
#include "firewall.h"
#include "handles.h"
#include "llama-context.h"
#include "log.h"
#include "pending.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace {

constexpr uint32_t MAX_N_CTX = 1u << 30;
constexpr int32_t MAX_THREADS = 512;
constexpr uint32_t MAX_SEQ = 256;  // LLAMA_MAX_SEQ

int32_t fail(lctx_context * ctx, int32_t status, const std::string & reason) {
    ctx->error = reason;
    return status;
}

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
        throw lctx_refusal("type_k and type_v must be one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1");
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

llama_context_params to_llama(const lctx_context_params & p) {
    llama_context_params c = llama_context_default_params();
    c.n_ctx = p.n_ctx;
    c.n_batch = p.n_batch;
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
    c.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;  // ours replaces it; "disabled" would refuse a quantized V
    return c;
}

bool on_abort(void * data) {
    const auto * ctx = (const lctx_context *)data;
    return ctx->abort_flag && *ctx->abort_flag != 0;
}

// llama_init_from_model with our settings pending for this thread.
llama_context * init(llama_model * model, const llama_context_params & params, const std::string & method, uint32_t n_ctx,
                     const lctx_context_params & ours) {
    lctx_pending & pending = lctx_pending_settings();
    pending = {true, method, n_ctx, ours.kv_limit, ours.kv_offload};
    llama_context * ctx = llama_init_from_model(model, params);
    pending = {};
    return ctx;
}

void create(lctx_context * ctx, const lctx_model * model, const lctx_context_params & params, const std::string & method) {
    check_params(params);
    check_embedding(params);
    if (params.embeddings && !method.empty()) {
        throw lctx_refusal("embeddings need llama.cpp's own memory: no method");
    }
    if (params.kv_limit > 0 && method.empty()) {
        throw lctx_refusal("kv_limit needs a method; method=full behaves as llama.cpp's own cache");
    }
    if (params.kv_offload > 0 && method.empty()) {
        throw lctx_refusal("kv_offload needs method=longheads");
    }
    if (model->vocab_only) {
        throw lctx_refusal("the model was loaded with vocab_only and has no weights to run");
    }
    llama_context_params c = to_llama(params);
    const int32_t n_ctx_train = llama_model_n_ctx_train(model->model);
    if (c.n_ctx == 0) {
        c.n_ctx = method.empty() ? n_ctx_train : lctx_method_default_n_ctx(lctx_method_parse(method), n_ctx_train);
    }
    const uint32_t n_ctx = c.n_ctx;
    c.kv_unified = c.embeddings;                                             // the texts of a call share one context
    c.n_ctx = (n_ctx + 255) / 256 * 256 * (c.kv_unified ? 1 : c.n_seq_max);  // llama.cpp pads, and shares n_ctx among the sequences
    c.abort_callback = on_abort;
    c.abort_callback_data = ctx;
    lctx_log_begin();
    ctx->ctx = init(model->model, c, method, n_ctx, params);
    lctx_rpc_forget_graphs(model->servers);
    if (!ctx->ctx) {
        throw lctx_refusal(lctx_log_errors("the context could not be created"));
    }
    llama_set_embeddings(ctx->ctx, false);  // lctx_embed asks for them
    ctx->n_ctx = n_ctx;
    ctx->memory = dynamic_cast<lctx_memory *>(llama_get_memory(ctx->ctx));
    if (ctx->memory) {
        ctx->method = ctx->memory->method().full_spec();
        ctx->why = ctx->memory->full_why();
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

int32_t n_past(const lctx_context * ctx, int32_t seq) {
    return llama_memory_seq_pos_max(llama_get_memory(ctx->ctx), seq) + 1;
}

bool is_sequence(const lctx_context * ctx, int32_t seq) {
    return seq >= 0 && seq < (int32_t)llama_n_seq_max(ctx->ctx);
}

// Why the last call failed: the memory's own words, else what llama.cpp logged.
std::string failure(lctx_context * ctx, const char * fallback) {
    const std::string own = ctx->memory ? ctx->memory->take_error() : "";
    return own.empty() ? lctx_log_errors(fallback) : own;
}

// What is wrong with a batch; empty when it can be decoded. next: the next position of every sequence.
std::string check_batch(const lctx_context * ctx, const llama_batch & batch, std::vector<int32_t> next) {
    const int32_t n_vocab = llama_vocab_n_tokens(ctx->model->vocab);
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (batch.token[i] < 0 || batch.token[i] >= n_vocab) {
            return "token id " + std::to_string(batch.token[i]) + " is outside the vocabulary of " + std::to_string(n_vocab);
        }
        if (!is_sequence(ctx, seq)) {
            return "sequence " + std::to_string(seq) + " is outside n_seq_max " + std::to_string(next.size());
        }
        if (batch.pos[i] != next[seq]++) {
            return "the next position of sequence " + std::to_string(seq) + " is " + std::to_string(next[seq] - 1) + ", not " +
                   std::to_string(batch.pos[i]);
        }
    }
    return "";
}

// Put the sequences back to what they were; methods keep what a withdrawn batch needs. One that evicts ends where the ubatch that failed
// began, when others of the same batch were before it.
void withdraw(lctx_context * ctx, const std::vector<int32_t> & before) {
    for (int32_t seq = 0; seq < (int32_t)before.size(); seq++) {
        llama_memory_seq_rm(llama_get_memory(ctx->ctx), seq, before[seq], -1);
    }
}

int32_t run_batch(lctx_context * ctx, const llama_batch & batch, float * logits) {
    std::vector<int32_t> before;
    for (uint32_t seq = 0; seq < llama_n_seq_max(ctx->ctx); seq++) {
        before.push_back(n_past(ctx, seq));
    }
    const std::string wrong = check_batch(ctx, batch, before);
    if (!wrong.empty()) {
        return fail(ctx, LCTX_INVALID, wrong);
    }
    lctx_log_begin();
    const int32_t status = llama_decode(ctx->ctx, batch);
    if (status != LCTX_OK) {
        const std::string reason = status == LCTX_ABORTED ? "aborted" : failure(ctx, "llama_decode failed");
        withdraw(ctx, before);
        return fail(ctx, status == LCTX_NO_SLOT || status == LCTX_ABORTED ? status : LCTX_FAILED, reason);
    }
    if (logits) {
        const int64_t n_row = std::count_if(batch.logits, batch.logits + batch.n_tokens, [](int8_t wanted) { return wanted != 0; });
        memcpy(logits, llama_get_logits(ctx->ctx), n_row * llama_vocab_n_tokens(ctx->model->vocab) * sizeof(float));
    }
    return LCTX_OK;
}

// Decode a batch in the context's own arrays: fill(i) sets pos, seq and output of token i.
template <typename F> int32_t decode(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, float * logits, F && fill) {
    int32_t status = LCTX_FAILED;
    ctx->error.clear();
    lctx_guard(&ctx->error, [&] {
        const int32_t n_batch = (int32_t)llama_n_batch(ctx->ctx);
        if (n_tokens < 1 || n_tokens > n_batch) {
            status = fail(ctx, LCTX_INVALID, "a batch holds 1 .. " + std::to_string(n_batch) + " tokens, not " + std::to_string(n_tokens));
            return;
        }
        for (int32_t i = 0; i < n_tokens; i++) {
            fill(i);
        }
        const llama_batch batch = {
            n_tokens,          const_cast<llama_token *>(tokens), nullptr, ctx->pos.data(), ctx->n_seq_id.data(), ctx->seq_id.data(),
            ctx->output.data()};
        status = run_batch(ctx, batch, logits);
    });
    return status;
}

// Run f, which returns true, with errors of the memory as the context's error.
template <typename F> int32_t guarded(lctx_context * ctx, F && f) {
    bool done = false;
    ctx->error.clear();
    lctx_guard(&ctx->error, [&] {
        lctx_log_begin();
        done = f();
        if (!done && ctx->error.empty()) {
            ctx->error = failure(ctx, "the cache refused");
        }
    });
    return done;
}

}  // namespace

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
}

lctx_context * lctx_context_create(lctx_model * model, const lctx_context_params * params, const char * method) {
    lctx_context * ctx = new (std::nothrow) lctx_context;
    if (!ctx) {
        return nullptr;
    }
    ctx->model = model;
    lctx_guard(&ctx->error, [&] { create(ctx, model, *params, method ? method : ""); });
    return ctx;
}

const char * lctx_context_error(const lctx_context * ctx) {
    return !ctx ? "out of memory" : ctx->error.empty() ? nullptr : ctx->error.c_str();
}

void lctx_context_free(lctx_context * ctx) {
    if (ctx) {
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
    return llama_n_batch(ctx->ctx);
}

uint32_t lctx_context_n_ubatch(const lctx_context * ctx) {
    return llama_n_ubatch(ctx->ctx);
}

void * lctx_context_llama(const lctx_context * ctx) {
    return ctx->ctx;
}

int32_t lctx_decode(lctx_context * ctx, const int32_t * tokens, int32_t n_tokens, int32_t pos, float * logits, int32_t all) {
    return decode(ctx, n_tokens, tokens, logits, [&](int32_t i) {
        ctx->pos[i] = pos + i;
        ctx->seq[i] = 0;
        ctx->output[i] = logits && (all || i == n_tokens - 1);
    });
}

int32_t lctx_decode_batch(lctx_context * ctx, int32_t n_tokens, const int32_t * tokens, const int32_t * pos, const int32_t * seqs,
                          const int8_t * outputs, float * logits) {
    return decode(ctx, n_tokens, tokens, logits, [&](int32_t i) {
        ctx->pos[i] = pos[i];
        ctx->seq[i] = seqs[i];
        ctx->output[i] = logits && outputs[i] != 0;
    });
}

int32_t lctx_n_past(const lctx_context * ctx, int32_t seq) {
    return is_sequence(ctx, seq) ? n_past(ctx, seq) : 0;
}

int32_t lctx_seq_rm(lctx_context * ctx, int32_t seq, int32_t p0, int32_t p1) {
    return guarded(ctx, [&] { return llama_memory_seq_rm(llama_get_memory(ctx->ctx), seq, p0, p1); });
}

int32_t lctx_seq_restorable(const lctx_context * ctx, int32_t seq, int32_t n) {
    return ctx->memory ? ctx->memory->restorable(seq, n) : std::max(0, std::min(n, lctx_n_past(ctx, seq)));
}

int32_t lctx_seq_cp(lctx_context * ctx, int32_t src, int32_t dst, int32_t n) {
    return guarded(ctx, [&] {
        if (!is_sequence(ctx, src) || !is_sequence(ctx, dst)) {
            ctx->error = "sequences are 0 .. " + std::to_string(llama_n_seq_max(ctx->ctx) - 1);
            return false;
        }
        if (ctx->memory) {
            return ctx->memory->copy(src, dst, n);
        }
        llama_memory_seq_rm(llama_get_memory(ctx->ctx), dst, -1, -1);
        llama_memory_seq_cp(llama_get_memory(ctx->ctx), src, dst, -1, n);
        return true;
    });
}

void lctx_seq_keep(lctx_context * ctx, int32_t seq) {
    guarded(ctx, [&] {
        llama_memory_seq_keep(llama_get_memory(ctx->ctx), seq);
        return true;
    });
}

size_t lctx_state_size(lctx_context * ctx, int32_t seq) {
    size_t n = 0;
    guarded(ctx, [&] {
        n = seq < 0 ? llama_state_get_size(ctx->ctx) : llama_state_seq_get_size(ctx->ctx, seq);
        return n > 0;
    });
    return n;
}

size_t lctx_state_get(lctx_context * ctx, int32_t seq, uint8_t * buf, size_t size) {
    size_t n = 0;
    guarded(ctx, [&] {
        n = seq < 0 ? llama_state_get_data(ctx->ctx, buf, size) : llama_state_seq_get_data(ctx->ctx, buf, size, seq);
        return n > 0;
    });
    return n;
}

size_t lctx_state_set(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size) {
    size_t n = 0;
    guarded(ctx, [&] {
        n = seq < 0 ? llama_state_set_data(ctx->ctx, buf, size) : llama_state_seq_set_data(ctx->ctx, buf, size, seq);
        if (n == 0) {  // llama.cpp may have given up before the memory was asked
            llama_memory_seq_rm(llama_get_memory(ctx->ctx), seq, -1, -1);
        }
        return n > 0;
    });
    return n;
}

void lctx_clear(lctx_context * ctx) {
    lctx_guard(&ctx->error, [&] { llama_memory_clear(llama_get_memory(ctx->ctx), false); });
}

void lctx_context_set_abort(lctx_context * ctx, const volatile int32_t * flag) {
    ctx->abort_flag = flag;
}

int32_t lctx_context_step(const lctx_context * ctx, int32_t pos, int32_t n) {
    const auto most = (int32_t)std::min(llama_n_batch(ctx->ctx), llama_n_ubatch(ctx->ctx));
    return ctx->memory ? ctx->memory->step(pos, n) : std::min(n, most);
}

int32_t lctx_seq_held(lctx_context * ctx, int32_t seq, int32_t layer, int32_t head, int32_t * rows, int32_t * scores, int32_t n_max) {
    return ctx->memory ? ctx->memory->held_rows(seq, layer, head, rows, scores, n_max) : 0;
}

int32_t lctx_context_work(const lctx_context * ctx, lctx_work * work) {
    if (!ctx->memory) {
        return LCTX_INVALID;
    }
    *work = ctx->memory->work();
    work->n_built = work->n_graph - llama_perf_context(ctx->ctx).n_reused;
    return LCTX_OK;
}

int32_t lctx_kv_usage(const lctx_context * ctx, lctx_kv_info * info, int32_t * rows) {
    if (!ctx->memory) {
        return LCTX_INVALID;
    }
    ctx->memory->usage(*info, rows);
    return LCTX_OK;
}
