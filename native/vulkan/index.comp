#version 460
// *index*: the keys of some rows again, in few bits per channel (../ops/index.h). A workgroup per row and KV head, a thread per word.
#include "common.glsl"
#include "exact.glsl"
#define THREADS 64
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int TYPE_K = 0;
layout(constant_id = 1) const int DIM_K = 64;
layout(constant_id = 2) const int N_HEAD_KV = 1;
layout(constant_id = 3) const int HADAMARD_K = 0;  // of the stored keys
layout(constant_id = 4) const int HADAMARD = 0;    // of the index
layout(constant_id = 5) const int BITS = 2;
layout(constant_id = 6) const int N_CODE = 16;  // bytes of codes of a row
layout(push_constant, std430) uniform Args { LCTX_VK_INDEX(LAST) } a;
shared float buf[DIM_K];
const int N_DIMS = 0, ROPE_MODE = 0;
#include "reduce.glsl"
#include "rotate.glsl"

void load_key(uint64_t row) {
    for (int d = int(gl_LocalInvocationID.x); d < DIM_K; d += THREADS) {
        buf[d] = element(TYPE_K, row, d);
    }
    barrier();
    if (HADAMARD_K != HADAMARD) {
        transform(DIM_K, HADAMARD_K);
        transform(DIM_K, HADAMARD);
        for (int d = int(gl_LocalInvocationID.x); d < DIM_K; d += THREADS) {
            buf[d] *= root_of(HADAMARD_K) * root_of(HADAMARD);
        }
        barrier();
    }
}

float level_of(float x, float border) {
    const float size = BITS == 1 ? 1.0 : abs(x) > border ? 10.0 : 3.0;
    return x < 0.0 ? -size : size;
}

// The scale of least error for the levels that a border gives.
float scale_of(float border) {
    float product = 0.0, square = 0.0;
    for (int d = int(gl_LocalInvocationID.x); d < DIM_K; d += THREADS) {
        const float level = level_of(buf[d], border);
        product += buf[d] * level;
        square += level * level;
    }
    const float sum = total(product);
    return divided(sum, total(square));
}

float deviation() {
    float square = 0.0;
    for (int d = int(gl_LocalInvocationID.x); d < DIM_K; d += THREADS) {
        square += buf[d] * buf[d];
    }
    return sqrt(divided(total(square), float(DIM_K)));
}

uint codes_of(int word, float border) {
    uint codes = 0;
    for (int i = 0; i < 4; i++) {
        int shift = 8 * i;
        for (int d = 4 * word + i; d < DIM_K; d += N_CODE, shift += BITS) {
            const float level = level_of(buf[d], border);
            const int code = BITS == 1 ? int(level > 0.0) : int(level > -10.0) + int(level > 0.0) + int(level > 3.0);
            codes |= uint(code) << shift;
        }
    }
    return codes;
}

void put(int lane, uint64_t group) {
    float border = 0.9816 * deviation(), scale = scale_of(border);
    if (BITS > 1) {
        border = 6.5 * scale;
        scale = scale_of(border);
    }
    if (gl_LocalInvocationID.x == 0) {
        Words(group).x[lane] = uint16_t(to_half(scale > MOST_HALF ? MOST_HALF : scale));
    }
    for (int word = int(gl_LocalInvocationID.x); word < N_CODE / 4; word += THREADS) {
        Ints(codes_at(group)).x[word * GROUP_ROWS + lane] = int(codes_of(word, border));
    }
}

void main() {
    for (uint i = gl_WorkGroupID.x; i < uint(a.n_rows) * uint(N_HEAD_KV); i += gl_NumWorkGroups.x) {
        const int at = 4 * int(i / N_HEAD_KV), row = Ints(a.rows).x[at], seq = Ints(a.rows).x[at + 1];
        const int page = seq * a.page_seq_stride + int(i % N_HEAD_KV) * a.page_head_stride + row / PAGE_ROWS;
        load_key(page_at(a.k_pool, a.k_row, a.pages, page) + uint64_t(row % PAGE_ROWS * a.k_row));
        put(row % GROUP_ROWS, group_at(a.index, a.index_row, a.pages, page, row));
        barrier();
    }
}
