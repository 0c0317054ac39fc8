#version 460
// *select*, second part: the best chunks by their scores, ascending: of a token after its runs, of a tile as a list (../ops/choices.h). A
// workgroup per token and choice, or per tile and KV head; a thread has a part of the chunks to itself.
#include "common.glsl"
#include "exact.glsl"
#define THREADS 64
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int N_HEAD = 1;
layout(constant_id = 1) const int N_CHOICE = 1;
layout(constant_id = 2) const int CHUNK_SIZE = 16;
layout(constant_id = 3) const int N_RUN = 1;
layout(constant_id = 4) const int N_RANGE = 1;
layout(constant_id = 5) const int N_FREE = 1;  // chunks at most
layout(constant_id = 6) const int TILE = 1;    // tokens of a tile
layout(constant_id = 7) const int SHARED = 0;  // 1: of tiles, else of tokens outside of them
layout(constant_id = 8) const int WEIGHS = 0;  // 1: heads add their weights
layout(constant_id = 9) const int CUTOFF = 0;  // of a tile: chunks with values below -CUTOFF are not read
layout(push_constant, std430) uniform Args { LCTX_VK_CHOOSE(LAST) } a;
#include "reduce.glsl"

const int HEADS = N_HEAD / N_CHOICE;  // which choose together
const int N_GIVEN = N_RUN + N_RANGE, N_SEGMENT = N_RUN + N_FREE, GIVEN_SIZE = 4 * TILE * N_GIVEN;
const uint OUT = 0, EMPTY = 1;  // the keys of a chunk below the cutoff, and of one in no range
const float LEAST = -3.402823466e38;

shared int firsts[N_RANGE], ends[N_RANGE];
shared float mosts[HEADS], sums[HEADS];  // of the scores of a head
int thread, token, seq, begin, end;  // of the chunks of this thread
uint64_t scores, to;                 // keys take the place of the scores of the first head

// Return where the segments that the host has written for a tile lie, in numbers: after the first tokens of all.
int given_at(int tile) {
    return (a.n_tile + 3) / 4 * 4 + tile * GIVEN_SIZE;
}

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

float score_of(int h, int chunk) {
    return Floats(scores).x[h * a.n_score + chunk];
}

bool is_number(float x) {
    return (floatBitsToUint(x) & 0x7fffffff) <= 0x7f800000;
}

// The largest score of a head, and the sum of what all are next to it: of its chunks, and of what it reads anyway.
void sum_head(int h) {
    const float reference = score_of(h, a.n_score - 1);
    float most = reference;
    for (int chunk = begin; chunk < end; chunk++) {
        most = slot_of(chunk) >= 0 && score_of(h, chunk) > most ? score_of(h, chunk) : most;
    }
    most = largest(most);
    float sum = thread == 0 ? power_of_2(reference - most) : 0.0;
    for (int chunk = begin; chunk < end; chunk++) {
        sum += slot_of(chunk) >= 0 && is_number(score_of(h, chunk)) ? power_of_2(score_of(h, chunk) - most) : 0.0;
    }
    mosts[h] = most;
    sums[h] = total(sum);
}

// Larger for a better score, as the CPU's lctx_key_of.
uint key_of(int chunk) {
    float x = SHARED != 0 ? LEAST : 0.0;
    bool is_scored = slot_of(chunk) >= 0;
    for (int h = 0; h < HEADS; h++) {
        const float score = score_of(h, chunk);
        is_scored = is_scored && is_number(score);
        x = SHARED != 0 ? max(x, score) : x + (WEIGHS != 0 ? divided(power_of_2(score - mosts[h]), sums[h]) : score);
    }
    const uint bits = x == 0.0 ? 0 : floatBitsToUint(max(x, LEAST));  // one zero
    return SHARED != 0 && x < -float(CUTOFF) ? OUT : !is_scored ? EMPTY : bits >> 31 != 0 ? ~bits : bits | 0x80000000;
}

uint key(int chunk) {
    return uint(Ints(scores).x[chunk]);
}

// Count the keys that reach `least`.
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

void put_chunk(int at, int chunk, int slot) {
    if (SHARED != 0) {
        Ints(to).x[at] = chunk;
    } else {
        const ivec4 r = given(N_RUN + slot);
        put(N_RUN + at, ivec4(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE, r.z, r.w));
    }
}

// Of this thread's chunks those above `least`, and the first `rest` of those at it: from place `at` on, where at >= 0. Returns how many.
int take(uint least, int rest, int at) {
    int n = 0;
    for (int chunk = begin; chunk < end; chunk++) {
        const bool is_taken = key(chunk) > least || key(chunk) == least && rest-- > 0;
        const int slot = is_taken ? slot_of(chunk) : -1;
        if (slot >= 0 && at >= 0) {
            put_chunk(at + n, chunk, slot);
        }
        n += int(slot >= 0);
    }
    return n;
}

// The n best; returns how many are in a range.
int choose(int n) {
    for (int h = 0; WEIGHS != 0 && h < HEADS; h++) {
        sum_head(h);
    }
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
    take(least, rest, sum_before(n_mine));
    return int(total(float(n_mine)));
}

// The other segments of a token that has n chunks.
void fill_segments(int n) {
    for (int s = thread; s < N_SEGMENT; s += THREADS) {
        if (s < N_RUN || s >= N_RUN + n) {
            put(s, s < N_RUN ? given(s) : ivec4(0, 0, 0, seq));
        }
    }
}

// The end of a list of n chunks, and once for a tile what readers need next to its lists.
void fill_list(int n, int tile, bool is_first) {
    for (int i = n + thread; i < N_FREE; i += THREADS) {
        Ints(to).x[i] = -1;
    }
    for (int i = thread; is_first && i < GIVEN_SIZE; i += THREADS) {
        Ints(a.dst).x[given_at(tile) + i] = Ints(a.segs).x[4 * token * N_GIVEN + i];
    }
    if (is_first && thread == 0) {
        Ints(a.dst).x[tile] = token;
    }
}

void main() {
    thread = int(gl_LocalInvocationID.x);
    for (int i = int(gl_WorkGroupID.x); i < a.n_slab * N_CHOICE; i += int(gl_NumWorkGroups.x)) {
        const int choice = i % N_CHOICE, unit = a.first + i / N_CHOICE;  // a token outside of tiles, or a tile
        token = SHARED != 0 ? Ints(a.tiles).x[unit] : token_alone(unit, a.tiles, a.n_tile, TILE);
        seq = Ints(a.rows).x[4 * token + 1];
        scores = a.scores + uint64_t(i / N_CHOICE * N_HEAD + choice * HEADS) * uint64_t(4 * a.n_score);
        const int ahead = SHARED != 0 ? 4 * given_at(a.n_tile) : 0;
        to = a.dst + uint64_t(ahead) + uint64_t(unit * N_CHOICE + choice) * uint64_t(SHARED != 0 ? 4 * N_FREE : 16 * N_SEGMENT);
        int n = min(N_FREE, take_part());
        n = n > 0 ? choose(n) : 0;
        if (SHARED != 0) {
            fill_list(n, unit, choice == 0);
        } else {
            fill_segments(n);
        }
    }
}
