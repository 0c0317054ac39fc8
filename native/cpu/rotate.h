// Rotation of one row by one row of the angle table.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <cstring>

// dst[0..dim) = src rotated; cs holds (cos, sin) of the n_dims/2 pairs; dimensions from n_dims on are copied.
// NORM pairs (2i, 2i+1); NEOX pairs (i, i + n_dims/2). dst and src must not overlap.
static inline void lctx_rotate_row(const float * src, float * dst, int32_t dim, const float * cs, int32_t n_dims,
                                   int32_t mode) {
    const int32_t half = n_dims / 2;
    if (mode == GGML_ROPE_TYPE_NEOX) {
        for (int32_t i = 0; i < half; i++) {
            dst[i] = src[i] * cs[2 * i] - src[i + half] * cs[2 * i + 1];
            dst[i + half] = src[i] * cs[2 * i + 1] + src[i + half] * cs[2 * i];
        }
    } else {
        for (int32_t i = 0; i < n_dims; i += 2) {
            dst[i] = src[i] * cs[i] - src[i + 1] * cs[i + 1];
            dst[i + 1] = src[i] * cs[i + 1] + src[i + 1] * cs[i];
        }
    }
    memcpy(dst + n_dims, src + n_dims, (size_t)(dim - n_dims) * sizeof(float));
}
