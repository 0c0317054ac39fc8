#include "log.h"

#include "llama.h"

#include <atomic>
#include <cstdio>
#include <cstring>

namespace {

std::atomic<int32_t> shown_level{2};
thread_local std::string errors, overrides;
thread_local ggml_log_level last_level = GGML_LOG_LEVEL_NONE;

int32_t rank(ggml_log_level level) {
    switch (level) {
        case GGML_LOG_LEVEL_ERROR: return 1;
        case GGML_LOG_LEVEL_WARN:  return 2;
        case GGML_LOG_LEVEL_INFO:  return 3;
        default:                   return 4;
    }
}

void on_log(ggml_log_level level, const char * text, void *) {
    last_level = level == GGML_LOG_LEVEL_CONT ? last_level : level;
    if (last_level == GGML_LOG_LEVEL_ERROR) {
        errors += text;
    }
    if (strstr(text, "etadata override")) {
        overrides += text;
    }
    // a method reads beyond the trained context on purpose; its own line says what that means
    const bool misleading = strstr(text, "possible training context overflow");
    if (rank(last_level) <= shown_level && !misleading) {
        fputs(text, stderr);
    }
}

}  // namespace

void lctx_log_begin() {
    llama_log_set(on_log, nullptr);
    errors.clear();
    overrides.clear();
}

std::string lctx_log_overrides() {
    return overrides;
}

std::string lctx_log_errors(const char * fallback) {
    // the message of an exception follows this prefix and is enough by itself
    static const std::string thrown = "failed to initialize the context: ";
    const size_t at = errors.find(thrown);
    std::string text = at == std::string::npos ? errors : errors.substr(at + thrown.size());
    while (!text.empty() && text.back() == '\n') {
        text.pop_back();
    }
    return text.empty() ? fallback : text;
}

void lctx_log_show(int32_t level) {
    shown_level = level;
    llama_log_set(on_log, nullptr);
}
