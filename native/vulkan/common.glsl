// Common to all kernels: arrays at addresses, and rows of K and V in every type. Rows lie at even addresses, and so does
// everything in their blocks: 16-bit words are all that the device must be able to load.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#include "args.h"

#define LAST(at, type, name) layout(offset = at) type name;

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Floats { float x[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Ints { int x[]; };
layout(buffer_reference, std430, buffer_reference_align = 2) buffer Words { uint16_t x[]; };

const int PAGE_ROWS = 64;
const int BLOCK = 32;       // elements that have a scale
const int GROUP_ROWS = 16;  // of the index, side by side
const float MOST_HALF = 65504.0;

// of ggml_type
const int F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, IQ4_NL = 20, BF16 = 30;

// what the levels of IQ4_NL name
const int VALUES[16] = int[](-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);

// The token that is the index-th outside of tiles; these begin at n_tile ascending tokens.
int token_alone(int index, uint64_t firsts, int n_tile, int size) {
    for (int tile = 0; tile < n_tile; tile++) {
        index += Ints(firsts).x[tile] <= index ? size : 0;
    }
    return index;
}

uint word(uint64_t at, int i) {
    return uint(Words(at).x[i]);
}

float half_at(uint64_t at, int i) {
    return unpackHalf2x16(word(at, i)).x;
}

// Bytes of a block of 32: its scale, its least element or nothing, its high bits or nothing, its levels.
bool has_least(int type) {
    return type == Q4_1 || type == Q5_1;
}
bool has_high(int type) {
    return type == Q5_0 || type == Q5_1;
}
int high_at(int type) {
    return has_least(type) ? 4 : 2;
}
int levels_at(int type) {
    return high_at(type) + (has_high(type) ? 4 : 0);
}
int block_size(int type) {
    return type == Q8_0 ? 34 : levels_at(type) + 16;
}

float block_element(int type, uint64_t block, int i) {
    const float scale = half_at(block, 0);
    if (type == Q8_0) {
        return scale * float(int(word(block, 1 + i / 2) << (i % 2 == 0 ? 24 : 16)) >> 24);
    }
    const int j = i % 16;
    uint level = word(block, levels_at(type) / 2 + j / 2) >> (8 * (j % 2) + i / 16 * 4) & 15;
    if (type == IQ4_NL) {
        return scale * float(VALUES[level]);
    }
    if (has_high(type)) {
        level |= (word(block, high_at(type) / 2 + i / 16) >> j & 1) << 4;
    }
    return has_least(type) ? scale * float(level) + half_at(block, 1) : scale * float(int(level) - (has_high(type) ? 16 : 8));
}

float element(int type, uint64_t row, int d) {
    switch (type) {
        case F32:  return Floats(row).x[d];
        case F16:  return half_at(row, d);
        case BF16: return uintBitsToFloat(word(row, d) << 16);
        default:   return block_element(type, row + uint64_t(d / BLOCK * block_size(type)), d % BLOCK);
    }
}

// Return where row `cell % 64` of its page would be, without the row itself.
uint64_t page_at(uint64_t pool, int row_size, uint64_t pages, int index) {
    return pool + uint64_t(max(Ints(pages).x[index], 0)) * uint64_t(PAGE_ROWS * row_size);
}

// Return where the group of a row of the index lies: its scales, and its words of codes.
uint64_t group_at(uint64_t index, int row_size, uint64_t pages, int page, int row) {
    return page_at(index, row_size, pages, page) + uint64_t(row % PAGE_ROWS / GROUP_ROWS * GROUP_ROWS * row_size);
}
uint64_t codes_at(uint64_t group) {
    return group + uint64_t(2 * GROUP_ROWS);
}
