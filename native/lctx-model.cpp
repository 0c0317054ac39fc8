// The C API: library, model and vocabulary. Handles are checked, nothing throws past extern "C".
#include "lctx.h"

#include "base/firewall.h"
#include "base/kernel-name.h"
#include "base/log.h"
#include "cpu/kernels.h"
#include "ggml-backend.h"
#include "handles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#ifndef LCTX_BUILD_INFO
#error "CMake defines LCTX_BUILD_INFO"
#endif

static void backend_init() {
    static std::once_flag once;
    std::call_once(once, [] {
        llama_backend_init();
        lctx_rpc_watch_aborts();
    });
}

// ---- library ----

int32_t lctx_abi_version(void) {
    return LCTX_ABI_VERSION;
}

static const std::string & build_info() {
    static const std::string info = [] {
        std::string backends, kernels;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(i);
            const std::string name = std::string(i ? ", " : "") + "\"" + ggml_backend_dev_name(dev) + "\"";
            backends += name;
            kernels += name + ": \"" + lctx_kernel_name(dev) + "\"";
        }
        return std::string(LCTX_BUILD_INFO) + ", \"cuda\": " + lctx_cuda_architectures() + ", \"backends\": [" +
               backends + "], \"kernels\": {" + kernels + "}, \"prompt_products\": \"" + lctx_cpu_prompt_products() +
               "\"}";
    }();
    return info;
}

const char * lctx_build_info(void) {
    const char * text = "{}";
    lctx_guard(nullptr, [&] { text = build_info().c_str(); });
    return text;
}

const char * lctx_system_info(void) {
    return llama_print_system_info();
}

int32_t lctx_type_from_name(const char * name) {
    for (int32_t type = 0; name && type < GGML_TYPE_COUNT; type++) {
        const char * known = ggml_type_name((ggml_type)type);
        if (known && strcmp(known, name) == 0) {
            return type;
        }
    }
    return -1;
}

const char * lctx_type_name(int32_t type) {
    return type >= 0 && type < GGML_TYPE_COUNT ? ggml_type_name((ggml_type)type) : nullptr;
}

// ---- model ----

// llama.cpp reads one fraction for every device that there is; all zero: by free memory.
static std::vector<float> tensor_split(const lctx_model_params & params, size_t n_device) {
    if (params.n_tensor_split < 0 || (size_t)params.n_tensor_split > n_device) {
        throw lctx_refusal("tensor_split has " + std::to_string(params.n_tensor_split) + " fractions, at most " +
                           std::to_string(n_device));
    }
    std::vector<float> split(params.tensor_split,
                             params.tensor_split + (params.tensor_split ? params.n_tensor_split : 0));
    for (float fraction : split) {
        if (!(fraction >= 0.0f && std::isfinite(fraction))) {
            throw lctx_refusal("tensor_split has the fraction " + std::to_string(fraction) +
                               "; fractions are 0 or more");
        }
    }
    split.resize(n_device);
    return split;
}

void lctx_model_params_default(lctx_model_params * params) {
    const llama_model_params d = llama_model_default_params();
    *params = {d.n_gpu_layers, (int32_t)d.split_mode, d.main_gpu, d.vocab_only, 1, 0, nullptr, 0, nullptr, 0, 0, 0};
}

lctx_model * lctx_model_load(const char * path, const lctx_model_params * params, const char * overrides) {
    lctx_model * m = new (std::nothrow) lctx_model;
    if (!m) {
        return nullptr;
    }
    lctx_guard(&m->error, [&] {
        backend_init();
        lctx_log_begin();
        llama_model_params p = llama_model_default_params();
        for (const std::string & endpoint : lctx_rpc_endpoints(params->rpc_servers ? params->rpc_servers : "")) {
            m->servers.push_back(lctx_rpc_connect(endpoint));
        }
        std::vector<ggml_backend_dev_t> devices = lctx_model_devices(m->servers);
        m->overrides.read(overrides ? overrides : "", devices);
        m->overrides.apply(p);
        p.devices = devices.empty() ? nullptr : devices.data();
        const std::vector<float> split = tensor_split(*params, std::max(devices.size(), llama_max_devices()));
        p.tensor_split = split.data();
        p.n_gpu_layers = params->n_gpu_layers;
        p.split_mode = (llama_split_mode)params->split_mode;
        p.main_gpu = params->main_gpu;
        p.vocab_only = params->vocab_only != 0;
        p.no_alloc = params->dry != 0;
        p.load_mode = p.no_alloc ? LLAMA_LOAD_MODE_NONE
                                 : (llama_load_mode)((params->use_mmap ? LLAMA_LOAD_MODE_MMAP : 0) |
                                                     (params->use_mlock ? LLAMA_LOAD_MODE_MLOCK : 0));
        p.load_mtp = params->mtp != 0;
        p.use_extra_bufts = params->deterministic == 0;  // products of repacked weights depend on the number of columns
        m->model = llama_model_load_from_file(path, p);
        lctx_rpc_forget_graphs(m->servers);
        if (!m->model) {
            m->error = lctx_log_errors("the model could not be loaded");
            return;
        }
        m->overrides.check_used(lctx_log_overrides(), params->vocab_only != 0);
        m->vocab = llama_model_get_vocab(m->model);
        m->vocab_only = p.vocab_only;
        m->dry = p.no_alloc;
        m->plain = !p.use_extra_bufts;
    });
    return m;
}

const char * lctx_model_error(const lctx_model * model) {
    return !model ? "out of memory" : model->error.empty() ? nullptr : model->error.c_str();
}

void lctx_model_free(lctx_model * model) {
    if (model) {
        llama_model_free(model->model);
        lctx_guard(nullptr, [&] { lctx_rpc_forget_graphs(model->servers); });
        delete model;
    }
}

void * lctx_model_llama(const lctx_model * model) {
    return model->model;
}

void lctx_model_get_info(const lctx_model * model, lctx_model_info * info) {
    const llama_model * m = model->model;
    const llama_vocab * v = model->vocab;
    *info = {};
    info->n_vocab = llama_vocab_n_tokens(v);
    info->token_bos = llama_vocab_bos(v);
    info->token_eos = llama_vocab_eos(v);
    info->token_nl = llama_vocab_nl(v);
    info->token_sep = llama_vocab_sep(v);
    info->add_bos = llama_vocab_get_add_bos(v);
    info->add_eos = llama_vocab_get_add_eos(v);
    info->add_sep = llama_vocab_get_add_sep(v);
    if (!model->vocab_only) {  // llama.cpp has read no sizes then, and aborts on asking for heads
        info->n_ctx_train = llama_model_n_ctx_train(m);
        info->n_embd = llama_model_n_embd(m);
        info->n_layer = llama_model_n_layer(m);
        info->n_head = llama_model_n_head(m);
        info->n_head_kv = llama_model_n_head_kv(m);
        info->size = llama_model_size(m);
        info->n_params = llama_model_n_params(m);
    }
}

int32_t lctx_model_meta_count(const lctx_model * model) {
    return llama_model_meta_count(model->model);
}

int32_t lctx_model_meta_key(const lctx_model * model, int32_t i, char * buf, size_t size) {
    return llama_model_meta_key_by_index(model->model, i, buf, size);
}

int32_t lctx_model_meta_val(const lctx_model * model, int32_t i, char * buf, size_t size) {
    return llama_model_meta_val_str_by_index(model->model, i, buf, size);
}

int32_t lctx_model_desc(const lctx_model * model, char * buf, size_t size) {
    return llama_model_desc(model->model, buf, size);
}

// ---- vocabulary ----

int32_t lctx_tokenize(const lctx_model * model, const char * text, int32_t n_text, int32_t * tokens, int32_t n_max,
                      int32_t add_special, int32_t parse_special) {
    int32_t n = INT32_MIN;
    lctx_guard(nullptr, [&] {
        n = llama_tokenize(model->vocab, text, n_text, tokens, n_max, add_special != 0, parse_special != 0);
    });
    return n;
}

int32_t lctx_token_to_piece(const lctx_model * model, int32_t token, char * buf, int32_t size, int32_t special) {
    int32_t n = 0;
    if (token >= 0 && token < llama_vocab_n_tokens(model->vocab)) {
        n = INT32_MIN;
        lctx_guard(nullptr, [&] { n = llama_token_to_piece(model->vocab, token, buf, size, 0, special != 0); });
    }
    return n;
}

int32_t lctx_token_is_eog(const lctx_model * model, int32_t token) {
    return token >= 0 && token < llama_vocab_n_tokens(model->vocab) && llama_vocab_is_eog(model->vocab, token);
}
