#version 460
// *select*, second part: the best chunks of a query by their scores, ascending, after its runs. A workgroup per token and choice; a thread
// has a part of the chunks to itself.
#include "common.glsl"
#define THREADS 64
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int N_HEAD = 1;
layout(constant_id = 1) const int N_CHOICE = 1;
layout(constant_id = 2) const int CHUNK_SIZE = 16;
layout(constant_id = 3) const int N_RUN = 1;
layout(constant_id = 4) const int N_RANGE = 1;
layout(constant_id = 5) const int N_FREE = 1;
layout(push_constant, std430) uniform Args { LCTX_VK_CHOOSE(LAST) } a;
#include "reduce.glsl"

const int HEADS = N_HEAD / N_CHOICE;  // which choose together
const int N_GIVEN = N_RUN + N_RANGE, N_SEGMENT = N_RUN + N_FREE;
const uint EMPTY = 1;  // the key of a chunk in no range

shared int firsts[N_RANGE], ends[N_RANGE];
int thread, token, seq, begin, end;  // of the chunks of this thread
uint64_t scores, to;                 // keys take the place of the scores of the first head

void put(int segment, ivec4 x) {
    for (int i = 0; i < 4; i++) {
        Ints(to).x[4 * segment + i] = x[i];
    }
}

ivec4 given(int i) {
    const int at = 4 * (token * N_GIVEN + i);
    return ivec4(Ints(a.segs).x[at], Ints(a.segs).x[at + 1], Ints(a.segs).x[at + 2], Ints(a.segs).x[at + 3]);
}

// Looks the ranges up, and takes a part of the chunks from the first of all to the last; returns how many those are.
int take_part() {
    barrier();
    for (int slot = thread; slot < N_RANGE; slot += THREADS) {
        const ivec4 r = given(N_RUN + slot);
        firsts[slot] = r.x < r.y ? r.x / CHUNK_SIZE : 0;
        ends[slot] = r.x < r.y ? r.y / CHUNK_SIZE : 0;
    }
    barrier();
    int first = 0x7fffffff, last = 0;
    for (int slot = 0; slot < N_RANGE; slot++) {
        first = firsts[slot] < ends[slot] ? min(first, firsts[slot]) : first;
        last = max(last, ends[slot]);
    }
    first = min(first, last);
    const int size = (last - first + THREADS - 1) / THREADS;
    begin = min(first + thread * size, last);
    end = min(begin + size, last);
    return last - first;
}

// The range that has a chunk, or -1.
int slot_of(int chunk) {
    for (int slot = 0; slot < N_RANGE; slot++) {
        if (firsts[slot] <= chunk && chunk < ends[slot]) {
            return slot;
        }
    }
    return -1;
}

// Larger for a better score, as the CPU's lctx_key_of.
uint key_of(int chunk) {
    float sum = 0.0;
    bool is_number = slot_of(chunk) >= 0;
    for (int h = 0; h < HEADS; h++) {
        const float score = Floats(scores).x[h * a.n_chunk_max + chunk];
        is_number = is_number && (floatBitsToUint(score) & 0x7fffffff) <= 0x7f800000;
        sum += score;
    }
    const uint bits = sum == 0.0 ? 0 : floatBitsToUint(max(sum, -3.402823466e38));  // one zero
    return !is_number ? EMPTY : bits >> 31 != 0 ? ~bits : bits | 0x80000000;
}

uint key(int chunk) {
    return uint(Ints(scores).x[chunk]);
}

// How many keys reach `least`.
int count(uint least) {
    int n = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        n += int(key(chunk) >= least);
    }
    return int(total(float(n)));
}

// The largest key that n keys reach.
uint threshold(int n) {
    uint low = 1, high = 0xffffffff;
    while (low < high) {
        const uint middle = high - (high - low) / 2;
        if (count(middle) >= n) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Of this thread's chunks those above `least`, and the first `rest` of those at it: from segment `at` on, where at >= 0. Returns how many.
int take(uint least, int rest, int at) {
    int n = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        const bool is_taken = key(chunk) > least || key(chunk) == least && rest-- > 0;
        const int slot = is_taken ? slot_of(chunk) : -1;
        if (slot >= 0 && at >= 0) {
            const ivec4 r = given(N_RUN + slot);
            put(at + n, ivec4(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE, r.z, r.w));
        }
        n += int(slot >= 0);
    }
    return n;
}

// The n best; returns how many are in a range.
int choose(int n) {
    for (int chunk = begin; chunk < end; chunk++) {
        Ints(scores).x[chunk] = int(key_of(chunk));
    }
    const uint least = threshold(n);
    int mine = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        mine += int(key(chunk) == least);
    }
    const int rest = n - (least == 0xffffffff ? 0 : count(least + 1)) - sum_before(mine);
    const int n_mine = take(least, rest, -1);
    take(least, rest, N_RUN + sum_before(n_mine));
    return int(total(float(n_mine)));
}

void main() {
    thread = int(gl_LocalInvocationID.x);
    for (int i = int(gl_WorkGroupID.x); i < a.n_slab * N_CHOICE; i += int(gl_NumWorkGroups.x)) {
        const int choice = i % N_CHOICE;
        token = a.first + i / N_CHOICE;
        seq = Ints(a.rows).x[4 * token + 1];
        scores = a.scores + uint64_t(i / N_CHOICE * N_HEAD + choice * HEADS) * uint64_t(4 * a.n_chunk_max);
        to = a.dst + uint64_t(token * N_CHOICE + choice) * uint64_t(16 * N_SEGMENT);
        int n = min(N_FREE, take_part());
        n = n > 0 ? choose(n) : 0;
        for (int s = thread; s < N_SEGMENT; s += THREADS) {
            if (s < N_RUN || s >= N_RUN + n) {
                put(s, s < N_RUN ? given(s) : ivec4(0, 0, 0, seq));
            }
        }
    }
}
