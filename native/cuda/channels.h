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
    float * first;  // [head_dim] what is known of every channel

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
    // write(channel, largest, smallest value)
    template <typename W> __device__ void extremes(W && write) const {
        float most[8], least[8];
        for (int i = 0; i < 8; i++) {
            most[i] = -INFINITY, least[i] = INFINITY;
        }
        each_key([&](int i, float x) { most[i] = fmaxf(most[i], x), least[i] = fminf(least[i], x); });
        share.reduce(most, parts, [](float x, float y) { return fmaxf(x, y); }, [&](int d, float x) { first[d] = x; });
        share.reduce(least, parts, [](float x, float y) { return fminf(x, y); }, [&](int d, float x) { write(d, first[d], x); });
    }
    __device__ void put(int d, float mean, float variance) const {
        dst[d] = lctx_to_half(mean, 0);
        dst[share.dim + d] = lctx_to_half(0.5f * a.params.scale * a.params.scale * variance, 0);
    }

    // Bounds stay bounds: maxima are rounded up and minima down.
    __device__ void minmax() const {
        extremes([&](int d, float most, float least) {
            dst[d] = lctx_to_half(most, 1);
            dst[share.dim + d] = lctx_to_half(least, -1);
        });
    }
    // A uniform distribution over what the extremes allow.
    __device__ void uniform() const {
        extremes([&](int d, float most, float least) { put(d, 0.5f * (most + least), (most - least) * (most - least) / 12.0f); });
    }
    // Two passes: the mean of some channels is far larger than what they differ by.
    __device__ void moments() const {
        const float size = (float)a.params.chunk_size;
        const auto add = [](float x, float y) { return x + y; };
        float sum[8] = {}, squares[8] = {};
        each_key([&](int i, float x) { sum[i] += x; });
        share.reduce(sum, parts, add, [&](int d, float x) { first[d] = x / size; });
        each_key([&](int i, float x) {
            const float difference = x - first[share.d + i];
            squares[i] += difference * difference;
        });
        share.reduce(squares, parts, add, [&](int d, float x) { put(d, first[d], x / size); });
    }
};
