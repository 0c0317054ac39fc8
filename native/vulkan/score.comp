#version 460
// *select*, first part: scores of the chunks in the far ranges of a query by their keys in few bits (../ops/index.h, ../ops/summaries.h). A
// workgroup per token, head, and every n-th CHUNKS of them.
#include "common.glsl"
#include "exact.glsl"
#define THREADS 128
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int DIM_K = 64;
layout(constant_id = 1) const int N_HEAD = 1;
layout(constant_id = 2) const int GROUP = 1;  // query heads of a KV head
layout(constant_id = 3) const int N_DIMS = 0;
layout(constant_id = 4) const int ROPE_MODE = 0;
layout(constant_id = 5) const int HADAMARD = 0;  // of the index
layout(constant_id = 6) const int CHUNK_SIZE = 16;
layout(constant_id = 7) const int N_RUN = 1;
layout(constant_id = 8) const int N_RANGE = 1;
layout(constant_id = 9) const int BITS = 2;      // of the index
layout(constant_id = 10) const int N_CODE = 16;  // bytes of codes of a row
layout(push_constant, std430) uniform Args { LCTX_VK_SCORE(LAST) } a;

const float NONE = -1e30;
const int CHUNKS = 32;
const int GROUPS = THREADS / GROUP_ROWS;  // of rows, which are scored together
const int OF_CHUNK = CHUNK_SIZE / GROUP_ROWS;

shared float buf[DIM_K];      // the query
shared int bytes[DIM_K + 4];  // the same, rounded; 0 after the last channel
shared float products[THREADS];
#include "reduce.glsl"
#include "rotate.glsl"

int thread, token, head, seq;
float query_scale;
uint64_t scores;

bool is_finite(float x) {
    return (floatBitsToUint(x) & 0x7fffffff) < 0x7f800000;
}

void turn_query(int angle) {
    const uint64_t q = a.q + uint64_t(head) * uint64_t(a.q_head_stride) + uint64_t(token) * uint64_t(a.q_token_stride);
    barrier();
    for (int d = thread; d < DIM_K; d += THREADS) {
        buf[d] = rotated(q, d, a.angles + uint64_t(angle) * uint64_t(4 * N_DIMS));
    }
    transform(DIM_K, HADAMARD);
}

// A query that is not finite makes every score NaN.
void round_query() {
    float most = 0.0, wrong = 0.0;
    for (int d = thread; d < DIM_K; d += THREADS) {
        buf[d] *= root_of(HADAMARD);
        most = max(most, abs(buf[d]));
        wrong = is_finite(buf[d]) ? wrong : 1.0;
    }
    most = largest(most);
    const bool is_number = largest(wrong) == 0.0;
    const float inverse = most > 0.0 ? divided(127.0, most) : 0.0;
    for (int d = thread; d < DIM_K + 4; d += THREADS) {
        bytes[d] = d < DIM_K && is_number ? int(roundEven(buf[d] * inverse)) : 0;
    }
    query_scale = is_number ? divided(1.44269504 * a.scale * most, 127.0) : uintBitsToFloat(0x7fc00000);
    barrier();
}

int level_of(uint code) {
    return BITS == 1 ? 2 * int(code) - 1 : 7 * int(code) - (code > 1 ? 11 : 10);
}

// The query times the row of a group.
float product(int group, int lane) {
    const int row = group * GROUP_ROWS, page = seq * a.page_seq_stride + head / GROUP * a.page_head_stride + row / PAGE_ROWS;
    const uint64_t at = group_at(a.index, a.index_row, a.pages, page, row);
    int sum = 0;
    for (int word = 0; word < N_CODE / 4; word++) {
        const uint codes = uint(Ints(codes_at(at)).x[word * GROUP_ROWS + lane]);
        for (int part = 0; part * N_CODE + 4 * word < DIM_K; part++) {
            for (int i = 0; i < 4; i++) {
                sum += level_of(codes >> (8 * i + part * BITS) & (1 << BITS) - 1) * bytes[part * N_CODE + 4 * word + i];
            }
        }
    }
    return float(sum) * half_at(at, lane) * query_scale;
}

// 2^x, to about 2e-4, and log2(x) as the CPU has them (../cpu/index.h): the same chunks are chosen, except at near ties.
float power_of_2(float x) {
    const float limited = max(x, -120.0), n = roundEven(limited), f = limited - n;
    const float p = ((f * 0.0558011 + 0.2401397) * f + 0.6931472) * f + 1.0;
    return uintBitsToFloat(floatBitsToUint(p) + (int(n) << 23));
}
float log_2(float x) {
    const int bits = floatBitsToInt(x), exponent = bits - 0x3f3504f3 >> 23;
    const float m = intBitsToFloat(bits - (exponent << 23)), z = divided(m - 1.0, m + 1.0), zz = z * z;
    return float(exponent) + 2.88539008 * z * ((((1.0 / 9.0 * zz + 1.0 / 7.0) * zz + 1.0 / 5.0) * zz + 1.0 / 3.0) * zz + 1.0);
}

// Add the rows of group i: the largest, and the sum of what they are next to it.
void add_group(int i, inout float most, inout float sum) {
    float v[GROUP_ROWS], top = NONE;
    for (int row = 0; row < GROUP_ROWS; row++) {
        v[row] = products[i * GROUP_ROWS + row];
        top = max(top, v[row]);
    }
    for (int row = 0; row < GROUP_ROWS; row++) {
        v[row] = power_of_2(v[row] - top);
    }
    for (int half_n = GROUP_ROWS / 2; half_n > 0; half_n /= 2) {
        for (int row = 0; row < half_n; row++) {
            v[row] += v[row + half_n];
        }
    }
    const float both = max(most, top);
    sum = sum * power_of_2(most - both) + v[0] * power_of_2(top - both);
    most = both;
}

// Of the chunk of this thread, of n from `first` on.
float score_chunks(int first, int n) {
    const int end = (first + n) * OF_CHUNK;
    float most = NONE, sum = 0.0;
    for (int group = first * OF_CHUNK; group < end; group += GROUPS) {
        const int mine = group + thread / GROUP_ROWS;
        barrier();
        products[thread] = mine < end ? product(mine, thread % GROUP_ROWS) : 0.0;
        barrier();
        for (int i = 0; i < GROUPS; i++) {
            if (thread < n && (group + i) / OF_CHUNK == first + thread) {
                add_group(i, most, sum);
            }
        }
    }
    return most + log_2(sum);
}

void score_range(int first, int end) {
    for (int chunk = first + int(gl_WorkGroupID.z) * CHUNKS; chunk < end; chunk += int(gl_NumWorkGroups.z) * CHUNKS) {
        const int n = min(CHUNKS, end - chunk);
        const float score = score_chunks(chunk, n);
        if (thread < n) {
            Ints(scores).x[chunk + thread] = is_finite(query_scale) ? floatBitsToInt(score) : 0x7fc00000;
        }
    }
}

void main() {
    thread = int(gl_LocalInvocationID.x);
    head = int(gl_WorkGroupID.y);
    for (int i = int(gl_WorkGroupID.x); i < a.n_slab; i += int(gl_NumWorkGroups.x)) {
        token = a.first + i;
        seq = Ints(a.rows).x[4 * token + 1];
        scores = a.scores + uint64_t(i * N_HEAD + head) * uint64_t(4 * a.n_chunk_max);
        for (int slot = 0; slot < N_RANGE; slot++) {
            const int at = 4 * (token * (N_RUN + N_RANGE) + N_RUN + slot), row0 = Ints(a.segs).x[at], row1 = Ints(a.segs).x[at + 1];
            if (row0 < row1) {
                turn_query(Ints(a.segs).x[at + 2]);
                round_query();
                score_range(row0 / CHUNK_SIZE, row1 / CHUNK_SIZE);
            }
        }
    }
}
