// Rows of the index of keys (../ops/index.h) on the GPU.
#pragma once

#include "../ops/cache.h"
#include "device.h"

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
