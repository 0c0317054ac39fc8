// Rounding to half precision in a direction.
#pragma once

#include "ggml.h"

#include <algorithm>

// The half next to x that is not below (up > 0) or not above it (up < 0); up = 0: the nearest. What is too large becomes the largest.
static inline ggml_fp16_t lctx_to_half(float x, int up) {
    constexpr float MOST = 65504.0f;
    constexpr ggml_fp16_t SIGN = 0x8000, NOT_A_NUMBER = 0x7e00, SMALLEST = 0x0001;
    if (x != x) {
        return NOT_A_NUMBER;
    }
    const float in_range = std::min(std::max(x, -MOST), MOST);
    const ggml_fp16_t nearest = ggml_fp32_to_fp16(in_range);
    const float error = ggml_fp16_to_fp32(nearest) - in_range;
    if ((float)up * error >= 0.0f) {
        return nearest;
    }
    const bool is_zero = (nearest & ~SIGN) == 0, grows = (up > 0) == ((nearest & SIGN) == 0);
    if (is_zero) {
        return (ggml_fp16_t)(up > 0 ? SMALLEST : SIGN | SMALLEST);
    }
    return (ggml_fp16_t)(grows ? nearest + 1 : nearest - 1);
}
