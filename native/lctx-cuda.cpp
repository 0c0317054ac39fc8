// The C API: the CUDA backend where it is a library of its own.
#include "base/backend.h"
#include "base/firewall.h"
#include "cuda/module.h"
#include "handles.h"
#include "lctx.h"
#include "platform/system.h"

#include <cstring>
#include <memory>
#include <mutex>

#ifndef LCTX_CUDA_ARCHITECTURES
#error "CMake defines LCTX_CUDA_ARCHITECTURES"
#endif

namespace {

#ifdef LCTX_CUDA_ARENA
// Before anything can open a context: programs of llama.cpp do so without the C API.
[[maybe_unused]] const bool is_registered = (lctx_arena_use(&lctx_cuda_memory), true);
#endif

std::mutex loading;
const char * architectures = LCTX_CUDA_ARCHITECTURES;

// Pass what a module logs to the log callback that is set at that time, as ours does.
void forward_log(ggml_log_level level, const char * text, void *) {
    ggml_log_callback callback = nullptr;
    void * user_data = nullptr;
    ggml_log_get(&callback, &user_data);
    callback(level, text, user_data);
}

const lctx_cuda_module & module_of(void * library) {
    const auto get = (decltype(&lctx_cuda_module_get))lctx_library_symbol(library, "lctx_cuda_module_get");
    if (!get) {
        throw lctx_refusal("it is not a library of pylongctx-cuda");
    }
    const lctx_cuda_module & module = *get();
    if (strcmp(module.build, LCTX_BUILD) != 0) {
        throw lctx_refusal("it belongs to pylongctx " + std::string(module.build) + ", this is " LCTX_BUILD);
    }
    return module;
}

void load(const char * path) {
    const std::lock_guard<std::mutex> lock(loading);
    if (strcmp(architectures, "null") != 0) {
        throw lctx_refusal("there is a CUDA backend already");
    }
    std::unique_ptr<void, decltype(&lctx_library_close)> library(lctx_library_open(path), lctx_library_close);
    if (!library) {
        throw lctx_refusal(lctx_library_error());
    }
    const lctx_cuda_module & module = module_of(library.get());
    module.log_set(forward_log, nullptr);
    ggml_backend_register(module.backend());
    lctx_arena_use(module.memory);
    architectures = module.architectures;
    library.release();  // its devices stay until the process ends
}

}  // namespace

const char * lctx_cuda_architectures(void) {
    return architectures;
}

int32_t lctx_cuda_load(const char * path, char * err, size_t err_size) {
    std::string error;
    if (!path) {
        return lctx_told("path is NULL", err, err_size);
    }
    return lctx_guard(&error, [&] { load(path); }) ? LCTX_OK : lctx_told(error, err, err_size);
}
