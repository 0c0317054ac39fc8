// Says why something cannot be served, in words for the user.
#pragma once

#include <stdexcept>
#include <string>

struct lctx_refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void lctx_require(bool ok, const std::string & reason) {
    if (!ok) {
        throw lctx_refusal(reason);
    }
}
