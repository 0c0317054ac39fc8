// Compares queries for a tile (../ops/chunks.h), for *select*: int8 products of groups of 16 columns, each the query of
// a token and head, with groups of 16 rows of the index. lane = 4 g + t has columns g and g + 8, and rows 4 t to 4 t +
// 3.
#pragma once

#include "scores.h"

// Cuts the columns, and says where what is made of them lies.
struct lctx_tile_work {
    static constexpr int GROUP = 16;  // columns

    int n_compared;   // tokens of a tile
    int n_column;     // of a tile and list
    int n_group;      // of columns; after the last one of these a group has columns of zeros
    int n_step;       // of 32 channels
    uint4 * queries;  // [n_tile][n_list][n_range][n_group][n_step][LCTX_WARP] bytes as lctx_level_bytes
    float *
        scales;  // [n_tile][n_list][n_range][n_group][GROUP]: score to the base 2 = product * scale of the row * scale
    float * references;  // [n_tile][n_list][n_group][GROUP]
    uint32_t * keys;  // [n_tile][n_list][n_chunk_max] values of chunks as lctx_choice_key, where a range has the chunk
    char * end;

    // n_step: of lctx_tile_shape.
    lctx_tile_work(const lctx_select_args & a, int n_step, char * work) : n_step(n_step) {
        n_compared = a.chunks.tile / a.chunks.step;
        n_column = n_compared * (a.n_head / a.n_list);
        n_group = (int)lctx_div_up(n_column, GROUP);
        const size_t n_list = (size_t)a.n_tile * a.n_list, n_view = n_list * a.chunks.n_range;
        queries = (uint4 *)work;
        scales = (float *)(queries + n_view * n_group * n_step * LCTX_WARP);
        references = scales + n_view * n_group * GROUP;
        keys = (uint32_t *)(references + n_list * n_group * GROUP);
        end = (char *)(keys + n_list * a.n_chunk_max);
    }
    __device__ size_t list_at(const lctx_select_args & a, int tile, int list) const {
        return (size_t)tile * a.n_list + list;
    }
    __device__ size_t view_at(const lctx_select_args & a, int tile, int list, int slot) const {
        return list_at(a, tile, list) * a.chunks.n_range + slot;
    }
    __device__ uint32_t * keys_of(const lctx_select_args & a, int tile, int list) const {
        return keys + list_at(a, tile, list) * a.n_chunk_max;
    }
};

namespace {

constexpr float MAGIC = 12582912.0f;    // 1.5 * 2^23: the bits of floats from here on are those of integers
constexpr int MAGIC_BITS = 0x4b400000;  // products that begin with it are floats without a conversion

// QUADS times four words of codes of a row, at least as many as it has.
template <int BITS_, int QUADS_> struct tile_shape {
    static constexpr int BITS = BITS_, QUADS = QUADS_, STEPS = QUADS * lctx_level_bytes<BITS>::STEPS;
    static constexpr int CHANNELS = STEPS * 32, ROWS = lctx_index_shape::GROUP;
};

// f(shape) with the least shape that has room for the codes of a row.
template <int BITS, typename F> auto with_tile_shape(const lctx_index_shape & index, F && f) {
    constexpr int MOST = (int)lctx_div_up(LCTX_CUDA_MOST_DIM * BITS, 8 * 4 * lctx_index_shape::WORD);
    const int n_quad = (int)lctx_div_up(index.n_code(), 4 * lctx_index_shape::WORD);
    return n_quad <= 1   ? f(tile_shape<BITS, 1>())
           : n_quad <= 2 ? f(tile_shape<BITS, 2>())
           : n_quad <= 4 ? f(tile_shape<BITS, 4>())
                         : f(tile_shape<BITS, MOST>());
}
template <typename F> auto with_tile_shape(const lctx_index_shape & index, F && f) {
    return index.bits == 1 ? with_tile_shape<1>(index, f) : with_tile_shape<2>(index, f);
}

// A group of rows as it is stored: rows 2 g and 2 g + 1, words t of every four, and the scales of rows 4 t to 4 t + 3.
template <typename S> struct row_codes {
    uint2 words[S::QUADS];
    uint2 scales;

    // Lanes beyond the last word repeat it: their queries are 0.
    __device__ __forceinline__ void load(const lctx_index_shape & index, const char * group) {
        const int g = lctx_lane() / 4, t = lctx_lane() % 4, last = index.n_code() / index.WORD - 1;
        lctx_unrolled<S::QUADS>([&](int quad) {
            words[quad] = *(const uint2 *)(group + index.word_at(lctx_min(4 * quad + t, last), 2 * g));
        });
        scales = *(const uint2 *)(group + index.scale_at(4 * t));
    }
    // levels[i]: of row 2 g + i, the right factor of each step.
    __device__ __forceinline__ void unpack(uint32_t (&levels)[2][S::STEPS][2]) const {
        constexpr int STEPS = lctx_level_bytes<S::BITS>::STEPS;
        lctx_unrolled<S::STEPS>([&](int step) {
            lctx_level_bytes<S::BITS>::unpack(words[step / STEPS].x, step % STEPS, levels[0][step]);
            lctx_level_bytes<S::BITS>::unpack(words[step / STEPS].y, step % STEPS, levels[1][step]);
        });
    }
    // scale[i][j]: of row 4 t + 2 j + i, which is that of sums[i][j] and sums[i][2 + j].
    __device__ __forceinline__ void unpack_scales(float (&scale)[2][2]) const {
        lctx_unrolled<2>([&](int i) {
            scale[i][0] = lctx_from_half((uint16_t)(scales.x >> 16 * i));
            scale[i][1] = lctx_from_half((uint16_t)(scales.y >> 16 * i));
        });
    }
};

// sums[i][2 * k + j] += column g + 8 k times row 4 t + 2 j + i, in bits of floats from MAGIC on.
template <typename S> __device__ __forceinline__ void multiply_step(const uint4 & query,
                                                                    const uint32_t (&levels)[2][S::STEPS][2], int step,
                                                                    const int (&from)[4], int (&sums)[2][4]) {
    lctx_unrolled<2>([&](int i) {
        const int(&start)[4] = step == 0 ? from : (const int(&)[4])sums[i];
        lctx_mma_bytes(sums[i], query, levels[i][step][0], levels[i][step][1], start);
    });
}

// The largest over a warp.
__device__ __forceinline__ float warp_largest(float x) {
    const uint32_t bits = lctx_as_uint(x), SIGN = 1u << 31;
    const uint32_t most = lctx_reduce_max(bits ^ ((uint32_t)((int32_t)bits >> 31) | SIGN));
    return lctx_as_float(most & SIGN ? most ^ SIGN : ~most);
}

}  // namespace
