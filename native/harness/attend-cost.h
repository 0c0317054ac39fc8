// Counts what *attend* must read and multiply for one ubatch: the bytes and operations that a roofline divides by.
// Everything counts once, however often a kernel touches it.
#pragma once

#include "layer.h"

struct lctx_cost {
    double bytes;
    double flops;
};

// Asked when the segments are there.
lctx_cost lctx_attend_cost(const lctx_op_ubatch & u);
