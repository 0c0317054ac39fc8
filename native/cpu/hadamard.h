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

// N vectors of a row, transformed together.
template <int N> static inline void lctx_transform_vectors(float * x, float scale) {
    lctx_vf v[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        v[i] = lctx_vhadamard(scale * lctx_vload(x + i * LCTX_VL));
    }
#pragma GCC unroll 3
    for (int step = 1; step < N; step *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            if (!(i & step)) {
                const lctx_vf first = v[i], second = v[i + step];
                v[i] = first + second;
                v[i + step] = first - second;
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        lctx_vstore(x + i * LCTX_VL, v[i]);
    }
}

// Transform a row in place, block by block; 0 leaves it as it is. block: a power of two, 32 at least, that divides dim.
static inline void lctx_transform(float * row, int32_t dim, int32_t block) {
    constexpr int32_t MOST = 8;  // vectors in registers
    if (block == 0) {
        return;
    }
    const int32_t n = block / LCTX_VL < MOST ? block / LCTX_VL : MOST;
    const float scale = 1.0f / sqrtf((float)block);
    for (int32_t d = 0; d < dim; d += n * LCTX_VL) {
        switch (n) {
            case 2:  lctx_transform_vectors<2>(row + d, scale); break;
            case 4:  lctx_transform_vectors<4>(row + d, scale); break;
            default: lctx_transform_vectors<MOST>(row + d, scale);
        }
    }
    for (int32_t step = MOST * LCTX_VL; step < block; step *= 2) {
        for (int32_t first = 0; first < dim; first += 2 * step) {
            for (int32_t d = first; d < first + step; d += LCTX_VL) {
                const lctx_vf x = lctx_vload(row + d), y = lctx_vload(row + d + step);
                lctx_vstore(row + d, x + y);
                lctx_vstore(row + d + step, x - y);
            }
        }
    }
}
