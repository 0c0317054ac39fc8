// No exception crosses extern "C".
#pragma once

#include <exception>
#include <string>

// Run f; an exception ends in *error (when there is one) and false.
template <typename F> bool lctx_guard(std::string * error, F && f) noexcept {
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
