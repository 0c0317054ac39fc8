// Reads what kernels count.
#include "../cpu/lookups.h"
#include "run.h"

int32_t lctx_lookups_run(lctx_lookups_args * args, char * err, size_t err_size) {
    const auto take = [&] { *args = {lctx_lookups::segments.exchange(0), lctx_lookups::items.exchange(0)}; };
    return lctx_status_of(take, err, err_size);
}
