// Computes what stands for a chunk channel by channel, from its keys as they are stored: one summary per KV head.
#pragma once

#include "completed.h"

#include <cmath>

// Write 32 numbers as a block of q8_0, by a warp: the scale and a byte of every lane.
static __device__ inline void lctx_put_block(float x, char * block) {
    const bool is_number = lctx_ballot(x != x) == 0;
    const uint16_t scale = lctx_to_half(is_number ? lctx_warp_max(fabsf(x)) / 127.0f : NAN, 1);
    ((int8_t *)block)[2 + lctx_lane()] = lctx_to_byte(x, lctx_from_half(scale));
    if (lctx_lane() == 0) {
        *(uint16_t *)block = scale;
    }
}

// One chunk and KV head, by a block of threads: the vectors of the summary one after the other, and then all of it is
// written.
struct lctx_channels {
    const lctx_summarize_args & a;
    const lctx_completed & c;
    lctx_sharing threads;
    float * partials;  // 8 floats per thread
    float * summary;   // [LCTX_MOST_VECTORS*head_dim]; while moments are computed, it begins with the mean of all keys
    int * picked;      // the key farthest from that

    static size_t shared(const lctx_summarize_args & a, int n_thread) {
        return (8 * n_thread + LCTX_MOST_VECTORS * a.head_dim_k + 1) * sizeof(float);
    }
    __device__ lctx_channels(const lctx_summarize_args & a, const lctx_completed & c)
        : a(a), c(c), threads(a.head_dim_k), partials((float *)lctx_shared()) {
        summary = partials + 8 * blockDim.x;
        picked = (int *)(summary + LCTX_MOST_VECTORS * threads.dim);
    }

    // f(element, value) for the keys but number `without` and channels of this thread, the element of 8.
    template <typename F> __device__ void each_key(F && f, int without = -1) const {
        for (int row = threads.row; threads.works() && row < a.params.chunk_size; row += threads.n_row) {
            if (row == without) {
                continue;
            }
            float x[8];
            lctx_key_8(a, c, row, threads.d, x);
            for (int i = 0; i < 8; i++) {
                f(i, x[i]);
            }
        }
    }

    __device__ void compute() const {
        switch (a.params.representation) {
            case LCTX_REPRESENT_MINMAX:    return minmax();
            case LCTX_REPRESENT_OUTLIER:   return outlier();
            case LCTX_REPRESENT_ATTENTION: // refused by dispatch.cu
            case LCTX_REPRESENT_KEYS1:
            case LCTX_REPRESENT_KEYS2:     return;
        }
    }
    // Write the summary, and be done with it.
    __device__ void put() const {
        char * dst = lctx_summary_row(a, c, c.head_kv);
        const lctx_summary_kind kind = lctx_summary_kind_of(a.params.representation);
        const int n = kind.n_vector * threads.dim, n_warp = (int)blockDim.x / LCTX_WARP;
        if (a.summary_type == GGML_TYPE_Q8_0) {
            constexpr int SIZE = lctx_cuda_q8_0::SIZE;
            for (int block = lctx_warp(); block < n / LCTX_WARP; block += n_warp) {
                lctx_put_block(summary[block * LCTX_WARP + lctx_lane()], dst + block * SIZE);
            }
        } else {
            for (int d = (int)threadIdx.x; d < n; d += (int)blockDim.x) {
                ((uint16_t *)dst)[d] = lctx_to_half(summary[d], !kind.has_bounds ? 0 : d < threads.dim ? 1 : -1);
            }
        }
        __syncthreads();
    }
    __device__ void minmax() const {
        float most[8], least[8];
        for (int i = 0; i < 8; i++) {
            most[i] = -INFINITY, least[i] = INFINITY;
        }
        each_key([&](int i, float x) { most[i] = fmaxf(most[i], x), least[i] = fminf(least[i], x); });
        threads.reduce(
            most, partials, [](float x, float y) { return fmaxf(x, y); }, [&](int d, float x) { summary[d] = x; });
        threads.reduce(
            least, partials, [](float x, float y) { return fminf(x, y); },
            [&](int d, float x) { summary[threads.dim + d] = x; });
    }
    __device__ static float add(float x, float y) { return x + y; }
    __device__ __forceinline__ void mean() const {
        float sum[8] = {};
        each_key([&](int i, float x) { sum[i] += x; });
        threads.reduce(sum, partials, add, [&](int d, float x) { summary[d] = x / (float)a.params.chunk_size; });
    }
    // The first of the keys that are farthest from the mean of all, after the moments of the others.
    __device__ __forceinline__ void outlier() const {
        mean();
        find_outlier();
        for (int d = (int)threadIdx.x * 8; d < threads.dim; d += (int)blockDim.x * 8) {
            float x[8];
            lctx_key_8(a, c, *picked, d, x);
            for (int i = 0; i < 8; i++) {
                summary[d + i] += (summary[d + i] - x[i]) / (float)(a.params.chunk_size - 1);
                summary[2 * threads.dim + d + i] = x[i];
            }
        }
        __syncthreads();
        add_variance(*picked);
    }

  private:
    // scale^2/2 times the variance of all keys but number `without`; a second pass: the mean of some channels is far
    // larger than what they differ by.
    __device__ __forceinline__ void add_variance(int without) const {
        const float factor = 0.5f * a.params.scale * a.params.scale / (float)(a.params.chunk_size - 1);
        float squares[8] = {};
        each_key(
            [&](int i, float x) {
                const float difference = x - summary[threads.d + i];
                squares[i] += difference * difference;
            },
            without);
        threads.reduce(squares, partials, add, [&](int d, float x) { summary[threads.dim + d] = x * factor; });
    }
    // *picked: thread 0 compares n_row distances at a time, each the sum of dim / 8 partials.
    __device__ __forceinline__ void find_outlier() const {
        const int n_octet = threads.dim / 8;
        float most = -1.0f;
        for (int row0 = 0; row0 < a.params.chunk_size; row0 += threads.n_row) {
            const bool works = threads.works() && row0 + threads.row < a.params.chunk_size;
            float x[8] = {}, distance = 0.0f;
            if (works) {
                lctx_key_8(a, c, row0 + threads.row, threads.d, x);
            }
            for (int i = 0; i < 8; i++) {
                const float difference = x[i] - summary[threads.d + i];
                distance += difference * difference;
            }
            partials[threadIdx.x] = distance;  // that of a thread without work is not read
            __syncthreads();
            for (int row = 0; threadIdx.x == 0 && row < lctx_min(threads.n_row, a.params.chunk_size - row0); row++) {
                float sum = 0.0f;
                for (int i = 0; i < n_octet; i++) {
                    sum += partials[row * n_octet + i];
                }
                if (sum > most || row0 + row == 0) {
                    most = sum, *picked = row0 + row;
                }
            }
            __syncthreads();
        }
    }
};
