// *index*: the keys of some rows once more, in few bits a channel (../ops/index.h). A warp takes a row and KV head.
#include "index.h"

#include "hadamard.h"
#include "half.h"
#include "kernels.h"

namespace {

constexpr int WARPS = 4;

// The stored key as the index wants it, in shared memory.
__device__ void load_key(const lctx_index_args & a, const char * row, float * key) {
    const int dim = a.index.head_dim;
    for (int d = lctx_lane() * 8; d < dim; d += LCTX_WARP * 8) {
        float x[8];
        lctx_load_8(a.cache.k_pool.type, row, d, x);
        lctx_store_8(key + d, x);
    }
    lctx_sync_warp();
    if (a.hadamard_k != a.index.hadamard()) {
        lctx_transform_row(key, dim, a.hadamard_k);
        lctx_transform_row(key, dim, a.index.hadamard());
        lctx_sync_warp();
    }
}

// Levels of a channel lie on both sides of this size.
__device__ int level_of(const lctx_index_shape & shape, float x, float border) {
    const int size = shape.bits == 1 ? 1 : fabsf(x) > border ? 10 : 3;
    return x < 0.0f ? -size : size;
}

// The scale of least error for the levels that a border gives; all lanes get it.
__device__ float scale_of(const lctx_index_shape & shape, const float * key, float border) {
    float product = 0.0f, square = 0.0f;
    for (int d = lctx_lane(); d < shape.head_dim; d += LCTX_WARP) {
        const auto level = (float)level_of(shape, key[d], border);
        product += key[d] * level;
        square += level * level;
    }
    return lctx_div(lctx_warp_sum(product), lctx_warp_sum(square));
}

// Border and scale of a key: as the CPU's lctx_index_levels.
__device__ float levels_of(const lctx_index_shape & shape, const float * key, float & scale) {
    constexpr float BORDER = 0.9816f, MIDDLE = 6.5f;
    float square = 0.0f;
    for (int d = lctx_lane(); d < shape.head_dim; d += LCTX_WARP) {
        square += key[d] * key[d];
    }
    float border = BORDER * sqrtf(lctx_div(lctx_warp_sum(square), (float)shape.head_dim));
    scale = scale_of(shape, key, border);
    if (shape.bits > 1) {
        border = MIDDLE * scale;
        scale = scale_of(shape, key, border);
    }
    return border;
}

// Four bytes of codes: of channels 4 * word and on, and of those n_code after them.
__device__ uint32_t codes_of(const lctx_index_shape & shape, const float * key, float border, int word) {
    uint32_t codes = 0;
    for (int i = 0; i < shape.WORD; i++) {
        int shift = 8 * i;
        for (int d = word * shape.WORD + i; d < shape.head_dim; d += shape.n_code(), shift += shape.bits) {
            const int level = level_of(shape, key[d], border);
            const int code = shape.bits == 1 ? level > 0 : (level > -10) + (level > 0) + (level > 3);
            codes |= (uint32_t)code << shift;
        }
    }
    return codes;
}

__device__ void put(const lctx_index_shape & shape, const float * key, int lane, char * group) {
    float scale;
    const float border = levels_of(shape, key, scale);
    if (lctx_lane() == 0) {
        *(uint16_t *)(group + shape.scale_at(lane)) = lctx_to_half(scale, 0);
    }
    for (int word = lctx_lane(); word < shape.n_code() / shape.WORD; word += LCTX_WARP) {
        *(uint32_t *)(group + shape.word_at(word, lane)) = codes_of(shape, key, border, word);
    }
}

__global__ void index_rows(lctx_index_args a) {
    const int64_t job = (int64_t)blockIdx.x * WARPS + lctx_warp();
    if (job >= (int64_t)a.n_rows * a.n_head_kv) {
        return;
    }
    const lctx_row at = a.rows[job / a.n_head_kv];
    const auto head = (int)(job % a.n_head_kv);
    const lctx_cells cells(a.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (!cells.all() && cells.row(cell) != at.row) {
        return;  // it has left
    }
    float * key = (float *)lctx_shared() + lctx_warp() * a.index.head_dim;
    load_key(a, lctx_key_row(a.cache, cell, head, at.seq), key);
    put(a.index, key, cell % a.index.GROUP, lctx_index_group(a.cache, cell / a.index.GROUP, head, at.seq));
}

}  // namespace

void lctx_cuda_index(const lctx_cuda_queue & queue, const lctx_index_args & args) {
    const dim3 grid((unsigned)lctx_div_up((int64_t)args.n_rows * args.n_head_kv, WARPS));
    lctx_launch(index_rows, grid, WARPS * LCTX_WARP, WARPS * args.index.head_dim * sizeof(float), queue.stream, args);
}
