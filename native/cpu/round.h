// Floats to signed bytes: symmetric, by the largest of them.
#pragma once

#include "vec.h"

typedef int8_t lctx_vb __attribute__((vector_size(LCTX_VL)));

// byte = round(value * inverse), value = byte * scale
struct lctx_scale {
    float scale, inverse;
};

// The scale of n values; NaN when one of them is not finite. n is a multiple of LCTX_VL, as below.
static inline lctx_scale lctx_scale_of(const float * values, int n) {
    lctx_vf top{}, zero{};
    for (int i = 0; i < n; i += LCTX_VL) {
        const lctx_vf v = lctx_vload(values + i);
        top = lctx_vmax(top, lctx_vmax(v, -v));
        zero += v * 0.0f;
    }
    const float most = lctx_vtop(top);
    return {most / 127.0f + lctx_vsum(zero), most > 0.0f ? 127.0f / most : 0.0f};
}

// Round n values, and return the sum of the bytes.
static inline float lctx_round(const float * values, int n, float inverse, int8_t * bytes) {
    lctx_vi total{};
    for (int i = 0; i < n; i += LCTX_VL) {
        const lctx_vf shifted =
            lctx_vload(values + i) * inverse + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
        lctx_vi rounded;
        memcpy(&rounded, &shifted, sizeof(rounded));
        rounded -= 0x4b400000;  // its bits
        const lctx_vb narrow = __builtin_convertvector(rounded, lctx_vb);
        memcpy(bytes + i, &narrow, sizeof(narrow));
        total += rounded;
    }
    return lctx_vsum(__builtin_convertvector(total, lctx_vf));
}
