// Numbers of half precision: to floats, and from them, rounded in a direction.
#pragma once

#include "../ops/half.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "simd-mappings.h"

#include <algorithm>
#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float lctx_from_half(ggml_fp16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);  // ggml looks into a table
#else
    return GGML_CPU_FP16_TO_FP32(h);
#endif
}

// The half next to x that is not below (up > 0) or not above it (up < 0); up = 0: the nearest. What is too large
// becomes the largest.
static inline ggml_fp16_t lctx_to_half(float x, int up) {
    if (x != x) {
        return LCTX_HALF_NAN;
    }
    const float in_range = std::min(std::max(x, -LCTX_MOST_HALF), LCTX_MOST_HALF);
    const ggml_fp16_t nearest = ggml_fp32_to_fp16(in_range);
    return lctx_half_beside(nearest, ggml_fp16_to_fp32(nearest) - in_range, up);
}
