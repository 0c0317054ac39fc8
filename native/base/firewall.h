// No exception crosses extern "C".
#pragma once

#include "counts.h"

#include <cstdio>
#include <exception>
#include <string>

// Counts the calls of lctx_guard that the thread is in: an exception that is thrown there ends in one of them. Not
// exported.
[[gnu::visibility("hidden")]] inline thread_local int lctx_guard_depth = 0;

// Run f; an exception ends in *error (when there is one) and false.
template <typename F> bool lctx_guard(std::string * error, F && f) noexcept {
    struct depth {
        depth() { lctx_guard_depth++; }
        ~depth() { lctx_guard_depth--; }
    } inside;
    try {
        f();
        return true;
    } catch (const std::exception & e) {
        try {
            if (error) {
                *error = e.what();
            }
        } catch (...) {
        }
    } catch (...) {
    }
    return false;
}

// LCTX_INVALID, with the reason in err, which has room for err_size bytes or is NULL.
inline int32_t lctx_told(const std::string & error, char * err, size_t err_size) {
    if (err && err_size > 0) {
        snprintf(err, err_size, "%s", error.c_str());
    }
    return LCTX_INVALID;
}
