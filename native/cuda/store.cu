// *store*: rotate the keys of the batch to their storage positions, transform, convert, write rows of K and V.
#include "../ops/cache.h"
#include "hadamard.h"
#include "kernels.h"
#include "rows.h"

namespace {

constexpr int WARPS = 4;
enum stored { KEY, VALUE, NEAR_KEY };

__device__ void put_word(char * at, uint32_t x) {
    *(uint16_t *)at = (uint16_t)x;
}

// Levels around `middle`; the first of the largest elements gets 0 (ggml: q4_0, q5_0).
__device__ uint32_t level_around(int middle, float x, float * d) {
    const float most = lctx_warp_max(fabsf(x));
    const uint32_t largest = lctx_ballot(fabsf(x) == most);
    const float top = lctx_shuffle(x, largest ? __ffs((int)largest) - 1 : 0);
    *d = lctx_div(top, (float)-middle);
    const float inverse = *d != 0.0f ? lctx_div(1.0f, *d) : 0.0f;
    return (uint32_t)lctx_min(2 * middle - 1, (int)lctx_add(lctx_mul(x, inverse), (float)middle + 0.5f));
}

// Levels 0 to `last` between the smallest and the largest element (ggml: q4_1, q5_1).
__device__ uint32_t level_between(int last, float x, float * d, float * least) {
    *least = -lctx_warp_max(-x);
    *d = lctx_div(lctx_warp_max(x) - *least, (float)last);
    const float inverse = *d != 0.0f ? lctx_div(1.0f, *d) : 0.0f;
    return (uint32_t)lctx_min(last, (int)lctx_add(lctx_mul(x - *least, inverse), 0.5f));
}

// A block of 32 elements, one per lane.
__device__ void put_q8_0(char * block, float x) {
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

// Elements [first, first + 32) of a row, one per lane; those of quantized rows are whole blocks.
__device__ void put_32(ggml_type type, char * row, int first, int dim, float x) {
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
        default:             return put_nibbles<true, true>(row + (size_t)first / 32 * lctx_cuda_q5_1::SIZE, x);
    }
}

// A row whose elements element(d) gives, transformed in blocks; 0: as it is.
template <typename F>
__device__ void put_row(const lctx_pool_args & pool, bool is_value, char * row, int dim, int block, F && element) {
    __shared__ float rows[WARPS][LCTX_MOST_HADAMARD];
    float * transformed = rows[lctx_warp()];  // each lane has every 32nd element to itself
    for (int first = 0; first < dim; first += LCTX_WARP) {
        const int d = first + lctx_lane();
        if (block != 0 && first % block == 0) {
            for (int i = lctx_lane(); i < block; i += LCTX_WARP) {
                transformed[i] = element(first + i);
            }
            lctx_transform_row(transformed, block, block);
        }
        const float x = block != 0 ? transformed[d % block] : d < dim ? element(d) : 0.0f;
        put_32(pool.type, row, first, dim, lctx_limited(x, lctx_most_stored(pool.type, is_value)));
    }
}

__device__ void put_key(const lctx_store_args & a, const float * k, int32_t head, int32_t angle, char * row) {
    const float * cs = a.angles + (size_t)angle * a.n_dims;
    const float * center = a.center ? a.center + (size_t)head * a.head_dim_k : nullptr;
    put_row(a.cache.k_pool, false, row, a.head_dim_k, a.params.hadamard.k, [&](int d) {
        const float x = lctx_rotated(k, d, cs, a.n_dims, a.params.rope_mode);
        return center ? x - center[d] : x;
    });
}

__device__ void put_value(const lctx_store_args & a, const float * v, char * row) {
    put_row(a.cache.v_pool, !lctx_values_in_keys(a.cache), row, a.head_dim_v, a.params.hadamard.v,
            [&](int d) { return v[d]; });
}

// A warp per token, KV head and what is stored.
__global__ void store(lctx_store_args a) {
    lctx_begin();
    lctx_let_next_begin();
    const int64_t job = (int64_t)blockIdx.x * WARPS + lctx_warp();
    if (job >= (int64_t)a.n_tokens * a.n_head_kv) {
        return;
    }
    const int token = (int)(job / a.n_head_kv), head = (int)(job % a.n_head_kv);
    const lctx_row at = a.rows[token];
    const lctx_cells cells(a.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (a.params.staged_chunk > 0 && !lctx_is_staged(a.cache, cell, head, at.seq)) {
        return;
    }
    const float * k = (const float *)(a.k + head * a.k_head_stride + token * a.k_token_stride);
    if (blockIdx.y == NEAR_KEY) {
        return put_key(a, k, head, at.near_angle, lctx_near_row(a.cache, at.row, head, at.seq));
    }
    if (blockIdx.y == VALUE) {
        const float * v = (const float *)(a.v + head * a.v_head_stride + token * a.v_token_stride);
        return put_value(a, v, lctx_value_row(a.cache, cell, head, at.seq));
    }
    put_key(a, k, head, at.angle, lctx_key_row(a.cache, cell, head, at.seq));
    if (!cells.all() && lctx_lane() == 0) {
        cells.held.rows()[cell] = at.row;
        cells.held.scores()[cell] = cells.held.undo()[cell] = lctx_held::first_score(a.params.score);
    }
}

}  // namespace

void lctx_cuda_store(const lctx_cuda_queue & queue, const lctx_store_args & args) {
    const int64_t n = (int64_t)args.n_tokens * args.n_head_kv;
    const unsigned n_stored = args.cache.near.data ? 3 : 2;
    lctx_launch(store, dim3((unsigned)lctx_div_up(n, WARPS), n_stored), WARPS * LCTX_WARP, 0, queue.stream, args);
}
