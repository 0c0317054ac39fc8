// Rounding to half precision in a direction, as on the CPU.
#pragma once

#include "device.h"

// The f16 next to x that is not below (up > 0) or not above it (up < 0); up = 0: the nearest. What is too large becomes the largest.
static __device__ inline uint16_t lctx_to_half(float x, int up) {
    constexpr float MOST = 65504.0f;
    constexpr uint16_t SIGN = 0x8000, NOT_A_NUMBER = 0x7e00, SMALLEST = 0x0001;
    if (x != x) {
        return NOT_A_NUMBER;
    }
    const float in_range = fminf(fmaxf(x, -MOST), MOST);
    const uint16_t nearest = lctx_to_half(in_range);
    const float error = lctx_from_half(nearest) - in_range;
    if ((float)up * error >= 0.0f) {
        return nearest;
    }
    const bool is_zero = (nearest & ~SIGN) == 0, grows = (up > 0) == ((nearest & SIGN) == 0);
    if (is_zero) {
        return (uint16_t)(up > 0 ? SMALLEST : SIGN | SMALLEST);
    }
    return (uint16_t)(grows ? nearest + 1 : nearest - 1);
}
