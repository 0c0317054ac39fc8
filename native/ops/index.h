// The index of keys: every key once more in one or two bits a channel, for *select*.
//
// A key as stored, after a Hadamard transform that makes its channels alike, becomes a scale and a level for each
// channel: with two bits -10, -3, 3 or 10 times the scale (the levels of least error for a normal distribution are
// 0.4528 and 1.5104 of its deviation, Max 1960, which is 3.336 to one), with one bit -1 or 1.
//
// Rows lie in groups of 16, so that a vector holds the same channels of all: the 16 scales as halves, then for every
// four bytes of codes those of each row. Channel c of a row is in its byte c % n_code, from bit c / n_code * bits on;
// codes after the last channel are 0.
#pragma once

#include "portable.h"

#include <cstddef>
#include <cstdint>

struct lctx_index_shape {
    static constexpr int32_t GROUP = 16;           // rows
    static constexpr int32_t SCALE = 2, WORD = 4;  // bytes

    int32_t bits, head_dim;

    // Bytes of the codes of a row.
    LCTX_HD int32_t n_code() const {
        const int32_t per_byte = 8 / bits, n = (head_dim + per_byte - 1) / per_byte;
        return (n + WORD - 1) / WORD * WORD;
    }
    LCTX_HD int32_t row_size() const { return SCALE + n_code(); }
    // Channels including the padding after the last.
    LCTX_HD int32_t n_channel() const { return n_code() * 8 / bits; }
    // Channels that are transformed together: the largest power of two that divides the head; 0: none.
    LCTX_HD int32_t hadamard() const { return (head_dim & -head_dim) < 32 ? 0 : head_dim & -head_dim; }

    // These return where a row of a group lies.
    LCTX_HD static size_t scale_at(int32_t lane) { return (size_t)SCALE * lane; }
    LCTX_HD static size_t word_at(int32_t word, int32_t lane) {
        return (size_t)SCALE * GROUP + ((size_t)word * GROUP + lane) * WORD;
    }

    // A code is level + most() in units of step().
    LCTX_HD int32_t most() const { return bits == 1 ? 1 : 10; }
    LCTX_HD int32_t level(int32_t code) const { return bits == 1 ? 2 * code - 1 : 7 * code - (code > 1 ? 11 : 10); }
};
