#include "deterministic.h"

#include "base/firewall.h"
#include "llama-arch.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

// A device with other kernels than those of the CPU. What a server has cannot be seen from here.
bool is_other(ggml_backend_dev_t dev) {
    return ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU &&
           strncmp(ggml_backend_dev_name(dev), "RPC", 3) != 0;
}

// The first of the devices that compute products, or nullptr. ggml gives an accelerator (BLAS) those of large batches.
ggml_backend_dev_t other_device(const llama_model & m) {
    std::vector<ggml_backend_dev_t> used = {m.dev_output()};
    for (uint32_t il = 0; il < m.hparams.n_layer(); il++) {
        used.push_back(m.dev_layer((int)il));
    }
    used.push_back(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_ACCEL));
    const auto found =
        std::find_if(used.begin(), used.end(), [](ggml_backend_dev_t dev) { return dev && is_other(dev); });
    return found == used.end() ? nullptr : *found;
}

std::string why_not_model(const lctx_model & model, const lctx_context_params & params) {
    const llama_model & m = *model.model;
    if (!model.plain) {
        return "the model was loaded without it";
    }
    if (llm_arch_is_recurrent(m.arch) || llm_arch_is_hybrid(m.arch)) {
        return "recurrent layers read a batch in pieces of their own; use a model whose layers all have attention";
    }
    if (ggml_backend_dev_t dev = other_device(m)) {
        return std::string("products on ") + ggml_backend_dev_name(dev) +
               " depend on the number of tokens; use n_gpu_layers=0";
    }
    if (lctx_has_windows(model) && ggml_is_quantized((ggml_type)params.type_v)) {
        return "this model has sliding windows, whose V cannot be quantized then; use type_v=f16";
    }
    if (lctx_has_windows(model) && params.swa_full == 0) {
        return "sliding windows keep all rows then; leave swa_full out";
    }
    return params.kv_offload > 0 && !params.kv_offload_folder ? "kv_offload='host' is for GPUs" : "";
}

}  // namespace

bool lctx_has_windows(const lctx_model & model) {
    return model.model->hparams.swa_type != LLAMA_SWA_TYPE_NONE;
}

void lctx_check_deterministic(const lctx_model & model, const lctx_context_params & params,
                              const std::string & method) {
    const std::string why = params.embeddings ? "a vector depends on the texts that are embedded with it"
                            : method.empty()  ? "llama.cpp's own KV cache does not promise that; use method=full"
                                              : why_not_model(model, params);
    if (!why.empty()) {
        throw lctx_refusal("deterministic: " + why);
    }
}
