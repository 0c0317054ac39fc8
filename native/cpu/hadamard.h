// The Hadamard transform of rows (../ops/hadamard.h).
#pragma once

#include "vec.h"

#include <cmath>

// -1 in the lanes with bit W, 1 in the others.
template <int W, int... LANE> static inline lctx_vf lctx_vsigns(std::integer_sequence<int, LANE...>) {
    return lctx_vf{(LANE & W ? -1.0f : 1.0f)...};
}

// The steps between the lanes of a vector.
template <int W = LCTX_VL / 2> static inline lctx_vf lctx_vhadamard(lctx_vf v) {
    v = lctx_vswap<W>(v, lctx_lanes{}) + lctx_vsigns<W>(lctx_lanes{}) * v;
    if constexpr (W > 1) {
        return lctx_vhadamard<W / 2>(v);
    } else {
        return v;
    }
}

// Transform a row in place, block by block; 0 leaves it as it is. block: a power of two, LCTX_VL at least, that divides dim.
static inline void lctx_transform(float * row, int32_t dim, int32_t block) {
    if (block == 0) {
        return;
    }
    const lctx_vf scale = lctx_vset(1.0f / sqrtf((float)block));
    for (int32_t d = 0; d < dim; d += LCTX_VL) {
        lctx_vstore(row + d, scale * lctx_vhadamard(lctx_vload(row + d)));
    }
    for (int32_t step = LCTX_VL; step < block; step *= 2) {
        for (int32_t first = 0; first < dim; first += 2 * step) {
            for (int32_t d = first; d < first + step; d += LCTX_VL) {
                const lctx_vf x = lctx_vload(row + d), y = lctx_vload(row + d + step);
                lctx_vstore(row + d, x + y);
                lctx_vstore(row + d + step, x - y);
            }
        }
    }
}
