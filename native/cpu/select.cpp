// *select*: every query scores the chunks before it and keeps the best (LongHeads, eq. 3).
//
// Scores are products of summaries with what is made of a query. minmax: sum over channels of max(q, 0) * maximum + min(q, 0) *
// minimum, an upper bound of the best key's. moments: the log of the chunk's expected mass, were its keys normally distributed:
// scale * q . mean + scale^2/2 * q^2 . variance. Both are linear in the summary and have twice its width.
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
    float * k;         // [BLOCK][summary_dim] summaries
    float * few;       // [FEW_COLUMNS][BLOCK] scores of few columns
    float * value;     // [LCTX_VL][n_chunk] scores of the best candidates of each column, best first
    int32_t * order;   // [LCTX_VL][n_chunk] which they are
    int32_t * chosen;  // [n_chunk]
    char * taken;      // [n_chunk_max]

    static size_t n_chunk_max(const lctx_select_args & a) { return a.n_chunk_max + 1; }
    static size_t size(const lctx_select_args & a) {
        const int summary_dim = a.chunks.summary_dim(a.head_dim);
        const size_t n = n_chunk_max(a) * LCTX_MAX_COLUMNS + lctx_columns::n_float(LCTX_MAX_COLUMNS, summary_dim) + a.head_dim +
                         (size_t)summary_dim * (LCTX_BLOCK + 1) + LCTX_FEW_COLUMNS * LCTX_BLOCK +
                         (size_t)a.chunks.n_chunk * (2 * LCTX_VL + 1);
        return GGML_PAD(n * sizeof(float) + n_chunk_max(a), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_select_args & a) {
        const int summary_dim = a.chunks.summary_dim(a.head_dim);
        float * p = (float *)base;
        s = p, p += n_chunk_max(a) * LCTX_MAX_COLUMNS;
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, summary_dim);
        mean = p, p += a.head_dim;
        wide = p, p += summary_dim;
        k = p, p += (size_t)summary_dim * LCTX_BLOCK;
        few = p, p += LCTX_FEW_COLUMNS * LCTX_BLOCK;
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

// What a query makes of itself to meet both halves of a summary; scores of several heads with the same summary add up.
void add_query(const lctx_select_args & a, const float * q, float * wide) {
    const int dim = a.head_dim;
    const bool minmax = a.chunks.representation == LCTX_REPRESENT_MINMAX;
    for (int d = 0; d < dim; d++) {
        wide[d] += minmax ? std::max(q[d], 0.0f) : a.scale * q[d];
        wide[dim + d] += minmax ? std::min(q[d], 0.0f) : q[d] * q[d];
    }
}

// What a block multiplies summary `summary` with, for query heads [head, head + n).
const float * block_query(const lctx_select_args & a, const block & b, int head, int n, const scratch & w) {
    if (a.chunks.by_attention()) {
        mean_query(a, b, head, w.mean);
        return w.mean;
    }
    std::fill_n(w.wide, 2 * a.head_dim, 0.0f);
    for (int h = head; h < head + n; h++) {
        mean_query(a, b, h, w.mean);
        add_query(a, w.mean, w.wide);
    }
    return w.wide;
}

// s[chunk][column] (+)= summary . query
void multiply(const lctx_columns & columns, const char * summaries, size_t stride, int n_chunk, bool add, const scratch & w) {
    for (int i = 0; i < n_chunk; i += LCTX_BLOCK) {
        const int n = std::min(LCTX_BLOCK, n_chunk - i);
        const char * first = summaries + i * stride;
        float * s = w.s + (size_t)i * columns.n_pad;
        if (!columns.few()) {
            lctx_unpack_rows(GGML_TYPE_F16, first, stride, n, columns.dim, w.k, columns.dim);
            lctx_scores(columns, w.k, columns.dim, n, s, add);
            continue;
        }
        lctx_few_scores({GGML_TYPE_F16, stride, first, i + n < n_chunk ? first + n * stride : nullptr}, n, columns.q, columns.n,
                        columns.dim, w.few);
        for (int x = 0; x < n; x++) {
            for (int c = 0; c < columns.n_pad; c++) {
                float & to = s[(size_t)x * columns.n_pad + c];
                to = (add ? to : 0.0f) + (c < columns.n ? w.few[c * LCTX_BLOCK + x] : 0.0f);
            }
        }
    }
}

// For each column the share of each chunk in the attention to chunks before `end` of the column: a softmax down the chunks.
void to_shares(float * s, int n_chunk, int n_pad, const int32_t * end) {
    for (int c = 0; c < n_pad; c += LCTX_VL) {
        lctx_vi v_end;
        memcpy(&v_end, end + c, sizeof(v_end));
        const auto masked = [&](int i) {  // NaN, a chunk without rows, has no share either
            const lctx_vf x = lctx_vload(s + (size_t)i * n_pad + c);
            return (i < v_end) & (x == x) ? x : lctx_vset(-INFINITY);
        };
        lctx_vf most = lctx_vset(-INFINITY), sum = {};
        for (int i = 0; i < n_chunk; i++) {
            most = lctx_vmax(most, masked(i));
        }
        most = most > lctx_vset(-INFINITY) ? most : lctx_vset(0.0f);
        for (int i = 0; i < n_chunk; i++) {
            sum += lctx_vexp(masked(i) - most);
        }
        for (int i = 0; i < n_chunk; i++) {
            const lctx_vf x = lctx_vload(s + (size_t)i * n_pad + c);
            lctx_vstore(s + (size_t)i * n_pad + c, x == x ? lctx_vexp(masked(i) - most) / sum : x);
        }
    }
}

// s[chunk][column] of the blocks of a tile: the mean over the heads that choose together of the share they give a chunk.
void score_shares(const lctx_select_args & a, const block * blocks, int n, int choice, int n_chunk, const scratch & w) {
    const int n_head = heads_per_choice(a), first = choice * n_head, n_pad = lctx_round_up(n, LCTX_VL);
    const lctx_columns columns(w.queries, n * n_head, a.chunks.summary_dim(a.head_dim));
    const int32_t seq = a.rows[blocks[0].first].seq;
    const char * summaries = a.summaries + first / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
    int32_t end[LCTX_MAX_COLUMNS] = {};
    columns.clear();
    for (int c = 0; c < columns.n; c++) {
        columns.set(c, block_query(a, blocks[c / n_head], first + c % n_head, 1, w), 1.0f);
        end[c] = own_chunk(a, blocks[c / n_head].first);
    }
    multiply(columns, summaries, a.summary_stride, n_chunk, false, w);
    to_shares(w.s, n_chunk, columns.n_pad, end);
    for (int i = 0; i < n_chunk; i++) {  // rows become shorter: none is written before it was read
        float row[LCTX_MAX_COLUMNS] = {};
        for (int c = 0; c < columns.n; c++) {
            row[c / n_head] += w.s[(size_t)i * columns.n_pad + c] / (float)n_head;
        }
        memcpy(w.s + (size_t)i * n_pad, row, n_pad * sizeof(float));
    }
}

// s[chunk][column] of the blocks of a tile, summed over the heads that choose together.
void score(const lctx_select_args & a, const block * blocks, int n, int choice, int n_chunk, const scratch & w) {
    const lctx_columns columns(w.queries, n, a.chunks.summary_dim(a.head_dim));
    const int32_t seq = a.rows[blocks[0].first].seq;
    const int first = choice * heads_per_choice(a), heads_per_product = a.chunks.by_attention() ? 1 : heads_per_choice(a);
    for (int head = first; head < first + heads_per_choice(a); head += heads_per_product) {
        const char * summaries = a.summaries + head / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
        columns.clear();
        for (int c = 0; c < n; c++) {
            columns.set(c, block_query(a, blocks[c], head, heads_per_product, w), 1.0f);
        }
        multiply(columns, summaries, a.summary_stride, n_chunk, head > first, w);
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

// How many of the best candidates it takes to read the wanted share of the attention; `unread` is the estimate of the rest.
int n_wanted(const lctx_select_args & a, int own, const ranking & best, const float * scores, int stride, float & unread) {
    const lctx_chunks & c = a.chunks;
    float read = 0.0f;
    for (int i = 0; i < own; i = i + 1 == c.first_candidate() ? c.end_candidate(own) : i + 1) {
        const float share = scores[(size_t)i * stride];
        read += share == share ? share : 0.0f;
    }
    int n = 0;
    for (; n < c.n_free(own) && read < c.mass; n++) {
        read += std::max(best.value[n], 0.0f);
    }
    unread = std::max(0.0f, 1.0f - read);
    return n;
}

// The chunks that a query in chunk `own` reads, ascending in w.chosen; returns their number.
int choose(const lctx_select_args & a, int own, const ranking & best, const float * scores, int stride, const scratch & w, float & unread) {
    const lctx_chunks & c = a.chunks;
    int n = 0;
    unread = 0.0f;
    if (c.reads_all(own)) {
        for (; n <= own; n++) {
            w.chosen[n] = n;
        }
        return n;
    }
    const int first = c.first_candidate(), end = c.end_candidate(own);
    const int n_free = c.mass > 0.0f ? n_wanted(a, own, best, scores, stride, unread) : c.n_free(own), n_best = n_free - c.n_neighbor;
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

// The segments of one token: its chunks, seen from their places.
void write_segments(const lctx_select_args & a, int32_t token, int n, float unread, const scratch & w, lctx_segment * segs) {
    const lctx_chunk_row & at = a.rows[token];
    const int size = a.chunks.chunk_size, own = at.row / size;
    std::fill_n(segs, a.chunks.n_segment(), lctx_segment{0, 0, 0, at.seq});
    int32_t n_row = 0;
    for (int i = 0; i < n; i++) {
        const int row0 = w.chosen[i] * size;
        segs[i] = {row0, std::min(row0 + size, at.row + 1), a.chunks.place(own, w.chosen[i], i, n), at.seq};
        n_row += segs[i].row1 - row0;
    }
    if (a.chunks.mass > 0.0f) {
        lctx_segment & read = segs[a.chunks.n_chunk];
        read.row0 = read.row1 = n_row;
        memcpy(&read.angle, &unread, sizeof(unread));
    }
}

// Up to LCTX_VL columns of a tile: rank their candidates, choose, write.
void select_columns(const lctx_select_args & a, const block * blocks, int n, int choice, float * scores, int stride, const scratch & w) {
    ranking columns[LCTX_VL];
    int32_t end[LCTX_VL] = {};  // 0: nothing to rank
    for (int i = 0; i < LCTX_VL; i++) {
        const int own = i < n ? own_chunk(a, blocks[i].first) : 0;
        columns[i] = {w.value + (size_t)i * a.chunks.n_chunk, w.order + (size_t)i * a.chunks.n_chunk, 0};
        if (!a.chunks.reads_all(own)) {
            end[i] = a.chunks.end_candidate(own);
            columns[i].n = a.chunks.n_free(own);
            ablate(a, a.rows[blocks[i].first].row, choice, own, scores + i, stride);
        }
    }
    rank(scores, stride, a.chunks.first_candidate(), end, columns);
    for (int i = 0; i < n; i++) {
        float unread;
        const int n_chosen = choose(a, own_chunk(a, blocks[i].first), columns[i], scores + i, stride, w, unread);
        for (int32_t t = blocks[i].first; t < blocks[i].first + blocks[i].n; t++) {
            write_segments(a, t, n_chosen, unread, w, a.dst + ((size_t)t * a.n_choice + choice) * a.chunks.n_segment());
        }
    }
}

void select_tile(const lctx_select_args & a, const block * blocks, int n, int choice, const scratch & w) {
    int most = 0;  // chunks that need a score
    for (int i = 0; i < n; i++) {
        const int own = own_chunk(a, blocks[i].first);
        most = std::max(most, a.chunks.reads_all(own) ? 0 : own);
    }
    if (most > 0) {
        (a.chunks.mass > 0.0f ? score_shares : score)(a, blocks, n, choice, most, w);
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
        // blocks of one sequence; shares take a column for every head
        const int most = args.chunks.mass > 0.0f ? LCTX_MAX_COLUMNS / heads_per_choice(args) : LCTX_MAX_COLUMNS;
        block blocks[LCTX_MAX_COLUMNS];
        int n = 0;
        while (n < most && t < args.n_tokens && (n == 0 || args.rows[t].seq == args.rows[blocks[0].first].seq)) {
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
