#version 460
// *select*, first part: scores of the chunks in far ranges by their keys in few bits (../ops/index.h). Of a token, what each head wants of
// its own ranges (../ops/summaries.h); of a tile, the value of a chunk for the queries of a head that are compared (../cpu/tile-scores.h).
// A workgroup per token or tile, head, and every n-th CHUNKS of the chunks.
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
layout(constant_id = 9) const int BITS = 2;        // of the index
layout(constant_id = 10) const int N_CODE = 16;    // bytes of codes of a row
layout(constant_id = 11) const int TILE = 1;       // tokens of a tile
layout(constant_id = 12) const int SHARED = 0;     // 1: of tiles, else of tokens outside of them
layout(constant_id = 13) const int STEP = 1;       // one of that many tokens of a tile is compared
layout(constant_id = 14) const int COLUMNS = 1;    // that many at a time
layout(constant_id = 15) const int REFERS = 0;     // 1: with the rows that a query reads anyway
layout(constant_id = 16) const int NEAR_MASK = 0;  // runs that are not in the index
layout(push_constant, std430) uniform Args { LCTX_VK_SCORE(LAST) } a;

const float NONE = -1e30;
const int CHUNKS = 32;
const int GROUPS = THREADS / GROUP_ROWS;  // of rows, which are scored together
const int OF_CHUNK = CHUNK_SIZE / GROUP_ROWS;
const int WIDTH = DIM_K + 4;

shared float buf[COLUMNS * DIM_K];  // the queries
shared int bytes[COLUMNS * WIDTH];  // the same, rounded; 0 after the last channel
shared float query_scales[COLUMNS];
shared float products[THREADS];
shared int row0[COLUMNS], row1[COLUMNS], angles[COLUMNS];
#include "reduce.glsl"
#include "rotate.glsl"

int thread, token, head, seq, before;  // before: tokens of the tile that were compared
float references[COLUMNS], mosts[COLUMNS], sums[COLUMNS];
uint64_t scores;

bool is_finite(float x) {
    return (floatBitsToUint(x) & 0x7fffffff) < 0x7f800000;
}

// Every head compares other tokens of a tile (../cpu/scores.h).
int token_of(int column) {
    return token + (STEP - head % GROUP % STEP) % STEP + (before + column) * STEP;
}

void look_up(int segment) {
    barrier();
    if (thread < COLUMNS) {
        const int at = 4 * (token_of(thread) * (N_RUN + N_RANGE) + segment);
        row0[thread] = Ints(a.segs).x[at];
        row1[thread] = Ints(a.segs).x[at + 1];
        angles[thread] = Ints(a.segs).x[at + 2];
    }
    barrier();
}

// ---- queries ----

// A query that is not finite makes every score NaN.
void round_query(int column) {
    const int from = column * DIM_K;
    float most = 0.0, wrong = 0.0;
    for (int d = thread; d < DIM_K; d += THREADS) {
        buf[from + d] *= root_of(HADAMARD);
        most = max(most, abs(buf[from + d]));
        wrong = is_finite(buf[from + d]) ? wrong : 1.0;
    }
    most = largest(most);
    const bool is_number = largest(wrong) == 0.0;
    const float inverse = most > 0.0 ? divided(127.0, most) : 0.0;
    for (int d = thread; d < WIDTH; d += THREADS) {
        bytes[column * WIDTH + d] = d < DIM_K && is_number ? int(roundEven(buf[from + d] * inverse)) : 0;
    }
    query_scales[column] = is_number ? divided(1.44269504 * a.scale * most, 127.0) : uintBitsToFloat(0x7fc00000);
}

// The queries of the columns at their angles, in bytes.
void load_queries() {
    for (int i = thread; i < COLUMNS * DIM_K; i += THREADS) {
        const int c = i / DIM_K;
        const uint64_t q = a.q + uint64_t(head) * uint64_t(a.q_head_stride) + uint64_t(token_of(c)) * uint64_t(a.q_token_stride);
        buf[i] = rotated(q, i % DIM_K, a.angles + uint64_t(angles[c]) * uint64_t(4 * N_DIMS));
    }
    transform(COLUMNS * DIM_K, HADAMARD);
    for (int c = 0; c < COLUMNS; c++) {
        round_query(c);
    }
    barrier();
}

// ---- rows ----

int level_of(uint code) {
    return BITS == 1 ? 2 * int(code) - 1 : 7 * int(code) - (code > 1 ? 11 : 10);
}

// The queries times a row of the index.
void multiply(int row, out float x[COLUMNS]) {
    const int page = seq * a.page_seq_stride + head / GROUP * a.page_head_stride + row / PAGE_ROWS, lane = row % GROUP_ROWS;
    const uint64_t at = group_at(a.index, a.index_row, a.pages, page, row);
    int n[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        n[c] = 0;
    }
    for (int word = 0; word < N_CODE / 4; word++) {
        const uint codes = uint(Ints(codes_at(at)).x[word * GROUP_ROWS + lane]);
        for (int part = 0; part * N_CODE + 4 * word < DIM_K; part++) {
            for (int i = 0; i < 4; i++) {
                const int level = level_of(codes >> (8 * i + part * BITS) & (1 << BITS) - 1);
                for (int c = 0; c < COLUMNS; c++) {
                    n[c] += level * bytes[c * WIDTH + part * N_CODE + 4 * word + i];
                }
            }
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        x[c] = float(n[c]) * half_at(at, lane) * query_scales[c];
    }
}

// The score of a row, of a tile the best of its columns.
float score_row(int row) {
    float x[COLUMNS], best = NONE;
    multiply(row, x);
    for (int c = 0; c < COLUMNS; c++) {
        best = is_finite(query_scales[c]) ? max(best, x[c] - references[c]) : best;
    }
    return SHARED != 0 ? best : x[0];
}

// ---- what is read anyway ----

// The rows of a run that each column reads: this thread's part.
void add_run() {
    int begin = 0x7fffffff, end = 0;
    for (int c = 0; c < COLUMNS; c++) {
        begin = row0[c] < row1[c] ? min(begin, row0[c]) : begin;
        end = row0[c] < row1[c] ? max(end, row1[c]) : end;
    }
    if (begin >= end) {
        return;
    }
    load_queries();
    for (int row = begin + thread; row < end; row += THREADS) {
        float x[COLUMNS];
        multiply(row, x);
        for (int c = 0; c < COLUMNS; c++) {
            if (row0[c] <= row && row < row1[c]) {
                const float most = max(mosts[c], x[c]);
                sums[c] = sums[c] * power_of_2(mosts[c] - most) + power_of_2(x[c] - most);
                mosts[c] = most;
            }
        }
    }
}

// The log of the sum over the rows that each column reads anyway.
void refer() {
    for (int c = 0; c < COLUMNS; c++) {
        mosts[c] = NONE;
        sums[c] = 0.0;
    }
    for (int run = 0; run < N_RUN; run++) {
        if ((NEAR_MASK >> run & 1) == 0) {
            look_up(run);
            add_run();
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        const float most = largest(mosts[c]), sum = total(sums[c] * power_of_2(mosts[c] - most));
        references[c] = most > NONE ? most + log_2(sum) : 0.0;
    }
}

// ---- chunks ----

// Add the rows of group i: the largest, and the sum of what they are next to it.
void add_group(int i, inout float most, inout float sum) {
    float v[GROUP_ROWS], top = NONE;
    for (int row = 0; row < GROUP_ROWS; row++) {
        v[row] = products[i * GROUP_ROWS + row];
        top = max(top, v[row]);
    }
    const float both = max(most, top);
    if (SHARED == 0) {
        for (int row = 0; row < GROUP_ROWS; row++) {
            v[row] = power_of_2(v[row] - top);
        }
        for (int half_n = GROUP_ROWS / 2; half_n > 0; half_n /= 2) {
            for (int row = 0; row < half_n; row++) {
                v[row] += v[row + half_n];
            }
        }
        sum = sum * power_of_2(most - both) + v[0] * power_of_2(top - both);
    }
    most = both;
}

// Of the chunk of this thread, of n from `first` on.
float score_chunks(int first, int n) {
    const int end = (first + n) * OF_CHUNK;
    float most = NONE, sum = 0.0;
    for (int group = first * OF_CHUNK; group < end; group += GROUPS) {
        const int row = group * GROUP_ROWS + thread;
        barrier();
        products[thread] = row < end * GROUP_ROWS ? score_row(row) : 0.0;
        barrier();
        for (int i = 0; i < GROUPS; i++) {
            if (thread < n && (group + i) / OF_CHUNK == first + thread) {
                add_group(i, most, sum);
            }
        }
    }
    return SHARED != 0 ? most : most + log_2(sum);
}

void put(int chunk, float score) {
    if (SHARED != 0) {
        Floats(scores).x[chunk] = before > 0 ? max(Floats(scores).x[chunk], score) : score;
    } else {
        Ints(scores).x[chunk] = is_finite(query_scales[0]) ? floatBitsToInt(score) : 0x7fc00000;
    }
}

void score_range(int first, int end) {
    for (int chunk = first + int(gl_WorkGroupID.z) * CHUNKS; chunk < end; chunk += int(gl_NumWorkGroups.z) * CHUNKS) {
        const int n = min(CHUNKS, end - chunk);
        const float score = score_chunks(chunk, n);
        if (thread < n) {
            put(chunk + thread, score);
        }
    }
}

void score_columns() {
    bool refers = REFERS != 0;
    for (int slot = 0; slot < N_RANGE; slot++) {
        look_up(N_RUN + slot);
        if (row0[0] < row1[0]) {  // all tokens of a tile have the same chunks in it
            if (refers) {
                refer();
                look_up(N_RUN + slot);
                refers = false;
            }
            load_queries();
            score_range(row0[0] / CHUNK_SIZE, row1[0] / CHUNK_SIZE);
        }
    }
}

void main() {
    thread = int(gl_LocalInvocationID.x);
    head = int(gl_WorkGroupID.y);
    for (int i = int(gl_WorkGroupID.x); i < a.n_slab; i += int(gl_NumWorkGroups.x)) {
        token = SHARED != 0 ? Ints(a.tiles).x[a.first + i] : token_alone(a.first + i, a.tiles, a.n_tile, TILE);
        seq = Ints(a.rows).x[4 * token + 1];
        scores = a.scores + uint64_t(i * N_HEAD + head) * uint64_t(4 * a.n_score);
        for (before = 0; before < (SHARED != 0 ? TILE / STEP : 1); before += COLUMNS) {
            score_columns();
        }
        if (REFERS != 0 && SHARED == 0 && thread == 0 && gl_WorkGroupID.z == 0) {
            Floats(scores).x[a.n_score - 1] = references[0];
        }
    }
}
