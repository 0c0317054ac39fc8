// *index*: the keys of some rows once more, in few bits a channel (../ops/index.h). A warp takes a row and KV head.
#include "index.h"

#include "hadamard.h"
#include "half.h"
#include "kernels.h"

#include <climits>

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

// The channels of a key in the registers of a warp: those of bytes 32 j + lane of the codes, BYTES at most for a lane.
template <int BITS, int BYTES> struct channels {
    static constexpr int PER_BYTE = 8 / BITS, LARGE = 10, SMALL = 3;
    const lctx_index_shape & shape;
    float x[BYTES][PER_BYTE];

    __device__ channels(const lctx_index_shape & shape, const float * key) : shape(shape) {
        each([&](int j, int i, int d) { x[j][i] = d < shape.head_dim ? key[d] : 0.0f; });
    }
    __device__ static int byte(int j) { return j * LCTX_WARP + lctx_lane(); }
    // f(byte of this lane, place in it, channel).
    template <typename F> __device__ __forceinline__ void each(F && f) const {
        const int n_code = shape.n_code();
        lctx_unrolled<BYTES>([&](int j) {
            lctx_unrolled<PER_BYTE>([&](int i) { f(j, i, byte(j) < n_code ? byte(j) + i * n_code : INT_MAX); });
        });
    }
    // Levels lie on both sides of this size.
    __device__ static float size(float x, float border) {
        return BITS == 1 ? 1.0f : fabsf(x) > border ? (float)LARGE : (float)SMALL;
    }
    // The scale of least error for the levels that a border gives; all lanes get it.
    __device__ float scale(float border) const {
        float product = 0.0f, square = 0.0f;
        each([&](int j, int i, int d) {
            const float level = d < shape.head_dim ? size(x[j][i], border) : 0.0f;
            product += fabsf(x[j][i]) * level;
            square += level * level;
        });
        return lctx_div(lctx_warp_sum(product), lctx_warp_sum(square));
    }
    // Border and scale: as the CPU's lctx_index_levels.
    __device__ float border(float & scale_of_border) const {
        constexpr float BORDER = 0.9816f, MIDDLE = 6.5f;
        float square = 0.0f;
        each([&](int j, int i, int) { square += x[j][i] * x[j][i]; });
        float border = BORDER * sqrtf(lctx_div(lctx_warp_sum(square), (float)shape.head_dim));
        scale_of_border = scale(border);
        if (BITS > 1) {
            border = MIDDLE * scale_of_border;
            scale_of_border = scale(border);
        }
        return border;
    }
    // Codes of byte j, levels from the least to the largest; 0 beyond the head.
    __device__ uint32_t codes(int j, float border) const {
        uint32_t codes = 0;
        lctx_unrolled<PER_BYTE>([&](int i) {
            const bool is_large = BITS > 1 && size(x[j][i], border) == (float)LARGE, is_less = x[j][i] < 0.0f;
            const uint32_t code = BITS == 1 ? !is_less : is_less ? !is_large : 2 + is_large;
            codes |= byte(j) + i * shape.n_code() < shape.head_dim ? code << i * BITS : 0;
        });
        return codes;
    }
    // Row `lane` of a group: the scale, and words of four bytes, which four lanes have.
    __device__ void write(char * group, int lane) const {
        float scale;
        const float of_levels = border(scale);
        if (lctx_lane() == 0) {
            *(uint16_t *)(group + shape.scale_at(lane)) = lctx_to_half(scale, 0);
        }
        lctx_unrolled<BYTES>([&](int j) {
            uint32_t word = codes(j, of_levels) << 8 * (byte(j) % shape.WORD);
            word |= lctx_shuffle_xor(word, 1);
            word |= lctx_shuffle_xor(word, 2);
            if (byte(j) < shape.n_code() && byte(j) % shape.WORD == 0) {
                *(uint32_t *)(group + shape.word_at(byte(j) / shape.WORD, lane)) = word;
            }
        });
    }
};

template <int BITS, int BYTES> __global__ void index_rows(lctx_index_args a) {
    lctx_begin();
    lctx_let_next_begin();
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
    const channels<BITS, BYTES> mine(a.index, key);
    mine.write(lctx_index_group(a.cache, cell / a.index.GROUP, head, at.seq), cell % a.index.GROUP);
}

template <int BITS, int BYTES> void launch(const lctx_cuda_queue & queue, const lctx_index_args & args) {
    const dim3 grid((unsigned)lctx_div_up((int64_t)args.n_rows * args.n_head_kv, WARPS));
    const size_t n_shared = WARPS * args.index.head_dim * sizeof(float);
    lctx_launch(index_rows<BITS, BYTES>, grid, WARPS * LCTX_WARP, n_shared, queue.stream, args);
}

}  // namespace

void lctx_cuda_index(const lctx_cuda_queue & queue, const lctx_index_args & args) {
    const auto n_byte = (int)lctx_div_up(args.index.n_code(), LCTX_WARP);
    if (args.index.bits == 1) {
        n_byte == 1 ? launch<1, 1>(queue, args) : launch<1, 3>(queue, args);
    } else {
        n_byte == 1 ? launch<2, 1>(queue, args) : n_byte == 2 ? launch<2, 2>(queue, args) : launch<2, 5>(queue, args);
    }
}
