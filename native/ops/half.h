// Rounding to half precision in a direction: what the CPU and CUDA share, whose conversions differ.
#pragma once

#include "ggml.h"
#include "portable.h"

#include <cmath>
#include <cstdint>

constexpr float LCTX_MOST_HALF = 65504.0f;
constexpr uint16_t LCTX_HALF_NAN = 0x7e00;

// Replace what is larger than `most` by the largest: rows are stored so, since tensor cores read them as halves. NaN
// stays.
LCTX_HD inline float lctx_limited(float x, float most = LCTX_MOST_HALF) {
    return x > most ? most : x < -most ? -most : x;
}

// A number as a byte of a block with this scale, which is the largest magnitude over 127, rounded up.
LCTX_HD inline int8_t lctx_to_byte(float x, float scale) {
    const float level = scale > 0.0f ? rintf(x / scale) : 0.0f;
    return (int8_t)(level > 127.0f ? 127.0f : level > -127.0f ? level : -127.0f);
}

// The largest number of a stored row. A level times its rounded scale still fits f16. Rows of V may have larger numbers
// in the types that can hold them: CUDA scales these when it unpacks them (../cuda/blocks.h).
LCTX_HD inline float lctx_most_stored(ggml_type type, bool is_value) {
    constexpr float MOST_LEVEL = 65376.0f;  // (1 + 3/2048) times this rounds to LCTX_MOST_HALF
    constexpr float MOST_VALUE = 1e9f;      // 2^-15 of it is a half
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_BF16: return is_value ? MOST_VALUE : LCTX_MOST_HALF;
        case GGML_TYPE_F16:  return LCTX_MOST_HALF;
        default:             return MOST_LEVEL;
    }
}

// The half that is not below (up > 0) or not above (up < 0) a number, whose nearest half exceeds it by `error`; up = 0:
// that one.
LCTX_HD inline uint16_t lctx_half_beside(uint16_t nearest, float error, int up) {
    constexpr uint16_t SIGN = 0x8000, SMALLEST = 0x0001;
    if ((float)up * error >= 0.0f) {
        return nearest;
    }
    const bool is_zero = (nearest & ~SIGN) == 0, grows = (up > 0) == ((nearest & SIGN) == 0);
    if (is_zero) {
        return (uint16_t)(up > 0 ? SMALLEST : SIGN | SMALLEST);
    }
    return (uint16_t)(grows ? nearest + 1 : nearest - 1);
}
