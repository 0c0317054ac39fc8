// Rounding to half precision in a direction.
#pragma once

#include "../ops/half.h"
#include "ggml.h"

#include <algorithm>

// The half next to x that is not below (up > 0) or not above it (up < 0); up = 0: the nearest. What is too large becomes the largest.
static inline ggml_fp16_t lctx_to_half(float x, int up) {
    if (x != x) {
        return LCTX_HALF_NAN;
    }
    const float in_range = std::min(std::max(x, -LCTX_MOST_HALF), LCTX_MOST_HALF);
    const ggml_fp16_t nearest = ggml_fp32_to_fp16(in_range);
    return lctx_half_beside(nearest, ggml_fp16_to_fp32(nearest) - in_range, up);
}
