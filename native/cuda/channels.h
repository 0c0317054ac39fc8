// What stands for a chunk channel by channel, from its keys at their own positions: one summary per KV head.
#pragma once

#include "completed.h"

#include <cmath>

// One chunk and KV head, by a block of threads: a row of 2*head_dim, the second half of what belongs to the first.
struct lctx_channels {
    const lctx_summarize_args & a;
    const lctx_completed & c;
    lctx_sharing share;
    uint16_t * dst;
    float * parts;  // 8 floats per thread
    float * first;  // [head_dim] the mean of every channel

    static size_t shared(const lctx_summarize_args & a, int n_thread) { return (8 * n_thread + a.head_dim_k) * sizeof(float); }
    __device__ lctx_channels(const lctx_summarize_args & a, const lctx_completed & c)
        : a(a), c(c), share(a.head_dim_k), dst(lctx_summary_row(a, c, c.head_kv)), parts((float *)lctx_shared()) {
        first = parts + 8 * blockDim.x;
    }

    // f(element, value) for the keys and channels of this thread, the element of 8.
    template <typename F> __device__ void each_key(F && f) const {
        for (int row = share.row; share.works() && row < a.params.chunk_size; row += share.n_row) {
            float x[8];
            lctx_key_8(a, c, row, share.d, x);
            for (int i = 0; i < 8; i++) {
                f(i, x[i]);
            }
        }
    }

    // Bounds stay bounds: maxima are rounded up and minima down.
    __device__ void minmax() const {
        float most[8], least[8];
        for (int i = 0; i < 8; i++) {
            most[i] = -INFINITY, least[i] = INFINITY;
        }
        each_key([&](int i, float x) { most[i] = fmaxf(most[i], x), least[i] = fminf(least[i], x); });
        share.reduce(most, parts, [](float x, float y) { return fmaxf(x, y); }, [&](int d, float x) { dst[d] = lctx_to_half(x, 1); });
        const auto put_least = [&](int d, float x) { dst[share.dim + d] = lctx_to_half(x, -1); };
        share.reduce(least, parts, [](float x, float y) { return fminf(x, y); }, put_least);
    }
    // Two passes: the mean of some channels is far larger than what they differ by.
    __device__ void moments() const {
        const float size = (float)a.params.chunk_size, factor = 0.5f * a.params.scale * a.params.scale / size;
        const auto add = [](float x, float y) { return x + y; };
        float sum[8] = {}, squares[8] = {};
        each_key([&](int i, float x) { sum[i] += x; });
        share.reduce(sum, parts, add, [&](int d, float x) { first[d] = x / size; });
        each_key([&](int i, float x) {
            const float difference = x - first[share.d + i];
            squares[i] += difference * difference;
        });
        share.reduce(squares, parts, add, [&](int d, float x) {
            dst[d] = lctx_to_half(first[d], 0);
            dst[share.dim + d] = lctx_to_half(x * factor, 0);
        });
    }
};
