// What the KV cache of a context knows of its sequences and pages.
#include "../handles.h"
#include "run.h"

int32_t lctx_check_run(lctx_check_args * args, char * err, size_t err_size) {
    const auto check = [&] {
        const auto * ctx = (const lctx_context *)args->context;
        const std::string why = ctx->memory ? ctx->memory->cache().why_unsound() : "";
        lctx_require(why.empty(), why.c_str());
    };
    return lctx_status_of(check, err, err_size);
}
