// Checks what the KV cache of a context knows of its sequences and pages.
#include "../memory/context-memory.h"
#include "llama.h"
#include "run.h"

int32_t lctx_check_run(lctx_check_args * args, char * err, size_t err_size) {
    const auto check = [&] {
        const auto * memory =
            dynamic_cast<const lctx_context_memory *>(llama_get_memory((const llama_context *)args->context));
        const std::string why = memory ? memory->cache().why_unsound() : "";
        lctx_require(why.empty(), why);
    };
    return lctx_status_of(check, err, err_size);
}
