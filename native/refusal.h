// Why something cannot be served, in words for the user.
#pragma once

#include <stdexcept>

struct lctx_refusal : std::runtime_error {
    using std::runtime_error::runtime_error;
};
