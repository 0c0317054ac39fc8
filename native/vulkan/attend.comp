#version 460
// *attend*: attention of a tile of queries and heads over its segments, with an online softmax over the blocks (FlashAttention,
// arXiv 2205.14135, algorithm 1).
//
// A workgroup has one KV head, COLUMNS of its query heads (those of one token, then of the next), and every n_split-th block of 64 rows
// that they read, which is a page. Keys are read by a thread for each row and half of the head, values by one for each element: one read
// serves all heads of a group.
//
// Columns of a tile of tokens that share their chunks (../ops/choices.h) read the runs of each, then for each far range the chunks of one
// list: their rows in a line are what blocks are of.
#include "common.glsl"
#define THREADS 128
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int TYPE_K = 0;
layout(constant_id = 1) const int TYPE_V = 0;
layout(constant_id = 2) const int DIM_K = 64;
layout(constant_id = 3) const int DIM_V = 64;
layout(constant_id = 4) const int N_HEAD_KV = 1;
layout(constant_id = 5) const int N_DIMS = 0;
layout(constant_id = 6) const int ROPE_MODE = 0;
layout(constant_id = 7) const int HADAMARD_K = 0;
layout(constant_id = 8) const int NEAR_ROWS = 0;
layout(constant_id = 9) const int GROUP = 1;     // query heads of a KV head
layout(constant_id = 10) const int COLUMNS = 1;  // a power of two
layout(constant_id = 11) const int LANES = 128;  // threads for the elements of a value: a power of two, COLUMNS * LANES >= THREADS
layout(constant_id = 12) const int N_CHOICE = 1;  // heads with segments of their own
layout(constant_id = 13) const int SHARED = 0;    // 1: tokens of tiles, else those outside of them
layout(constant_id = 14) const int TILE = 1;      // tokens of a tile
layout(constant_id = 15) const int CHUNK_SIZE = 1;
layout(constant_id = 16) const int N_RUN = 0;
layout(constant_id = 17) const int N_GIVEN = 0;  // runs and far ranges
layout(constant_id = 18) const int N_LIST = 0;   // chunks of a list at most
layout(push_constant, std430) uniform Args { LCTX_VK_ATTEND(LAST) } a;

const float NONE = -1e30;  // the score of a row that is not read
const int HALVES = 2, OCTET = 8;
const int PER_COLUMN = THREADS / COLUMNS;  // threads for the softmax of one
const int GROUPS = THREADS / LANES;        // threads for an element of a value
const int MY_COLUMNS = COLUMNS / GROUPS;
const int MY_DIMS = (DIM_V + LANES - 1) / LANES;

shared float buf[COLUMNS * DIM_K];  // queries
shared float scores[HALVES * COLUMNS * PAGE_ROWS];
shared float parts[THREADS];
shared float factors[COLUMNS];
shared int tokens[COLUMNS], row0[COLUMNS], row1[COLUMNS], angles[COLUMNS], seqs[COLUMNS];
shared int cells[PAGE_ROWS];  // where the rows of a block of a list lie in the pools
#include "rotate.glsl"

int thread, head_kv, first, n_column;  // of this thread, of its workgroup
uint64_t firsts, given, list;          // of tiles, of the workgroup's tile
bool is_listed = false;                // whether rows are those of the list
float m = NONE, l = 0.0;               // of the column whose softmax this thread takes part in: the largest score, a part of the sum
float o[MY_COLUMNS * MY_DIMS];

int head_of(int column) {
    return head_kv * GROUP + (first + column) % GROUP;
}

// Of the chunks of the list, which ascend up to the first -1, those before a row, in rows.
int listed_before(int row) {
    int low = 0, high = N_LIST;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (uint(Ints(list).x[middle]) < uint(row / CHUNK_SIZE)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low * CHUNK_SIZE;
}

// A segment of a column; of a far range what the list has of it.
ivec4 segment_of(int column, int seg) {
    const int index = (first + column) / GROUP, choice = head_of(column) * N_CHOICE / (N_HEAD_KV * GROUP);
    const uint64_t segs = SHARED != 0 ? given : a.segs;
    const int at = 4 * (SHARED != 0 ? index * N_GIVEN + seg : (index * N_CHOICE + choice) * a.n_seg + seg);
    ivec4 s = ivec4(Ints(segs).x[at], Ints(segs).x[at + 1], Ints(segs).x[at + 2], Ints(segs).x[at + 3]);
    if (is_listed) {
        s.xy = s.x < s.y ? ivec2(listed_before(s.x), listed_before(s.y)) : ivec2(0);
    }
    return s;
}

// Look up what the columns read, and from which angle.
void look_up(int seg) {
    is_listed = SHARED != 0 && seg >= N_RUN;
    barrier();
    if (thread < COLUMNS) {
        const ivec4 s = segment_of(min(thread, n_column - 1), seg);
        row0[thread] = s.x;
        row1[thread] = thread < n_column ? s.y : 0;
        angles[thread] = s.z;
        seqs[thread] = s.w;
    }
    barrier();
}

bool reads_any() {
    bool any = false;
    for (int c = 0; c < COLUMNS; c++) {
        any = any || row0[c] < row1[c];
    }
    return any;
}

void turn_queries() {
    const float scale = a.scale * root_of(HADAMARD_K);
    for (int i = thread; i < COLUMNS * DIM_K; i += THREADS) {
        const int c = i / DIM_K;
        buf[i] = 0.0;
        if (row0[c] < row1[c]) {
            const uint64_t q = a.q + uint64_t(head_of(c)) * uint64_t(a.q_head_stride) + uint64_t(tokens[c]) * uint64_t(a.q_token_stride);
            buf[i] = scale * rotated(q, i % DIM_K, a.angles + uint64_t(angles[c]) * uint64_t(4 * N_DIMS));
        }
    }
    transform(COLUMNS * DIM_K, HADAMARD_K);
}

uint64_t row_at(uint64_t rows, int row, int size) {
    return is_listed ? rows + uint64_t(cells[row]) * uint64_t(size) : rows + uint64_t(row * size);
}

void score_rows(uint64_t k) {
    const int row = thread % PAGE_ROWS, part = thread / PAGE_ROWS;
    const uint64_t at = row_at(k, row, a.k_row);
    float sums[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        sums[c] = 0.0;
    }
    for (int d = part * OCTET; d < DIM_K; d += HALVES * OCTET) {
        float x[OCTET];
        for (int i = 0; i < OCTET; i++) {
            x[i] = element(TYPE_K, at, d + i);
        }
        for (int c = 0; c < COLUMNS; c++) {
            for (int i = 0; i < OCTET; i++) {
                sums[c] += buf[c * DIM_K + d + i] * x[i];
            }
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        scores[(part * COLUMNS + c) * PAGE_ROWS + row] = sums[c];
    }
}

float capped(float score) {
    const float t = exp(-2.0 * abs(score));
    return a.softcap != 0.0 ? a.softcap * sign(score) * (1.0 - t) / (1.0 + t) : score;
}

// The weights of a block of rows for each column, in place of its scores.
void weigh(int block, int seq) {
    const int c = thread / PER_COLUMN, mine = thread % PER_COLUMN;
    const bool reads = seqs[c] == seq;
    float most = NONE;
    for (int row = mine; row < PAGE_ROWS; row += PER_COLUMN) {
        const int at = c * PAGE_ROWS + row, cell = block * PAGE_ROWS + row;
        const float score = capped(scores[at] + scores[COLUMNS * PAGE_ROWS + at]);
        scores[at] = reads && row0[c] <= cell && cell < row1[c] ? score : NONE;
        most = max(most, scores[at]);
    }
    parts[thread] = most;
    barrier();
    most = m;
    for (int i = 0; i < min(PER_COLUMN, PAGE_ROWS); i++) {
        most = max(most, parts[c * PER_COLUMN + i]);
    }
    const float factor = exp(m - most);
    m = most;
    l *= factor;
    if (mine == 0) {
        factors[c] = factor;
    }
    for (int row = mine; row < PAGE_ROWS; row += PER_COLUMN) {
        const int at = c * PAGE_ROWS + row;
        scores[at] = scores[at] == NONE ? 0.0 : exp(scores[at] - m);
        l += scores[at];
    }
    barrier();
}

// Add the values of rows [begin, end) with their weights. What is not read may be NaN.
void add_values(uint64_t v, int begin, int end) {
    const int lane = thread % LANES, group = thread / LANES;
    for (int c = 0; c < MY_COLUMNS; c++) {
        for (int i = 0; i < MY_DIMS; i++) {
            o[c * MY_DIMS + i] *= factors[c * GROUPS + group];
        }
    }
    for (int row = begin; row < end; row++) {
        for (int i = 0; i < MY_DIMS; i++) {
            const int d = i * LANES + lane;
            const float x = d < DIM_V ? element(TYPE_V, row_at(v, row, a.v_row), d) : 0.0;
            for (int c = 0; c < MY_COLUMNS; c++) {
                const float weight = scores[(c * GROUPS + group) * PAGE_ROWS + row];
                o[c * MY_DIMS + i] += weight != 0.0 ? weight * x : 0.0;
            }
        }
    }
}

// Return whether a column of a sequence reads of these rows.
bool is_read(int seq, int begin, int end) {
    bool any = false;
    for (int c = 0; c < COLUMNS; c++) {
        any = any || seqs[c] == seq && max(row0[c], begin) < min(row1[c], end);
    }
    return any;
}

// Find the rows of a block of the list.
void find_cells(int pages, int block, int begin, int end) {
    if (thread < PAGE_ROWS) {
        const int at = clamp(block * PAGE_ROWS + thread, begin, end - 1);  // what is not read has a place as well
        const int row = Ints(list).x[at / CHUNK_SIZE] * CHUNK_SIZE + at % CHUNK_SIZE;
        cells[thread] = max(Ints(a.pages).x[pages + row / PAGE_ROWS], 0) * PAGE_ROWS + row % PAGE_ROWS;
    }
}

void attend_block(int block, int seq, bool is_near, int begin, int end) {
    const int pages = seq * a.page_seq_stride + head_kv * a.page_head_stride, row = block * PAGE_ROWS;
    uint64_t k = is_listed ? a.k_pool : page_at(a.k_pool, a.k_row, a.pages, pages + block);
    const uint64_t v = is_listed ? a.v_pool : page_at(a.v_pool, a.v_row, a.pages, pages + block);
    if (is_near) {
        k = a.near + uint64_t(seq) * uint64_t(a.near_seq_stride) + uint64_t(head_kv) * uint64_t(a.near_head_stride) +
            uint64_t(row % NEAR_ROWS) * uint64_t(a.k_row);
    }
    barrier();
    if (is_listed) {
        find_cells(pages, block, begin, end);
        barrier();
    }
    score_rows(k);
    barrier();
    weigh(block, seq);
    add_values(v, max(begin - row, 0), min(end - row, PAGE_ROWS));
}

// The columns of one sequence, of which c is the first; returns the blocks that were counted.
int attend_sequence(int c, bool is_near, int n_block) {
    const int seq = seqs[c];
    int begin = 0x7fffffff, end = 0;
    for (int i = c; i < COLUMNS; i++) {
        if (seqs[i] == seq && row0[i] < row1[i]) {
            begin = min(begin, row0[i]);
            end = max(end, row1[i]);
        }
    }
    for (int block = begin / PAGE_ROWS; block * PAGE_ROWS < end; block++, n_block++) {
        if (n_block % a.n_split == int(gl_WorkGroupID.z) && is_read(seq, block * PAGE_ROWS, (block + 1) * PAGE_ROWS)) {
            attend_block(block, seq, is_near, begin, end);
        }
    }
    return n_block;
}

bool is_first_of_sequence(int c) {
    bool first = true;
    for (int i = 0; i < c; i++) {
        first = first && seqs[i] != seqs[c];
    }
    return first;
}

// With n_split > 1 a part of each row, its largest score and its sum in front; else rows.
void put() {
    barrier();
    parts[thread] = l;
    if (thread % PER_COLUMN == 0) {
        factors[thread / PER_COLUMN] = m;
    }
    barrier();
    const bool whole = a.n_split == 1;
    const int lane = thread % LANES, group = thread / LANES, size = whole ? DIM_V : DIM_V + 2, n_row = a.n_tokens * N_HEAD_KV * GROUP;
    for (int i = 0; i < MY_COLUMNS; i++) {
        const int c = i * GROUPS + group;
        if (c >= n_column) {
            break;
        }
        float sum = 0.0;
        for (int part = 0; part < PER_COLUMN; part++) {
            sum += parts[c * PER_COLUMN + part];
        }
        const int row = tokens[c] * N_HEAD_KV * GROUP + head_of(c);
        Floats to = Floats(a.dst + uint64_t(whole ? row : row * a.n_split + int(gl_WorkGroupID.z)) * uint64_t(4 * size));
        for (int j = 0, d = lane; d < DIM_V; j++, d += LANES) {
            to.x[d] = !whole ? o[i * MY_DIMS + j] : sum != 0.0 ? o[i * MY_DIMS + j] / sum : 0.0;
        }
        if (lane == 0 && !whole) {
            to.x[DIM_V] = factors[c];
            to.x[DIM_V + 1] = sum;
        }
        if (lane == 0 && whole && a.lse != 0) {
            Floats(a.dst + uint64_t(n_row) * uint64_t(4 * DIM_V)).x[row] = sum != 0.0 ? factors[c] + log(sum) : uintBitsToFloat(0xff800000);
        }
    }
}

// Find which tokens the columns are of, and where what they read is written.
void find_tokens() {
    const int n_alone = a.n_tokens - a.n_tile * TILE;
    first = int(gl_WorkGroupID.x) * COLUMNS;
    n_column = min(n_alone * GROUP - first, COLUMNS);
    firsts = a.segs + uint64_t(n_alone * N_CHOICE) * uint64_t(16 * a.n_seg);
    if (SHARED != 0) {
        const int tile = first / (TILE * GROUP);
        const uint64_t all = firsts + uint64_t((a.n_tile + 3) / 4 * 16);
        first -= tile * TILE * GROUP;
        n_column = COLUMNS;
        given = all + uint64_t(tile * TILE) * uint64_t(16 * N_GIVEN);
        list = all + uint64_t(a.n_tile * TILE) * uint64_t(16 * N_GIVEN) + uint64_t(tile * N_HEAD_KV + head_kv) * uint64_t(4 * N_LIST);
        if (thread < COLUMNS) {
            tokens[thread] = Ints(firsts).x[tile] + (first + thread) / GROUP;
        }
    } else if (thread < COLUMNS) {
        tokens[thread] = token_alone((first + thread) / GROUP, firsts, a.n_tile, TILE);
    }
}

void main() {
    thread = int(gl_LocalInvocationID.x);
    head_kv = int(gl_WorkGroupID.y);
    find_tokens();
    for (int i = 0; i < MY_COLUMNS * MY_DIMS; i++) {
        o[i] = 0.0;
    }
    int n_block = 0, turned = -1;
    for (int seg = 0; seg < (SHARED != 0 ? N_GIVEN : a.n_seg); seg++) {
        look_up(seg);
        if (!reads_any()) {
            continue;
        }
        if (COLUMNS > 1 || angles[0] != turned) {  // chosen chunks are seen from a few angles
            turned = angles[0];
            turn_queries();
        }
        for (int c = 0; c < n_column; c++) {
            if (is_first_of_sequence(c)) {
                n_block = attend_sequence(c, !is_listed && seg < 32 && (a.near_mask >> seg & 1) != 0, n_block);
            }
        }
    }
    put();
}
