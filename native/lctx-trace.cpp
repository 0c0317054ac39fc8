// The C API: which chunks are read.
#include "base/firewall.h"
#include "handles.h"
#include "lctx.h"
#include "llama-context.h"

int32_t lctx_trace_start(lctx_context * ctx, int32_t seq, int32_t p0, int32_t p1) {
    int32_t status = LCTX_INVALID;
    lctx_guard(&ctx->error, [&] {
        ctx->error.clear();
        const lctx_chunks * chunks = ctx->memory ? ctx->memory->cache().method().chunks() : nullptr;
        if (!chunks) {
            throw lctx_refusal("only a method that chooses chunks (longheads) can be traced");
        }
        const auto n_seq = (int32_t)llama_n_seq_max(ctx->ctx);
        if (seq < 0 || seq >= n_seq) {
            throw lctx_refusal("sequences are 0 .. " + std::to_string(n_seq - 1) + ", not " + std::to_string(seq));
        }
        const llama_model * model = ctx->model->model;
        ctx->trace.start(seq, p0, p1,
                         {0, llama_model_n_layer(model), llama_model_n_head(model),
                          ctx->memory->cache().method().n_read(), chunks->chunk_size});
        ctx->memory->cache().always_select(p0 < p1);  // *select* also says what queries read that do not choose
        // with a callback a device waits after every part of a graph, so there is none otherwise; graphs that are built
        // later take it from the parameters
        auto & params = const_cast<llama_cparams &>(ctx->ctx->get_cparams());
        params.cb_eval = p0 < p1 ? lctx_trace::on_node : nullptr;
        params.cb_eval_user_data = &ctx->trace;
        ggml_backend_sched_set_eval_callback(ctx->ctx->get_sched(), params.cb_eval, params.cb_eval_user_data);
        status = LCTX_OK;
    });
    return status;
}

int32_t lctx_trace_get(const lctx_context * ctx, lctx_trace_info * info, int32_t * pos, int32_t * chunks) {
    ctx->trace.get(*info, pos, chunks);  // into arrays of the caller: nothing is allocated
    return ctx->trace.failed() ? LCTX_FAILED : LCTX_OK;
}
