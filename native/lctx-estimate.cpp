// The C API: what a context would hold, from a model and a context that have no memory.
#include "base/firewall.h"
#include "handles.h"
#include "llama-arch.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace {

struct llama_freer {
    void operator()(lctx_context * ctx) const {
        llama_free(ctx->ctx);
        delete ctx;
    }
};

ggml_backend_dev_t host() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// The device whose memory a buffer takes.
ggml_backend_dev_t device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev || ggml_backend_buft_is_host(buft) || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU ||
        ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        return host();
    }
    return dev;
}

// Sizes by device, the host first.
class by_device {
  public:
    by_device() { of(host()); }

    lctx_sizes & of(ggml_backend_dev_t dev) {
        const char * name = ggml_backend_dev_name(dev);
        for (lctx_sizes & s : all) {
            if (strcmp(s.device, name) == 0) {
                return s;
            }
        }
        size_t free = 0, total = 0;
        if (dev != host()) {
            ggml_backend_dev_memory(dev, &free, &total);
        }
        all.push_back({});
        all.back().device = name;
        all.back().free = free;
        return all.back();
    }

    std::vector<lctx_sizes> all;
};

// Add what a context holds in addition to weights and graphs.
void add(lctx_sizes & to, const lctx_sizes & s) {
    to.k += s.k;
    to.v += s.v;
    to.chunks += s.chunks;
    to.near += s.near;
    to.other += s.other;
    to.disk += s.disk;
    to.foreign += s.foreign;
}

// llama.cpp's own cache: what it keeps of keys and values, in the proportion of their rows.
lctx_sizes own_cache(const llama_model & model, const lctx_context_params & params, uint64_t bytes) {
    lctx_sizes s = {};
    if (llm_arch_is_recurrent(model.arch) || llm_arch_is_hybrid(model.arch)) {
        s.foreign = bytes;
        return s;
    }
    double k = 0.0, v = 0.0;
    for (uint32_t il = 0; il < model.hparams.n_layer(); il++) {
        k += (double)ggml_row_size((ggml_type)params.type_k, model.hparams.n_embd_k_gqa(il));
        v += model.hparams.is_mla() ? 0.0
                                    : (double)ggml_row_size((ggml_type)params.type_v, model.hparams.n_embd_v_gqa(il));
    }
    s.k = (uint64_t)((double)bytes * k / std::max(1.0, k + v));
    s.v = bytes - s.k;
    return s;
}

std::vector<lctx_sizes> sizes_of(const lctx_model & model, const lctx_context_params & params,
                                 const std::string & method) {
    const std::unique_ptr<lctx_context, llama_freer> ctx(new lctx_context);
    ctx->model = &model;
    lctx_context_open(ctx.get(), params, method);
    by_device sizes;
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx->ctx)) {
        lctx_sizes & s = sizes.of(device_of(buft));
        s.weights += bytes.model;
        s.compute += bytes.compute;
        if (!ctx->memory) {
            add(s, own_cache(*model.model, params, bytes.context));
        }
    }
    if (ctx->mtp) {
        for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx->mtp->context())) {
            sizes.of(device_of(buft)).foreign += bytes.context;
            sizes.of(device_of(buft)).compute += bytes.compute;
        }
    }
    if (ctx->memory) {
        ctx->memory->each_size([&](ggml_backend_dev_t dev, const lctx_sizes & s) { add(sizes.of(dev), s); });
    }
    return sizes.all;
}

// llama.cpp's own cache keeps a list of n_ctx cells, even without memory: a long one is drawn from two short ones.
std::vector<lctx_sizes> extrapolated(const lctx_model & model, lctx_context_params params, uint32_t n_short) {
    const double times = (double)(lctx_padded_n_ctx(params.n_ctx) - n_short) / n_short;
    params.n_ctx = n_short;
    const std::vector<lctx_sizes> a = sizes_of(model, params, "");
    params.n_ctx = 2 * n_short;
    std::vector<lctx_sizes> b = sizes_of(model, params, "");
    for (size_t i = 0; i < b.size(); i++) {
        for (uint64_t lctx_sizes::*size :
             {&lctx_sizes::k, &lctx_sizes::v, &lctx_sizes::foreign, &lctx_sizes::compute}) {
            b[i].*size = (uint64_t)((double)(a[i].*size) + times * (double)(b[i].*size - a[i].*size));
        }
    }
    return b;
}

std::vector<lctx_sizes> estimate(const lctx_model & model, lctx_context_params & params, const std::string & method) {
    constexpr uint32_t SHORT = 32768;
    if (!model.dry) {
        throw lctx_refusal("an estimate needs a model that was loaded dry");
    }
    params.n_ctx = lctx_context_default_n_ctx(model, params, method);
    return method.empty() && params.n_ctx > 2 * SHORT ? extrapolated(model, params, SHORT)
                                                      : sizes_of(model, params, method);
}

}  // namespace

int32_t lctx_estimate(const lctx_model * model, lctx_context_params * params, const char * method, lctx_sizes * sizes,
                      int32_t n_max, char * err, size_t err_size) {
    std::string error;
    std::vector<lctx_sizes> all;
    if (!lctx_guard(&error, [&] { all = estimate(*model, *params, method ? method : ""); })) {
        return lctx_told(error, err, err_size);
    }
    std::copy_n(all.begin(), std::min<size_t>(all.size(), (size_t)std::max(0, n_max)), sizes);
    return (int32_t)all.size();
}
