// Text that crosses the C API, or the reason why there is none.
#pragma once

#include "base/firewall.h"
#include "base/log.h"

#include "lctx-sampling.h"

#include <new>
#include <string>

struct lctx_text {
    std::string text, error;
    bool made = false;
};

// The string that f returns; what it throws or logs is the reason.
template <typename F> lctx_text * lctx_make_text(F && f) {
    auto * result = new (std::nothrow) lctx_text;
    if (result) {
        lctx_log_begin();
        result->made = lctx_guard(&result->error, [&] { result->text = f(); });
    }
    return result;
}
