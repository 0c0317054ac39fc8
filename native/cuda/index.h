// Rows of the index of keys (../ops/index.h) on the GPU.
#pragma once

#include "../ops/cache.h"
#include "hadamard.h"
#include "half.h"

#include <climits>

// Return where group `index` of the rows of one head of a sequence lies.
static __device__ __forceinline__ char * lctx_index_group(const lctx_cache_args & cache, int32_t index, int32_t head,
                                                          int32_t seq) {
    return lctx_pool_at(cache.index, lctx_pool_row(cache.table, index * lctx_index_shape::GROUP, head, seq));
}

// Two levels of a word of codes as f16 numbers: those at bits i BITS of bytes 2 j and 2 j + 1, pair = j * (8 / BITS) +
// i. The low byte of such a number is 0; the high byte is looked up.
template <int BITS> static __device__ __forceinline__ uint32_t lctx_index_pair(uint32_t codes, int pair) {
    constexpr uint32_t HIGH = BITS == 1 ? 0x3cbc : 0x4942c2c9, MASK = BITS == 1 ? 0x1010 : 0x3030;
    const int shift = pair / (8 / BITS) * 16 + pair % (8 / BITS) * BITS - 4;
    const uint32_t choice = shift < 0 ? codes << -shift : codes >> shift;
    return lctx_permute(HIGH, 0, (choice & MASK) | 0x0404);
}

// The order in which channels are multiplied, 16 at a time: that in which these pairs are the right factor of lctx_mma,
// whose lane t of four has numbers 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. It takes word t of every four.
struct lctx_key_order {
    int bits, n_code;

    LCTX_HD explicit lctx_key_order(const lctx_index_shape & shape) : bits(shape.bits), n_code(shape.n_code()) {}
    // Of four words.
    LCTX_HD static constexpr int steps(int bits) { return 8 / bits; }
    LCTX_HD int n_quad() const { return (int)lctx_div_up(n_code, 4 * lctx_index_shape::WORD); }
    LCTX_HD int size() const { return n_quad() * steps(bits) * 16; }
    // The channel at index i; -1: none.
    LCTX_HD int channel(int i) const {
        const int step = i / 16, t = i % 8 / 2, per_byte = 8 / bits;
        const int pair = step % steps(bits) * 2 + i % 16 / 8;
        const int byte = (step / steps(bits) * 4 + t) * lctx_index_shape::WORD + pair / per_byte * 2 + i % 2;
        return byte < n_code ? pair % per_byte * n_code + byte : -1;
    }
    // The index of the first of the two channels that a pair of a word of codes has.
    LCTX_HD static int index(int bits, int word, int pair) {
        return (word / 4 * steps(bits) + pair / 2) * 16 + pair % 2 * 8 + word % 4 * 2;
    }
};

// Levels as bytes, four of them from a byte permutation, and the order in which channels are multiplied with them, 32
// at a time: that in which these are the right factor of lctx_mma_bytes. Lane t of four takes word t of every four.
template <int BITS> struct lctx_level_bytes {
    static constexpr int STEPS = 4 / BITS;  // of four words
    static constexpr uint32_t LEVELS = BITS == 1 ? 0x01ff : 0x0a03fdf6, MASK = BITS == 1 ? 0x11111111 : 0x33333333;

    // Those of a word for step `step`.
    static __device__ __forceinline__ void unpack(uint32_t codes, int step, uint32_t (&levels)[2]) {
        const uint32_t choice = codes >> step * BITS & MASK;
        levels[0] = lctx_permute(LEVELS, 0, choice);
        levels[1] = lctx_permute(LEVELS, 0, choice >> 16);
    }
    // Return where a channel of row `row` of the left factor lies among the bytes of its registers: [step][lane] uint4.
    LCTX_HD static int at(int n_code, int channel, int row) {
        const int byte = channel % n_code, bit = channel / n_code * BITS, word = byte / lctx_index_shape::WORD;
        const int step = word / 4 * STEPS + bit % 4 / BITS, lane = row % 8 * 4 + word % 4;
        return ((step * LCTX_WARP + lane) * 4 + row / 8 + byte % 4 / 2 * 2) * 4 + byte % 2 * 2 + bit / 4;
    }
};

namespace {

// The stored key as the index wants it, in shared memory.
__device__ inline void load_key(ggml_type type, const char * row, int32_t hadamard_k, const lctx_index_shape & shape,
                                float * key) {
    const int dim = shape.head_dim;
    for (int d = lctx_lane() * 8; d < dim; d += LCTX_WARP * 8) {
        float x[8];
        lctx_load_8(type, row, d, x);
        lctx_store_8(key + d, x);
    }
    lctx_sync_warp();
    if (hadamard_k != shape.hadamard()) {
        lctx_transform_row(key, dim, hadamard_k);
        lctx_transform_row(key, dim, shape.hadamard());
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

// Index the stored key of a cell. key: [head_dim] floats of this warp, in shared memory.
template <int BITS> __device__ void index_key(const lctx_cache_args & cache, const lctx_index_shape & shape,
                                              int32_t hadamard_k, int32_t cell, int32_t head, int32_t seq,
                                              float * key) {
    load_key(cache.k_pool.type, lctx_key_row(cache, cell, head, seq), hadamard_k, shape, key);
    char * group = lctx_index_group(cache, cell / shape.GROUP, head, seq);
    const int lane = cell % shape.GROUP, n_byte = (int)lctx_div_up(shape.n_code(), LCTX_WARP);
    if (n_byte == 1) {
        channels<BITS, 1>(shape, key).write(group, lane);
    } else if (BITS == 2 && n_byte == 2) {
        channels<BITS, 2>(shape, key).write(group, lane);
    } else {
        channels<BITS, BITS == 1 ? 3 : 5>(shape, key).write(group, lane);
    }
}

}  // namespace
