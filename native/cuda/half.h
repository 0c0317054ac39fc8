// Rounding to half precision in a direction, as on the CPU.
#pragma once

#include "../ops/half.h"
#include "device.h"

// The f16 next to x that is not below (up > 0) or not above it (up < 0); up = 0: the nearest. What is too large becomes
// the largest.
static __device__ inline uint16_t lctx_to_half(float x, int up) {
    if (x != x) {
        return LCTX_HALF_NAN;
    }
    const float in_range = fminf(fmaxf(x, -LCTX_MOST_HALF), LCTX_MOST_HALF);
    const uint16_t nearest = lctx_to_half(in_range);
    return lctx_half_beside(nearest, lctx_from_half(nearest) - in_range, up);
}
