// *select*: every query scores the chunks before it and keeps the best (LongHeads, eq. 3).
//
// With extremes as summaries the score is an upper bound of the best key's: sum over channels of max(q, 0) * maximum +
// min(q, 0) * minimum, a product of twice the width. Scores of a tile are one small matrix product per query head.
#include "columns.h"
#include "ggml-cpu-impl.h"

#include <cfloat>

namespace {

int heads_per_choice(const lctx_select_args & a) {
    return a.n_head / a.n_choice;
}

struct scratch {
    float * s;         // [n_chunk_max][MAX_COLUMNS]
    float * queries;   // lctx_columns
    float * mean;      // [head_dim]
    float * wide;      // [summary_dim]
    float * value;     // [LCTX_VL][n_chunk] scores of the best candidates of each column, best first
    int32_t * order;   // [LCTX_VL][n_chunk] which they are
    int32_t * chosen;  // [n_chunk]
    char * taken;      // [n_chunk_max]

    static size_t n_chunk_max(const lctx_select_args & a) { return a.n_chunk_max + 1; }
    static size_t size(const lctx_select_args & a) {
        const int summary_dim = a.chunks.summary_dim(a.head_dim);
        const size_t n = n_chunk_max(a) * LCTX_MAX_COLUMNS + lctx_columns::n_float(LCTX_MAX_COLUMNS, summary_dim) + a.head_dim +
                         summary_dim + (size_t)a.chunks.n_chunk * (2 * LCTX_VL + 1);
        return GGML_PAD(n * sizeof(float) + n_chunk_max(a), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_select_args & a) {
        const int summary_dim = a.chunks.summary_dim(a.head_dim);
        float * p = (float *)base;
        s = p, p += n_chunk_max(a) * LCTX_MAX_COLUMNS;
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, summary_dim);
        mean = p, p += a.head_dim;
        wide = p, p += summary_dim;
        value = p, p += (size_t)LCTX_VL * a.chunks.n_chunk;
        order = (int32_t *)p, p += (size_t)LCTX_VL * a.chunks.n_chunk;
        chosen = (int32_t *)p, p += a.chunks.n_chunk;
        taken = (char *)p;
    }
};

// Tokens [first, first + n) that choose together: neighbours of one sequence in one aligned block.
struct block {
    int32_t first, n;
};

bool same_block(const lctx_select_args & a, int32_t t, int32_t u) {
    const int32_t size = a.chunks.select_block;
    return a.rows[t].seq == a.rows[u].seq && a.rows[t].row / size == a.rows[u].row / size;
}

int32_t own_chunk(const lctx_select_args & a, int32_t token) {
    return a.rows[token].row / a.chunks.chunk_size;
}

// The mean query of a block.
void mean_query(const lctx_select_args & a, const block & b, int head, float * mean) {
    std::fill_n(mean, a.head_dim, 0.0f);
    for (int32_t t = b.first; t < b.first + b.n; t++) {
        const float * q = (const float *)(a.q + head * a.q_head_stride + t * a.q_token_stride);
        for (int d = 0; d < a.head_dim; d++) {
            mean[d] += q[d] / (float)b.n;
        }
    }
}

// Positive and negative parts of a query, to meet maximum and minimum; scores of several heads with the same summary add up.
void add_parts(const float * q, int dim, float * wide) {
    for (int d = 0; d < dim; d++) {
        wide[d] += std::max(q[d], 0.0f);
        wide[dim + d] += std::min(q[d], 0.0f);
    }
}

// What a block multiplies summary `summary` with, for query heads [head, head + n).
const float * block_query(const lctx_select_args & a, const block & b, int head, int n, const scratch & w) {
    if (!a.chunks.minmax) {
        mean_query(a, b, head, w.mean);
        return w.mean;
    }
    std::fill_n(w.wide, 2 * a.head_dim, 0.0f);
    for (int h = head; h < head + n; h++) {
        mean_query(a, b, h, w.mean);
        add_parts(w.mean, a.head_dim, w.wide);
    }
    return w.wide;
}

// s[chunk][column] of the blocks of a tile, summed over the heads that choose together.
void score(const lctx_select_args & a, const block * blocks, int n, int choice, int n_chunk, const scratch & w) {
    const lctx_columns columns(w.queries, n, a.chunks.summary_dim(a.head_dim));
    const int32_t seq = a.rows[blocks[0].first].seq;
    const int first = choice * heads_per_choice(a), heads_per_product = a.chunks.minmax ? heads_per_choice(a) : 1;
    for (int head = first; head < first + heads_per_choice(a); head += heads_per_product) {
        const char * summaries = a.summaries + head / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
        columns.clear();
        for (int c = 0; c < n; c++) {
            columns.set(c, block_query(a, blocks[c], head, heads_per_product, w), 1.0f);
        }
        lctx_scores(columns, (const float *)summaries, (int64_t)(a.summary_stride / sizeof(float)), n_chunk, w.s, head > first);
    }
}

// A number that looks random, the same for the same inputs (splitmix64).
float noise(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t z = (a * 0x9e3779b97f4a7c15u) ^ (b * 0xbf58476d1ce4e5b9u) ^ (c * 0x94d049bb133111ebu);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)((z ^ (z >> 31)) >> 40);
}

void ablate(const lctx_select_args & a, int32_t row, int choice, int own, float * scores, int stride) {
    for (int i = 0; i < own; i++) {
        float & score = scores[(size_t)i * stride];
        switch (a.chunks.ablation) {
            case LCTX_ABLATE_RANDOM:
            case LCTX_ABLATE_RANDOM_ALL: score = noise(row, choice, i); break;
            case LCTX_ABLATE_LAST:       score = -score; break;
            default:                     break;
        }
    }
}

// The best candidates of one column so far, sorted; among equals the lower index is first, since candidates come in that order.
struct ranking {
    float * value;
    int32_t * order;
    int n;  // places

    void insert(int kept, float score, int32_t candidate) const {
        int at = std::min(kept, n - 1);
        for (; at > 0 && score > value[at - 1]; at--) {
            value[at] = value[at - 1];
            order[at] = order[at - 1];
        }
        value[at] = score;
        order[at] = candidate;
    }
};

bool any(lctx_vi lanes) {
    int32_t sum = 0;
    for (int i = 0; i < LCTX_VL; i++) {
        sum |= lanes[i];
    }
    return sum != 0;
}

// Rank the candidates of LCTX_VL columns at once: a row of scores is looked at closely only when one of them is above the worst
// that its column keeps. end: of the candidates of each column.
void rank(const float * scores, int stride, int first, const int32_t * end, const ranking * columns) {
    float least[LCTX_VL];
    int32_t ends[LCTX_VL], most = 0;
    for (int i = 0; i < LCTX_VL; i++) {
        least[i] = columns[i].n > 0 ? -INFINITY : INFINITY;
        ends[i] = end[i];
        most = std::max(most, end[i]);
    }
    lctx_vi v_end;
    memcpy(&v_end, ends, sizeof(v_end));
    for (int32_t c = first; c < most; c++) {
        lctx_vf v = lctx_vload(scores + (size_t)c * stride);
        v = v > lctx_vset(-FLT_MAX) ? v : lctx_vset(-FLT_MAX);  // NaN, a chunk without rows, never wins; every place is taken
        const lctx_vi above = (v > lctx_vload(least)) & (c < v_end);
        if (!any(above)) {
            continue;
        }
        for (int i = 0; i < LCTX_VL; i++) {
            if (above[i]) {
                columns[i].insert(c - first, v[i], c);
                least[i] = c - first + 1 < columns[i].n ? -INFINITY : columns[i].value[columns[i].n - 1];
            }
        }
    }
}

// Give n_neighbor places to the neighbours of the best chunks, at most one to each in a pass; returns how many are chosen.
int add_neighbours(const lctx_select_args & a, int first, int end, int n_best, const ranking & best, const float * scores, int stride,
                   const scratch & w) {
    int n = n_best;
    const int n_all = n_best + a.chunks.n_neighbor;
    const auto is_empty = [&](int i) { return std::isnan(scores[(size_t)i * stride]); };  // its rows were evicted
    const auto is_open = [&](int i) { return i >= first && i < end && !w.taken[i] && !is_empty(i); };
    for (int before = -1; before != n && n < n_all;) {
        before = n;
        for (int i = 0; i < n_best && n < n_all; i++) {
            const int left = best.order[i] - 1, right = best.order[i] + 1;
            const bool has_left = is_open(left), has_right = is_open(right);
            if (has_left || has_right) {
                const bool take_left = has_left && (!has_right || scores[(size_t)left * stride] >= scores[(size_t)right * stride]);
                w.chosen[n] = take_left ? left : right;
                w.taken[w.chosen[n++]] = 1;
            }
        }
    }
    return n;
}

// The chunks that a query in chunk `own` reads, ascending in w.chosen; returns their number.
int choose(const lctx_select_args & a, int own, const ranking & best, const float * scores, int stride, const scratch & w) {
    const lctx_chunks & c = a.chunks;
    int n = 0;
    if (own < c.n_chunk) {
        for (; n <= own; n++) {
            w.chosen[n] = n;
        }
        return n;
    }
    const int first = c.first_candidate(), end = c.end_candidate(own), n_free = c.n_free(own), n_best = n_free - c.n_neighbor;
    std::fill_n(w.taken, own, 0);
    for (; n < n_best; n++) {
        w.chosen[n] = best.order[n];
        w.taken[best.order[n]] = 1;
    }
    n = add_neighbours(a, first, end, n_best, best, scores, stride, w);
    for (int i = n_best; n < n_free; i++) {  // what no neighbour took
        if (!w.taken[best.order[i]]) {
            w.chosen[n++] = best.order[i];
        }
    }
    for (int i = 0; i < first; i++) {
        w.chosen[n++] = i;
    }
    for (int i = end; i <= own; i++) {
        w.chosen[n++] = i;
    }
    std::sort(w.chosen, w.chosen + n);
    return n;
}

// The segments of one token: packed, or grouped with the near window apart.
void write_segments(const lctx_select_args & a, int32_t token, int n, const scratch & w, lctx_segment * segs) {
    const lctx_chunk_row & at = a.rows[token];
    const int size = a.chunks.chunk_size, near_row = a.chunks.near_row(at.row);
    const bool grouped = a.chunks.near_window > 0;
    std::fill_n(segs, a.chunks.n_segment(), lctx_segment{0, 0, at.angle, at.seq});
    lctx_segment * near = segs + a.chunks.near_segment();
    for (int i = 0; i < n; i++) {
        const int row0 = w.chosen[i] * size, row1 = std::min(row0 + size, at.row + 1), far1 = std::min(row1, near_row);
        segs[i] = {row0, std::max(row0, far1), at.angle + (grouped ? LCTX_ANGLE_FAR : n - 1 - i), at.seq};
        if (row1 > near_row) {
            *near++ = {std::max(row0, near_row), row1, at.angle + LCTX_ANGLE_EXACT, at.seq};
        }
    }
}

// Up to LCTX_VL columns of a tile: rank their candidates, choose, write.
void select_columns(const lctx_select_args & a, const block * blocks, int n, int choice, float * scores, int stride, const scratch & w) {
    ranking columns[LCTX_VL];
    int32_t end[LCTX_VL] = {};  // 0: nothing to rank
    for (int i = 0; i < LCTX_VL; i++) {
        const int own = i < n ? own_chunk(a, blocks[i].first) : 0;
        columns[i] = {w.value + (size_t)i * a.chunks.n_chunk, w.order + (size_t)i * a.chunks.n_chunk, 0};
        if (own >= a.chunks.n_chunk) {
            end[i] = a.chunks.end_candidate(own);
            columns[i].n = a.chunks.n_free(own);
            ablate(a, a.rows[blocks[i].first].row, choice, own, scores + i, stride);
        }
    }
    rank(scores, stride, a.chunks.first_candidate(), end, columns);
    for (int i = 0; i < n; i++) {
        const int n_chosen = choose(a, own_chunk(a, blocks[i].first), columns[i], scores + i, stride, w);
        for (int32_t t = blocks[i].first; t < blocks[i].first + blocks[i].n; t++) {
            write_segments(a, t, n_chosen, w, a.dst + ((size_t)t * a.n_choice + choice) * a.chunks.n_segment());
        }
    }
}

void select_tile(const lctx_select_args & a, const block * blocks, int n, int choice, const scratch & w) {
    int most = 0;  // chunks that need a score
    for (int i = 0; i < n; i++) {
        const int own = own_chunk(a, blocks[i].first);
        most = std::max(most, own < a.chunks.n_chunk ? 0 : own);
    }
    if (most > 0) {
        score(a, blocks, n, choice, most, w);
    }
    for (int i = 0; i < n; i += LCTX_VL) {
        select_columns(a, blocks + i, std::min(LCTX_VL, n - i), choice, w.s + i, lctx_round_up(n, LCTX_VL), w);
    }
}

}  // namespace

size_t lctx_cpu_select_wsize(const lctx_select_args & args, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(args) * n_tasks;
}

void lctx_cpu_select(const ggml_compute_params * params, const lctx_select_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args), args);
    int64_t job = 0;
    for (int32_t t = 0; t < args.n_tokens;) {
        // up to MAX_COLUMNS blocks of one sequence
        block blocks[LCTX_MAX_COLUMNS];
        int n = 0;
        while (n < LCTX_MAX_COLUMNS && t < args.n_tokens && (n == 0 || args.rows[t].seq == args.rows[blocks[0].first].seq)) {
            blocks[n] = {t, 1};
            while (++t < args.n_tokens && same_block(args, t, blocks[n].first)) {
                blocks[n].n++;
            }
            n++;
        }
        for (int choice = 0; choice < args.n_choice; choice++, job++) {
            if (job % params->nth == params->ith) {
                select_tile(args, blocks, n, choice, w);
            }
        }
    }
}
