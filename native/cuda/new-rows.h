// Writes the rows of new tokens: rotates keys to their storage positions, transforms, converts, and where keys are
// compared writes them into the index too. A warp takes a row of a KV head.
#pragma once

#include "../ops/cache.h"
#include "index.h"
#include "kernels.h"
#include "rows.h"

namespace {

__device__ inline void put_word(char * at, uint32_t x) {
    *(uint16_t *)at = (uint16_t)x;
}

// The first of the largest elements.
__device__ inline float top_of(float x) {
    const uint32_t largest = lctx_ballot(fabsf(x) == lctx_warp_max(fabsf(x)));
    return lctx_shuffle(x, largest ? __ffs((int)largest) - 1 : 0);
}

// Levels around `middle`; the first of the largest elements gets 0 (ggml: q4_0, q5_0).
__device__ inline uint32_t level_around(int middle, float x, float * d) {
    *d = lctx_div(top_of(x), (float)-middle);
    const float inverse = *d != 0.0f ? lctx_div(1.0f, *d) : 0.0f;
    return (uint32_t)lctx_min(2 * middle - 1, (int)lctx_add(lctx_mul(x, inverse), (float)middle + 0.5f));
}

// Levels 0 to `last` between the smallest and the largest element (ggml: q4_1, q5_1).
__device__ inline uint32_t level_between(int last, float x, float * d, float * least) {
    *least = -lctx_warp_max(-x);
    *d = lctx_div(lctx_warp_max(x) - *least, (float)last);
    const float inverse = *d != 0.0f ? lctx_div(1.0f, *d) : 0.0f;
    return (uint32_t)lctx_min(last, (int)lctx_add(lctx_mul(x - *least, inverse), 0.5f));
}

// A block of 32 elements, one per lane.
__device__ inline void put_q8_0(char * block, float x) {
    const float d = lctx_div(lctx_warp_max(fabsf(x)), 127.0f);
    const float inverse = d != 0.0f ? lctx_div(1.0f, d) : 0.0f;
    block[2 + lctx_lane()] = (char)(int8_t)roundf(lctx_mul(x, inverse));
    if (lctx_lane() == 0) {
        put_word(block, lctx_to_half(d));
    }
}

template <bool HIGH, bool MIN> __device__ void put_nibbles(char * block, float x) {
    using layout = lctx_cuda_nibbles<HIGH, MIN>;
    float d, least = 0.0f;
    const uint32_t level = MIN ? level_between(HIGH ? 31 : 15, x, &d, &least) : level_around(HIGH ? 16 : 8, x, &d);
    const uint32_t high = lctx_ballot(level & 16), other = lctx_shuffle_xor(level, 16);
    if (lctx_lane() < 16) {
        block[layout::AT_LOW + lctx_lane()] = (char)((level & 15) | (other & 15) << 4);
    }
    if (lctx_lane() == 0) {
        put_word(block, lctx_to_half(d));
        if (MIN) {
            put_word(block + 2, lctx_to_half(least));
        }
        if (HIGH) {
            put_word(block + layout::AT_HIGH, high);
            put_word(block + layout::AT_HIGH + 2, high >> 16);
        }
    }
}

__device__ inline void put_iq4_nl(char * block, float x) {
    const float rough = lctx_div(top_of(x), (float)lctx_iq4_value(0));
    const int level = lctx_iq4_level(lctx_mul(x, rough != 0.0f ? lctx_div(1.0f, rough) : 0.0f));
    const float value = (float)lctx_iq4_value(level), weight = lctx_mul(x, x);
    const float d = lctx_iq4_scale(lctx_warp_sum(weight * value * x), lctx_warp_sum(weight * value * value));
    const int other = lctx_shuffle_xor(level, 16);
    if (lctx_lane() < 16) {
        block[lctx_cuda_iq4_nl::AT_LOW + lctx_lane()] = (char)(level | other << 4);
    }
    if (lctx_lane() == 0) {
        put_word(block, lctx_to_half(d));
    }
}

// Elements [first, first + 32) of a row, one per lane; those of quantized rows are whole blocks.
__device__ inline void put_32(ggml_type type, char * row, int first, int dim, float x) {
    const int d = first + lctx_lane();
    const bool is_inside = d < dim;
    switch (type) {
        case GGML_TYPE_F32:
            if (is_inside) {
                ((float *)row)[d] = x;
            }
            return;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            if (is_inside) {
                ((uint16_t *)row)[d] = type == GGML_TYPE_F16 ? lctx_to_half(x) : lctx_to_bf16(x);
            }
            return;
        case GGML_TYPE_Q8_0: return put_q8_0(row + (size_t)first / 32 * lctx_cuda_q8_0::SIZE, x);
        case GGML_TYPE_Q4_0: return put_nibbles<false, false>(row + (size_t)first / 32 * lctx_cuda_q4_0::SIZE, x);
        case GGML_TYPE_Q4_1: return put_nibbles<false, true>(row + (size_t)first / 32 * lctx_cuda_q4_1::SIZE, x);
        case GGML_TYPE_Q5_0: return put_nibbles<true, false>(row + (size_t)first / 32 * lctx_cuda_q5_0::SIZE, x);
        case GGML_TYPE_Q5_1: return put_nibbles<true, true>(row + (size_t)first / 32 * lctx_cuda_q5_1::SIZE, x);
        default:             return put_iq4_nl(row + (size_t)first / 32 * lctx_cuda_iq4_nl::SIZE, x);
    }
}

// A row and where it goes.
struct new_row {
    lctx_pool_args pool;
    bool is_value;  // whose largest number may be larger
    char * to;
    const float * from;
    int32_t dim, block;    // channels; of those that are transformed together, or 0
    const float * cs;      // to rotate by; nullptr: it is not
    const float * center;  // or nullptr
    int32_t n_dims, rope_mode;

    __device__ float element(int d) const {
        const float x = cs ? lctx_rotated(from, d, cs, n_dims, rope_mode) : from[d];
        return center ? x - center[d] : x;
    }
    // Channels as they are stored but for their type, each by the lane that reads it. 32 N at least are transformed.
    template <int N> __device__ void prepare(float * channels) const {
        const float most = lctx_most_stored(pool.type, is_value);
        for (int first = 0; first < dim; first += N * LCTX_WARP) {
            float x[N];
            lctx_unrolled<N>([&](int i) {
                const int d = first + i * LCTX_WARP + lctx_lane();
                x[i] = d < dim ? element(d) : 0.0f;
            });
            lctx_transform(x, block);
            lctx_unrolled<N>([&](int i) {
                const int d = first + i * LCTX_WARP + lctx_lane();
                if (d < dim) {
                    channels[d] = lctx_limited(x[i], most);
                }
            });
        }
    }
    // channels: [dim] of this warp, in shared memory.
    __device__ void put(float * channels) const {
        constexpr int SMALL = 4, LARGE = LCTX_MOST_HADAMARD / LCTX_WARP;
        block > SMALL * LCTX_WARP ? prepare<LARGE>(channels) : prepare<SMALL>(channels);
#ifdef __CUDACC__
#pragma unroll 1
#endif
        for (int first = 0; first < dim; first += LCTX_WARP) {
            const int d = first + lctx_lane();
            put_32(pool.type, to, first, dim, d < dim ? channels[d] : 0.0f);
        }
    }
};

enum stored { KEY, VALUE, NEAR_KEY };

// What of a token and KV head goes to a cell.
__device__ inline new_row row_of(const lctx_store_args & a, int what, const lctx_row & at, int token, int head,
                                 int32_t cell) {
    if (what == VALUE) {
        return {a.cache.v_pool,
                !lctx_values_in_keys(a.cache),
                lctx_value_row(a.cache, cell, head, at.seq),
                (const float *)(a.v + head * a.v_head_stride + token * a.v_token_stride),
                a.head_dim_v,
                a.params.hadamard.v,
                nullptr,
                nullptr,
                0,
                0};
    }
    const bool is_near = what == NEAR_KEY;
    return {a.cache.k_pool,
            false,
            is_near ? lctx_near_row(a.cache, at.row, head, at.seq) : lctx_key_row(a.cache, cell, head, at.seq),
            (const float *)(a.k + head * a.k_head_stride + token * a.k_token_stride),
            a.head_dim_k,
            a.params.hadamard.k,
            a.angles + (size_t)(is_near ? at.near_angle : at.angle) * a.n_dims,
            a.center ? a.center + (size_t)head * a.head_dim_k : nullptr,
            a.n_dims,
            a.params.rope_mode};
}

// Write what a token and KV head store. BITS of the index; 0: there is none. channels: [r.n_channel()] of this warp, in
// shared memory.
template <int BITS> __device__ void put_new(const lctx_new_rows & r, int what, int token, int head, float * channels) {
    const lctx_store_args & a = r.store;
    const lctx_row at = a.rows[token];
    const lctx_cells cells(a.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (a.params.staged_chunk > 0 && !lctx_is_staged(a.cache, cell, head, at.seq)) {
        return;
    }
    row_of(a, what, at, token, head, cell).put(channels);
    if (what != KEY) {
        return;
    }
    if (!cells.all() && lctx_lane() == 0) {
        cells.held.rows()[cell] = at.row;
        cells.held.scores()[cell] = cells.held.undo()[cell] = lctx_held::first_score(a.params.score);
    }
    if constexpr (BITS > 0) {
        lctx_sync_warp();  // all of the key is stored, and no channel is still read
        index_key<BITS>(a.cache, r.index, a.params.hadamard.k, cell, head, at.seq, channels);
    }
}

}  // namespace
