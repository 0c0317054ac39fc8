#include "overrides.h"

#include "../base/refusal.h"
#include "../chat/nesting.h"
#include "ggml-backend.h"

#include <cstring>
#include <map>
#include <regex>

namespace {

// A NUL would end the text early, so it does not fit either.
template <size_t N> void copy(char (&to)[N], const std::string & what, const std::string & from) {
    if (from.size() >= N || from.find('\0') != std::string::npos) {
        throw lctx_refusal(what + " must have at most " + std::to_string(N - 1) + " bytes, none of them 0, not " +
                           std::to_string(from.size()));
    }
    memcpy(to, from.c_str(), from.size() + 1);
}

llama_model_kv_override metadata(const std::string & key, const common_json & value) {
    llama_model_kv_override o = {};
    copy(o.key, "a key of kv_overrides", key);
    if (value.is_boolean()) {
        o.tag = LLAMA_KV_OVERRIDE_TYPE_BOOL;
        o.val_bool = value.get<bool>();
    } else if (value.is_number_integer()) {
        o.tag = LLAMA_KV_OVERRIDE_TYPE_INT;
        o.val_i64 = value.get<int64_t>();
    } else if (value.is_number_float()) {
        o.tag = LLAMA_KV_OVERRIDE_TYPE_FLOAT;
        o.val_f64 = value.get<double>();
    } else if (value.is_string()) {
        o.tag = LLAMA_KV_OVERRIDE_TYPE_STR;
        copy(o.val_str, "the text of " + key + " in kv_overrides", value.get<std::string>());
    } else {
        throw lctx_refusal("kv_overrides: " + key + " must be a bool, an int, a float or a string");
    }
    return o;
}

using buffer_types = std::map<std::string, ggml_backend_buffer_type_t>;

// Return where devices keep tensors, by llama.cpp's names.
buffer_types types_of(std::vector<ggml_backend_dev_t> devices) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        devices.push_back(ggml_backend_dev_get(i));
    }
    buffer_types found;
    for (ggml_backend_dev_t dev : devices) {
        ggml_backend_buffer_type_t type = dev ? ggml_backend_dev_buffer_type(dev) : nullptr;  // nullptr ends a list
        if (type) {
            found[ggml_backend_buft_name(type)] = type;
        }
    }
    return found;
}

void check_pattern(const std::string & pattern) {
    try {
        const std::regex compiled(pattern);
    } catch (const std::regex_error & e) {
        throw lctx_refusal("override_tensor: " + pattern + " is not a regular expression: " + e.what());
    }
}

ggml_backend_buffer_type_t buffer_type(const buffer_types & known, const std::string & name) {
    if (const auto found = known.find(name); found != known.end()) {
        return found->second;
    }
    std::string names;
    for (const auto & [other, type] : known) {
        names += (names.empty() ? "" : ", ") + other;
    }
    throw lctx_refusal("override_tensor: there is no buffer type " + name + "; known are " + names);
}

}  // namespace

void lctx_overrides::read(const std::string & json, std::vector<ggml_backend_dev_t> devices) {
    if (json.empty()) {
        return;
    }
    const common_json spec = lctx_parse_json("overrides of a model", json);
    if (spec.contains("metadata")) {
        for (const auto & [key, value] : spec.at("metadata").items()) {
            metadata_.push_back(metadata(key, value));
        }
        metadata_.push_back({});
    }
    if (spec.contains("tensors")) {
        const buffer_types known = types_of(std::move(devices));
        for (const auto & [pattern, name] : spec.at("tensors").items()) {
            check_pattern(pattern);
            patterns_.push_back(pattern);
            tensors_.push_back({patterns_.back().c_str(), buffer_type(known, name.get<std::string>())});
        }
        tensors_.push_back({nullptr, nullptr});
    }
}

void lctx_overrides::check_used(const std::string & said, bool vocab_only) const {
    const size_t wrong = said.find("Bad metadata override type for key");
    if (wrong != std::string::npos) {
        throw lctx_refusal("kv_overrides: " + said.substr(wrong, said.find('\n', wrong) - wrong));
    }
    for (const llama_model_kv_override & o : metadata_) {
        if (o.key[0] && !vocab_only && said.find("'" + std::string(o.key) + "'") == std::string::npos) {
            throw lctx_refusal("kv_overrides: llama.cpp reads no " + std::string(o.key) +
                               " of this model, so it can have no effect");
        }
    }
}

void lctx_overrides::apply(llama_model_params & params) const {
    params.kv_overrides = metadata_.empty() ? nullptr : metadata_.data();
    params.tensor_buft_overrides = tensors_.empty() ? nullptr : tensors_.data();
}
