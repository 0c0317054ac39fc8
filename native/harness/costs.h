// What each sub-op of one ubatch must move and multiply: the bytes and operations that a roofline divides by. Everything counts once,
// however often a kernel touches it.
#pragma once

#include "layer.h"

struct lctx_cost {
    double bytes;
    double flops;
};

// Each is asked when its inputs are there and it has not run yet.
lctx_cost lctx_store_cost(const lctx_op_ubatch & u);
lctx_cost lctx_summarize_cost(const lctx_op_ubatch & u);
lctx_cost lctx_select_cost(const lctx_op_ubatch & u);
lctx_cost lctx_attend_cost(const lctx_op_ubatch & u);
lctx_cost lctx_vote_cost(const lctx_op_ubatch & u);

// before: the rows that KV head 0, 1, ... held before; asked when the eviction is done.
lctx_cost lctx_evict_cost(const lctx_op_ubatch & u, const std::vector<std::vector<int32_t>> & before);
