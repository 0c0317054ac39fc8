// Blocks of IQ4_NL: 32 elements, each a scale times one of 16 values that lie closer together around 0. (ggml:
// quants.c)
#pragma once

#include "half.h"
#include "portable.h"

LCTX_HD constexpr int lctx_iq4_value(int level) {
    constexpr int VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return VALUES[level];
}

// Four values from a level on as bytes, each above this.
constexpr int LCTX_IQ4_MIDDLE = 128;
LCTX_HD constexpr uint32_t lctx_iq4_bytes(int first) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++) {
        bytes |= (uint32_t)(lctx_iq4_value(first + i) + LCTX_IQ4_MIDDLE) << 8 * i;
    }
    return bytes;
}

// The level whose value is nearest; of two the higher one.
LCTX_HD inline int lctx_iq4_level(float x) {
    int level = 0;
    for (int i = 1; i < 16; i++) {
        level += x >= 0.5f * (float)(lctx_iq4_value(i - 1) + lctx_iq4_value(i));
    }
    return level;
}

// The scale of a block with the smallest error, from the sums of w x value and of w value^2, where w are the squares of
// the elements. NaN stays, and a value times the scale still fits f16.
LCTX_HD inline float lctx_iq4_scale(float products, float squares) {
    constexpr float MOST = 515.5f;  // 127 times this is below LCTX_MOST_HALF
    return squares == 0.0f ? 0.0f : lctx_limited(products / squares, MOST);
}
