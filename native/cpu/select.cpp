// *select*: every query scores the chunks before it and keeps the best (LongHeads, eq. 3).
//
// Scores are products of summaries with what is made of a query. minmax: sum over channels of max(q, 0) * maximum + min(q, 0) *
// minimum, an upper bound of the best key's. moments: the log of the chunk's expected mass, were its keys normally distributed:
// scale * q . mean + scale^2/2 * q^2 . variance. Both have twice the width of a query. outlier: the same for all keys but the one that
// is farthest from the mean, and this one by itself: log(exp(scale * q . outlier) + (l - 1) exp(score of the others' moments)).
#include "ablate.h"
#include "columns.h"
#include "ggml-cpu-impl.h"
#include "rank.h"

static_assert(LCTX_MOST_SHARES <= LCTX_MAX_COLUMNS, "a block's heads are scored together");

namespace {

int heads_per_choice(const lctx_select_args & a) {
    return a.n_head / a.n_choice;
}

// How many choices compare their queries with the same summaries: they are made together.
int choices_per_job(const lctx_select_args & a) {
    return a.n_choice > a.n_summary ? a.n_choice / a.n_summary : 1;
}

// Columns of scores that one choice takes: with mass one per head, whose shares are added up afterwards.
int columns_per_choice(const lctx_select_args & a) {
    return a.chunks.mass > 0.0f ? heads_per_choice(a) : 1;
}

struct scratch {
    float * s;         // [n_chunk_max][MAX_COLUMNS]
    uint32_t * keys;   // [lctx_n_key(n_chunk_max)]
    float * queries;   // lctx_columns
    float * narrow;    // lctx_columns of what meets outliers
    float * wide;      // [query_dim]
    float * k;         // [BLOCK][query_dim] summaries
    float * few;       // [FEW_COLUMNS][BLOCK] scores of few columns
    float * parts;     // [2][BLOCK][MAX_COLUMNS] scores of the others and of outliers
    int32_t * best;    // [n_chunk] the best candidates, ascending
    int32_t * order;   // [n_chunk] and the best first
    int32_t * chosen;  // [n_chunk]
    char * taken;      // [n_chunk_max]

    static int n_chunk_max(const lctx_select_args & a) { return a.n_chunk_max + 1; }
    static size_t size(const lctx_select_args & a) {
        const int query_dim = a.chunks.query_dim(a.head_dim);
        const size_t n = (size_t)n_chunk_max(a) * LCTX_MAX_COLUMNS + lctx_n_key(n_chunk_max(a)) +
                         lctx_columns::n_float(LCTX_MAX_COLUMNS, query_dim) + lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim) +
                         (size_t)query_dim * (LCTX_BLOCK + 1) + (LCTX_FEW_COLUMNS + 2 * LCTX_MAX_COLUMNS) * LCTX_BLOCK +
                         (size_t)a.chunks.n_chunk * 3;
        return GGML_PAD(n * sizeof(float) + n_chunk_max(a), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_select_args & a) {
        const int query_dim = a.chunks.query_dim(a.head_dim);
        float * p = (float *)base;
        s = p, p += (size_t)n_chunk_max(a) * LCTX_MAX_COLUMNS;
        keys = (uint32_t *)p, p += lctx_n_key(n_chunk_max(a));
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, query_dim);
        narrow = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim);
        wide = p, p += query_dim;
        k = p, p += (size_t)query_dim * LCTX_BLOCK;
        few = p, p += LCTX_FEW_COLUMNS * LCTX_BLOCK;
        parts = p, p += 2 * LCTX_BLOCK * LCTX_MAX_COLUMNS;
        best = (int32_t *)p, p += a.chunks.n_chunk;
        order = (int32_t *)p, p += a.chunks.n_chunk;
        chosen = (int32_t *)p, p += a.chunks.n_chunk;
        taken = (char *)p;
    }
};

// Tokens [first, first + n_token) of one sequence, and the choices [choice, choice + n_choice) that are made for each of them. Column i is
// token i / n_choice and choice i % n_choice.
struct tile {
    int32_t first, n_token;
    int choice, n_choice;

    int n_column() const { return n_token * n_choice; }
    int32_t token_of(int column) const { return first + column / n_choice; }
    int choice_of(int column) const { return choice + column % n_choice; }
};

int32_t own_chunk(const lctx_select_args & a, int32_t token) {
    return a.rows[token].row / a.chunks.chunk_size;
}

const float * query_of(const lctx_select_args & a, int32_t token, int head) {
    return (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
}

// What a query makes of itself to meet two values of every channel at once; scores of several heads with the same summary add up.
void add_query(const lctx_select_args & a, const float * q, float * wide) {
    const int dim = a.head_dim;
    const bool minmax = a.chunks.representation == LCTX_REPRESENT_MINMAX;
    for (int d = 0; d < dim; d++) {
        wide[d] += minmax ? std::max(q[d], 0.0f) : a.scale * q[d];
        wide[dim + d] += minmax ? std::min(q[d], 0.0f) : q[d] * q[d];
    }
}

// The queries of some columns, as they meet summaries; narrow: and outliers.
struct questions {
    lctx_columns columns, narrow;
    const lctx_select_args & a;
    const scratch & w;

    questions(const lctx_select_args & a, int n, const scratch & w)
        : columns(w.queries, n, a.chunks.query_dim(a.head_dim)), narrow(w.narrow, n, a.head_dim), a(a), w(w) {}
    void clear() const {
        columns.clear();
        narrow.clear();
    }
    // Column c: heads [head, head + n) of a token; n is 1 by attention and with outliers.
    void set(int c, int32_t token, int head, int n) const {
        if (a.chunks.by_attention()) {
            return columns.set(c, query_of(a, token, head), 1.0f);
        }
        std::fill_n(w.wide, 2 * a.head_dim, 0.0f);
        for (int h = head; h < head + n; h++) {
            add_query(a, query_of(a, token, h), w.wide);
        }
        columns.set(c, w.wide, 1.0f);
        if (a.chunks.has_outlier()) {
            narrow.set(c, query_of(a, token, head), a.scale);
        }
    }
};

// n summaries, or parts of them; next: what is read after them, or NULL.
struct block {
    const char *first, *next;
    size_t stride;
    int n;
};

// s[chunk][column] (+)= summary . query
void multiply(const lctx_columns & columns, const block & b, float * s, bool add, const scratch & w) {
    if (!columns.few()) {
        lctx_unpack_rows(GGML_TYPE_F16, b.first, b.stride, b.n, columns.dim, w.k, columns.dim);
        return lctx_scores(columns, w.k, columns.dim, b.n, s, add);
    }
    lctx_few_scores({GGML_TYPE_F16, b.stride, b.first, b.next}, b.n, columns.q, columns.n, columns.dim, w.few);
    for (int x = 0; x < b.n; x++) {
        for (int c = 0; c < columns.n_pad; c++) {
            float & to = s[(size_t)x * columns.n_pad + c];
            to = (add ? to : 0.0f) + (c < columns.n ? w.few[c * LCTX_BLOCK + x] : 0.0f);
        }
    }
}

// s[chunk][column] (+)= log(n_other * exp(others . query) + exp(outlier . query))
void multiply_both(const questions & q, const block & b, float * s, bool add) {
    float *others = q.w.parts, *outlier = q.w.parts + LCTX_BLOCK * LCTX_MAX_COLUMNS;
    multiply(q.columns, b, others, false, q.w);
    multiply(q.narrow, {b.first + q.columns.dim * sizeof(ggml_fp16_t), nullptr, b.stride, b.n}, outlier, false, q.w);
    const lctx_vf log_n = lctx_vset(logf(q.a.chunks.n_other()));
    for (int i = 0; i < b.n * q.columns.n_pad; i += LCTX_VL) {
        const lctx_vf score = lctx_vlog_sum(lctx_vload(others + i) + log_n, lctx_vload(outlier + i));
        lctx_vstore(s + i, add ? lctx_vload(s + i) + score : score);
    }
}

// s[chunk][column] (+)= scores of the first n_chunk chunks
void score_chunks(const questions & q, const char * summaries, int n_chunk, bool add, float * s) {
    const size_t stride = q.a.summary_stride;
    for (int i = 0; i < n_chunk; i += LCTX_BLOCK, s += (size_t)LCTX_BLOCK * q.columns.n_pad) {
        const int n = std::min(LCTX_BLOCK, n_chunk - i);
        const char * first = summaries + i * stride;
        const block b = {first, i + n < n_chunk ? first + n * stride : nullptr, stride, n};
        if (q.a.chunks.has_outlier()) {
            multiply_both(q, b, s, add);
        } else {
            multiply(q.columns, b, s, add, q.w);
        }
    }
}

const char * summaries_of(const lctx_select_args & a, const tile & t, int head) {
    const int32_t seq = a.rows[t.first].seq;
    return a.summaries + head / (a.n_head / a.n_summary) * a.summary_head_stride + seq * a.summary_seq_stride;
}

// s[chunk][column], summed over the heads that choose together.
void score(const lctx_select_args & a, const tile & t, int n_chunk, const scratch & w) {
    const questions q(a, t.n_column(), w);
    const bool adds_before = !a.chunks.by_attention() && !a.chunks.has_outlier();  // heads with one summary: their queries add up
    const int n_head = heads_per_choice(a), n_together = adds_before ? n_head : 1;
    for (int head = 0; head < n_head; head += n_together) {
        q.clear();
        for (int c = 0; c < q.columns.n; c++) {
            q.set(c, t.token_of(c), t.choice_of(c) * n_head + head, n_together);
        }
        score_chunks(q, summaries_of(a, t, t.choice * n_head + head), n_chunk, head > 0, w.s);
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

// s[chunk][column]: the mean over the heads that choose together of the share they give a chunk.
void score_shares(const lctx_select_args & a, const tile & t, int n_chunk, const scratch & w) {
    const int n_head = heads_per_choice(a), n_pad = lctx_round_up(t.n_column(), LCTX_VL);
    const questions q(a, t.n_column() * n_head, w);
    const int n_column = q.columns.n, n_all = q.columns.n_pad;
    int32_t end[LCTX_MAX_COLUMNS] = {};
    q.clear();
    for (int c = 0; c < n_column; c++) {
        const int32_t token = t.token_of(c / n_head);
        q.set(c, token, t.choice_of(c / n_head) * n_head + c % n_head, 1);
        end[c] = own_chunk(a, token);
    }
    score_chunks(q, summaries_of(a, t, t.choice * n_head), n_chunk, false, w.s);
    to_shares(w.s, n_chunk, n_all, end);
    for (int i = 0; i < n_chunk; i++) {  // rows become shorter: none is written before it was read
        float row[LCTX_MAX_COLUMNS] = {};
        for (int c = 0; c < n_column; c++) {
            row[c / n_head] += w.s[(size_t)i * n_all + c] / (float)n_head;
        }
        memcpy(w.s + (size_t)i * n_pad, row, n_pad * sizeof(float));
    }
}

// One column of scores, and its best candidates.
struct column {
    const float * scores;
    int stride, own;
    const int32_t * best;  // ascending
    int n_best;

    float score(int chunk) const { return scores[(size_t)chunk * stride]; }
};

// The best candidates of a column in order, the best first; among equals the lower index.
void put_in_order(const column & c, int32_t * order) {
    const auto value = [&](int32_t i) { return std::isnan(c.score(i)) ? -INFINITY : std::max(c.score(i), -FLT_MAX); };
    std::copy_n(c.best, c.n_best, order);
    std::stable_sort(order, order + c.n_best, [&](int32_t i, int32_t j) { return value(i) > value(j); });
}

// Choose the first n of w.order, and n_neighbor neighbours of theirs, at most one to each in a pass; what no neighbour takes goes to the
// next ones of w.order. So all of w.order's number are chosen.
void choose_with_neighbours(const lctx_select_args & a, const column & c, const scratch & w) {
    const int first = a.chunks.first_candidate(), end = a.chunks.end_candidate(c.own), n_alone = c.n_best - a.chunks.n_neighbor;
    const auto is_open = [&](int i) { return i >= first && i < end && !w.taken[i] && !std::isnan(c.score(i)); };
    int n = 0;
    const auto take = [&](int i) {
        w.chosen[n++] = i;
        w.taken[i] = 1;
    };
    std::fill_n(w.taken, c.own, 0);
    std::for_each_n(w.order, n_alone, take);
    for (int before = -1; before != n && n < c.n_best;) {
        before = n;
        for (int i = 0; i < n_alone && n < c.n_best; i++) {
            const int left = w.order[i] - 1, right = w.order[i] + 1;
            const bool has_left = is_open(left), has_right = is_open(right);
            if (has_left || has_right) {
                take(has_left && (!has_right || c.score(left) >= c.score(right)) ? left : right);
            }
        }
    }
    for (int i = n_alone; n < c.n_best; i++) {
        if (!w.taken[w.order[i]]) {
            take(w.order[i]);
        }
    }
}

// How many of w.order it takes to read the wanted share of the attention; `unread` is the estimate of the rest.
int n_wanted(const lctx_select_args & a, const column & c, const scratch & w, float & unread) {
    float read = 0.0f;
    const auto add = [&](int chunk) { read += std::isnan(c.score(chunk)) ? 0.0f : c.score(chunk); };
    for (int i = 0; i < c.own; i = i + 1 == a.chunks.first_candidate() ? a.chunks.end_candidate(c.own) : i + 1) {
        add(i);  // what is read anyway
    }
    int n = 0;
    for (; n < c.n_best && read < a.chunks.mass; n++) {
        add(w.order[n]);
    }
    unread = std::max(0.0f, 1.0f - read);
    return n;
}

// The chunks that a column reads, ascending in w.chosen; returns their number.
int choose(const lctx_select_args & a, const column & c, const scratch & w, float & unread) {
    const lctx_chunks & chunks = a.chunks;
    unread = 0.0f;
    if (chunks.reads_all(c.own)) {
        std::iota(w.chosen, w.chosen + c.own + 1, 0);
        return c.own + 1;
    }
    int n = c.n_best;
    if (chunks.mass > 0.0f || chunks.n_neighbor > 0) {
        put_in_order(c, w.order);
    }
    if (chunks.mass > 0.0f) {
        n = n_wanted(a, c, w, unread);
        std::copy_n(w.order, n, w.chosen);
    } else if (chunks.n_neighbor > 0) {
        choose_with_neighbours(a, c, w);
    } else {
        std::copy_n(c.best, n, w.chosen);
    }
    for (int i = 0; i < chunks.first_candidate(); i++) {
        w.chosen[n++] = i;
    }
    for (int i = chunks.end_candidate(c.own); i <= c.own; i++) {
        w.chosen[n++] = i;
    }
    std::sort(w.chosen, w.chosen + n);
    return n;
}

// The segments of one token: its chunks, seen from their places.
void write_segments(const lctx_select_args & a, int32_t token, int n, float unread, const scratch & w, lctx_segment * segs) {
    const lctx_chunk_row & at = a.rows[token];
    const int size = a.chunks.chunk_size, own = at.row / size;
    int32_t n_row = 0;
    for (int i = 0; i < n; i++) {
        const int row0 = w.chosen[i] * size;
        segs[i] = {row0, std::min(row0 + size, at.row + 1), a.chunks.place(own, w.chosen[i], i, n), at.seq};
        n_row += segs[i].row1 - row0;
    }
    std::fill(segs + n, segs + a.chunks.n_segment(), lctx_segment{0, 0, 0, at.seq});
    if (a.chunks.mass > 0.0f) {
        lctx_segment & read = segs[a.chunks.n_chunk];
        read.row0 = read.row1 = n_row;
        memcpy(&read.angle, &unread, sizeof(unread));
    }
}

// A query left a share unread. Threads may count for one choice at once.
void count_unread(lctx_unread & to, float share) {
    __atomic_fetch_add(&to.n_query, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&to.sum, (int64_t)(share * lctx_unread::UNIT), __ATOMIC_RELAXED);
}

// Column `index` of a tile: rank its candidates, choose, write.
void select_column(const lctx_select_args & a, const tile & t, int index, const scratch & w) {
    const int32_t token = t.token_of(index);
    const int stride = lctx_round_up(t.n_column(), LCTX_VL), own = own_chunk(a, token);
    column c = {w.s + index, stride, own, w.best, 0};
    if (!a.chunks.reads_all(own)) {
        lctx_ablate(a.chunks.ablation, a.rows[token].row, t.choice_of(index), own, w.s + index, stride);
        c.n_best = a.chunks.n_free(own);
        lctx_take_best(c.scores, stride, a.chunks.first_candidate(), a.chunks.end_candidate(own), c.n_best, w.keys, w.best);
    }
    float unread;
    const int n_chosen = choose(a, c, w, unread);
    const size_t at = (size_t)token * a.n_choice + t.choice_of(index);
    write_segments(a, token, n_chosen, unread, w, a.dst + at * a.chunks.n_segment());
    if (a.unread) {
        count_unread(a.unread[t.choice_of(index)], unread);
    }
}

void select_tile(const lctx_select_args & a, const tile & t, const scratch & w) {
    int most = 0;  // chunks that need a score
    for (int32_t token = t.first; token < t.first + t.n_token; token++) {
        const int own = own_chunk(a, token);
        most = std::max(most, a.chunks.reads_all(own) ? 0 : own);
    }
    if (most > 0) {
        (a.chunks.mass > 0.0f ? score_shares : score)(a, t, most, w);
    }
    for (int i = 0; i < t.n_column(); i++) {
        select_column(a, t, i, w);
    }
}

}  // namespace

size_t lctx_cpu_select_wsize(const lctx_select_args & args, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(args) * n_tasks;
}

void lctx_cpu_select(const ggml_compute_params * params, const lctx_select_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args), args);
    // what few tokens leave of the columns, more choices fill
    const int per_choice = columns_per_choice(args), together = choices_per_job(args);
    const int n_choice = together * per_choice <= LCTX_MAX_COLUMNS ? together : 1;
    const int most = LCTX_MAX_COLUMNS / (per_choice * n_choice);
    int64_t job = 0;
    for (int32_t t = 0, n = 0; t < args.n_tokens; t += n) {
        n = 1;
        while (n < most && t + n < args.n_tokens && args.rows[t + n].seq == args.rows[t].seq) {
            n++;
        }
        for (int choice = 0; choice < args.n_choice; choice += n_choice, job++) {
            if (job % params->nth == params->ith) {
                select_tile(args, {t, n, choice, std::min(n_choice, args.n_choice - choice)}, w);
            }
        }
    }
}
