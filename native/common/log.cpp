// The log of llama.cpp's common/, without its thread: into llama.cpp's own log.
#include "log.h"

#include "common.h"
#include "ggml-impl.h"

#include <cstdarg>

int common_log_get_verbosity_thold() {
    return LOG_LEVEL_WARN;
}

void common_log_set_verbosity_thold(int) {}

int common_log_get_verbosity(ggml_log_level level) {
    return level == GGML_LOG_LEVEL_ERROR  ? LOG_LEVEL_ERROR
           : level == GGML_LOG_LEVEL_WARN ? LOG_LEVEL_WARN
                                          : LOG_LEVEL_DEBUG;
}

void common_log_default_callback(ggml_log_level level, const char * text, void *) {
    ggml_log_internal(level, "%s", text);
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level level, const char * format, ...) {
    va_list args;
    va_start(args, format);
    va_list again;
    va_copy(again, args);
    std::string text(vsnprintf(nullptr, 0, format, args), 0);
    vsnprintf(text.data(), text.size() + 1, format, again);
    va_end(again);
    va_end(args);
    ggml_log_internal(level, "%s", text.c_str());
}
