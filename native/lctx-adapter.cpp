// The C API: LoRA adapters.
#include "base/firewall.h"
#include "base/log.h"
#include "handles.h"

#include <cmath>
#include <new>

constexpr float MAX_SCALE = 1e4f;  // beyond, what a layer computes overflows

struct lctx_adapter {
    llama_adapter_lora * adapter = nullptr;
    std::string error;
};

lctx_adapter * lctx_adapter_load(lctx_model * model, const char * path) {
    auto * a = new (std::nothrow) lctx_adapter;
    if (!a) {
        return nullptr;
    }
    lctx_guard(&a->error, [&] {
        lctx_log_begin();
        if (model->vocab_only) {
            throw lctx_refusal("the model was loaded with vocab_only and has no weights to adapt");
        }
        if (model->dry) {
            throw lctx_refusal("the model was loaded dry: it has no weights to adapt");
        }
        a->adapter = llama_adapter_lora_init(model->model, path);
        if (!a->adapter) {
            throw lctx_refusal(lctx_log_errors("the adapter could not be loaded"));
        }
        if (llama_adapter_get_alora_n_invocation_tokens(a->adapter) > 0) {
            throw lctx_refusal(
                "it is an activated LoRA, which begins to work at certain tokens of a prompt: not supported");
        }
    });
    return a;
}

const char * lctx_adapter_error(const lctx_adapter * adapter) {
    return !adapter ? "out of memory" : adapter->error.empty() ? nullptr : adapter->error.c_str();
}

void lctx_adapter_free(lctx_adapter * adapter) {
    if (adapter) {
        if (adapter->adapter) {
            llama_adapter_lora_free(adapter->adapter);
        }
        delete adapter;
    }
}

int32_t lctx_context_set_adapters(lctx_context * ctx, int32_t n, lctx_adapter ** adapters, const float * scales) {
    ctx->error.clear();
    int32_t status = LCTX_FAILED;
    lctx_guard(&ctx->error, [&] {
        std::vector<llama_adapter_lora *> loras;
        std::vector<float> factors;
        for (int32_t i = 0; i < n; i++) {
            if (!(std::fabs(scales[i]) <= MAX_SCALE)) {  // NaN too
                char text[96];
                snprintf(text, sizeof(text), "the scale of a LoRA adapter must be from %g to %g, not %g", -MAX_SCALE,
                         MAX_SCALE, scales[i]);
                status = LCTX_INVALID;
                throw lctx_refusal(text);
            }
            loras.push_back(adapters[i]->adapter);
            factors.push_back(scales[i]);
        }
        status =
            llama_set_adapters_lora(ctx->ctx, loras.data(), loras.size(), factors.data()) == 0 ? LCTX_OK : LCTX_FAILED;
    });
    return status;
}
