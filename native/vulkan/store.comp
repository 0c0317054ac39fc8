#version 460
// *store*: rotate the keys of the batch to their storage positions, transform, convert, write rows of K and V. A workgroup per token, KV
// head and part; a thread per block of 32 elements, or per element of plain types.
#include "common.glsl"
#include "exact.glsl"
#define THREADS 64
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int TYPE_K = 0;
layout(constant_id = 1) const int TYPE_V = 0;
layout(constant_id = 2) const int DIM_K = 64;
layout(constant_id = 3) const int DIM_V = 64;
layout(constant_id = 4) const int N_HEAD_KV = 1;
layout(constant_id = 5) const int N_DIMS = 0;
layout(constant_id = 6) const int ROPE_MODE = 0;
layout(constant_id = 7) const int HADAMARD_K = 0;
layout(constant_id = 8) const int HADAMARD_V = 0;
layout(constant_id = 9) const int NEAR_ROWS = 0;
layout(constant_id = 10) const float MOST_K = 0.0;  // the largest number of a row
layout(constant_id = 11) const float MOST_V = 0.0;
layout(constant_id = 12) const int MOST_DIM = 64;
layout(push_constant, std430) uniform Args { LCTX_VK_STORE(LAST) } a;
shared float buf[MOST_DIM];
#include "rotate.glsl"

const int KEY = 0, VALUE = 1;  // else the key of the near ring

void put_word(uint64_t at, int i, uint x) {
    Words(at).x[i] = uint16_t(x);
}

int nearest(float x) {
    const float t = trunc(x);
    return int(abs(x - t) >= 0.5 ? t + sign(x) : t);
}

float inverse_of(float d) {
    return d != 0.0 ? divided(1.0, d) : 0.0;
}

void put_bytes(uint64_t block, int first) {
    float most = 0.0;
    for (int i = 0; i < BLOCK; i++) {
        most = max(most, abs(buf[first + i]));
    }
    const float d = divided(most, 127.0), inverse = inverse_of(d);
    put_word(block, 0, to_half(d));
    for (int i = 0; i < BLOCK; i += 2) {
        const uint low = uint(nearest(buf[first + i] * inverse)) & 255, high = uint(nearest(buf[first + i + 1] * inverse)) & 255;
        put_word(block, 1 + i / 2, low | high << 8);
    }
}

void put_nibbles(uint64_t at, uint levels[BLOCK]) {
    for (int i = 0; i < 16; i += 2) {
        const uint one = levels[i] & 15 | (levels[i + 16] & 15) << 4, two = levels[i + 1] & 15 | (levels[i + 17] & 15) << 4;
        put_word(at, i / 2, one | two << 8);
    }
}

// Levels that name values. The scale has the smallest error, weighted by the squares of the elements; NaN stays. (../ops/nonlinear.h)
void put_named(uint64_t block, int first) {
    float largest = 0.0;
    for (int i = 0; i < BLOCK; i++) {
        largest = abs(buf[first + i]) > abs(largest) ? buf[first + i] : largest;
    }
    const float inverse = inverse_of(divided(largest, float(VALUES[0])));
    float products = 0.0, squares = 0.0;
    uint levels[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const float x = buf[first + i], level = x * inverse;
        levels[i] = 0;
        for (int j = 1; j < 16; j++) {
            levels[i] += level >= 0.5 * float(VALUES[j - 1] + VALUES[j]) ? 1 : 0;
        }
        const float value = float(VALUES[levels[i]]);
        products += x * x * value * x;
        squares += x * x * value * value;
    }
    const float MOST = 515.5, scale = squares == 0.0 ? 0.0 : divided(products, squares);
    put_word(block, 0, to_half(scale > MOST ? MOST : scale < -MOST ? -MOST : scale));
    put_nibbles(block + levels_at(IQ4_NL), levels);
}

// Levels between the smallest and the largest element, or around the middle, where the first of the largest elements gets 0. (ggml:
// quants.c)
void put_levels(uint64_t block, int type, int first) {
    float least = buf[first], most = buf[first], largest = buf[first];
    for (int i = 1; i < BLOCK; i++) {
        const float x = buf[first + i];
        least = min(least, x);
        most = max(most, x);
        largest = abs(x) > abs(largest) ? x : largest;
    }
    const int n = has_high(type) ? 32 : 16;
    const float d = has_least(type) ? divided(most - least, float(n - 1)) : largest * (n == 32 ? -0.0625 : -0.125);
    const float inverse = inverse_of(d);
    put_word(block, 0, to_half(d));
    if (has_least(type)) {
        put_word(block, 1, to_half(least));
    }
    uint levels[BLOCK], high = 0;
    for (int i = 0; i < BLOCK; i++) {
        precise float level = has_least(type) ? (buf[first + i] - least) * inverse + 0.5 : buf[first + i] * inverse + (float(n / 2) + 0.5);
        levels[i] = uint(min(n - 1, int(level)));
        high |= (levels[i] >> 4) << i;
    }
    if (has_high(type)) {
        put_word(block, high_at(type) / 2, high & 0xffff);
        put_word(block, high_at(type) / 2 + 1, high >> 16);
    }
    put_nibbles(block + levels_at(type), levels);
}

void put_row(uint64_t row, int type, int dim) {
    const bool is_plain = type == F32 || type == F16 || type == BF16;
    const int n = is_plain ? dim : dim / BLOCK;
    for (int i = int(gl_LocalInvocationID.x); i < n; i += THREADS) {
        const uint64_t block = row + uint64_t(i * block_size(type));
        switch (type) {
            case F32:  Floats(row).x[i] = buf[i]; break;
            case F16:  put_word(row, i, to_half(buf[i])); break;
            case BF16: put_word(row, i, to_bf16(buf[i])); break;
            case Q8_0: put_bytes(block, BLOCK * i); break;
            case IQ4_NL: put_named(block, BLOCK * i); break;
            default:   put_levels(block, type, BLOCK * i);
        }
    }
}

// NaN stays.
void limit(int dim, float factor, float most) {
    for (int d = int(gl_LocalInvocationID.x); d < dim; d += THREADS) {
        const float x = buf[d] * factor;
        buf[d] = x > most ? most : x < -most ? -most : x;
    }
    barrier();
}

void put_key(uint64_t k, int head, int angle, uint64_t row) {
    for (int d = int(gl_LocalInvocationID.x); d < DIM_K; d += THREADS) {
        const float x = rotated(k, d, a.angles + uint64_t(angle) * uint64_t(4 * N_DIMS));
        buf[d] = a.center != 0 ? x - Floats(a.center).x[head * DIM_K + d] : x;
    }
    transform(DIM_K, HADAMARD_K);
    limit(DIM_K, root_of(HADAMARD_K), MOST_K);
    put_row(row, TYPE_K, DIM_K);
}

void put_value(uint64_t v, uint64_t row) {
    for (int d = int(gl_LocalInvocationID.x); d < DIM_V; d += THREADS) {
        buf[d] = Floats(v).x[d];
    }
    transform(DIM_V, HADAMARD_V);
    limit(DIM_V, root_of(HADAMARD_V), MOST_V);
    put_row(row, TYPE_V, DIM_V);
}

void put(int token, int head, int part) {
    const int at = 4 * token, row = Ints(a.rows).x[at], seq = Ints(a.rows).x[at + 1];
    const int page = seq * a.page_seq_stride + head * a.page_head_stride + row / PAGE_ROWS, cell = row % PAGE_ROWS;
    const uint64_t k = a.k + uint64_t(head * a.k_head_stride) + uint64_t(token) * uint64_t(a.k_token_stride);
    const uint64_t v = a.v + uint64_t(head * a.v_head_stride) + uint64_t(token) * uint64_t(a.v_token_stride);
    if (part == VALUE) {
        put_value(v, page_at(a.v_pool, a.v_row, a.pages, page) + uint64_t(cell * a.v_row));
    } else if (part == KEY) {
        put_key(k, head, Ints(a.rows).x[at + 2], page_at(a.k_pool, a.k_row, a.pages, page) + uint64_t(cell * a.k_row));
    } else {
        const uint64_t near = a.near + uint64_t(seq) * uint64_t(a.near_seq_stride) + uint64_t(head) * uint64_t(a.near_head_stride);
        put_key(k, head, Ints(a.rows).x[at + 3], near + uint64_t(row % NEAR_ROWS) * uint64_t(a.k_row));
    }
}

void main() {
    for (uint i = gl_WorkGroupID.x; i < uint(a.n_tokens) * uint(N_HEAD_KV); i += gl_NumWorkGroups.x) {
        put(int(i / N_HEAD_KV), int(i % N_HEAD_KV), int(gl_WorkGroupID.y));
        barrier();
    }
}
