// *select*: every query scores the chunks before it and keeps the best (LongHeads, eq. 3).
#include "ablate.h"
#include "ggml-cpu-impl.h"
#include "scores.h"

static_assert(LCTX_MOST_SHARES <= LCTX_MAX_COLUMNS, "a block's heads are scored together");

namespace {

// One column of scores, and its best candidates.
struct column {
    const float * scores;
    int own;
    const int32_t * best;  // ascending
    int n_best;

    float score(int chunk) const { return scores[chunk]; }
};

// The best candidates of a column in order, the best first; among equals the lower index.
void put_in_order(const column & c, int32_t * order) {
    const auto value = [&](int32_t i) { return std::isnan(c.score(i)) ? -INFINITY : std::max(c.score(i), -FLT_MAX); };
    std::copy_n(c.best, c.n_best, order);
    std::stable_sort(order, order + c.n_best, [&](int32_t i, int32_t j) { return value(i) > value(j); });
}

// Choose the first n of w.order, and n_neighbor neighbours of theirs, at most one to each in a pass; what no neighbour takes goes to the
// next ones of w.order. So all of w.order's number are chosen.
void choose_with_neighbours(const lctx_select_args & a, const column & c, const lctx_select_scratch & w) {
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
int n_wanted(const lctx_select_args & a, const column & c, const lctx_select_scratch & w, float & unread) {
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
int choose(const lctx_select_args & a, const column & c, const lctx_select_scratch & w, float & unread) {
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
void write_segments(const lctx_select_args & a, int32_t token, int n, float unread, const lctx_select_scratch & w, lctx_segment * segs) {
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
void select_column(const lctx_select_args & a, const lctx_select_tile & t, int index, float * scores, const lctx_select_scratch & w) {
    const int32_t token = t.token_of(index);
    const int own = lctx_own_chunk(a, token);
    column c = {scores, own, w.best, 0};
    if (!a.chunks.reads_all(own)) {
        lctx_ablate(a.chunks.ablation, a.rows[token].row, t.choice_of(index), own, scores);
        c.n_best = a.chunks.n_free(own);
        lctx_take_best(scores, a.chunks.first_candidate(), a.chunks.end_candidate(own), c.n_best, w.keys, w.best);
    }
    float unread;
    const int n_chosen = choose(a, c, w, unread);
    const size_t at = (size_t)token * a.n_choice + t.choice_of(index);
    write_segments(a, token, n_chosen, unread, w, a.dst + at * a.chunks.n_segment());
    if (a.unread) {
        count_unread(a.unread[t.choice_of(index)], unread);
    }
}

// Chunks of a tile that need a score.
int n_scored(const lctx_select_args & a, const lctx_select_tile & t) {
    int most = 0;
    for (int32_t token = t.first; token < t.first + t.n_token; token++) {
        const int own = lctx_own_chunk(a, token);
        most = std::max(most, a.chunks.reads_all(own) ? 0 : own);
    }
    return most;
}

// turned[column][chunk] of LCTX_VL columns that stand side by side: every cache line of theirs is read once.
void turn(const float * s, int stride, int n_chunk, float * turned) {
    for (int i = 0; i < n_chunk; i += LCTX_VL) {
        lctx_vf v[LCTX_VL];
        for (int x = 0; x < LCTX_VL; x++) {
            v[x] = lctx_vload(s + (size_t)std::min(i + x, n_chunk - 1) * stride);
        }
        lctx_vtranspose(v);
        for (int c = 0; c < LCTX_VL; c++) {
            lctx_vstore(turned + (size_t)c * lctx_n_key(n_chunk) + i, v[c]);
        }
    }
}

// The scores of column `index`, one after the other: as they lie, or turned. begins: the columns beside it were not turned just before.
float * scores_of(const lctx_select_args & a, const lctx_select_tile & t, int index, bool begins, float * s,
                  const lctx_select_scratch & w) {
    const lctx_score_steps step = lctx_steps_of(a, t.n_column());
    if (step.of_chunk == 1) {
        return s + (size_t)index * step.of_column;
    }
    const int n = n_scored(a, t);
    if (begins) {
        turn(s + index / LCTX_VL * LCTX_VL, step.of_chunk, n, w.turned);
    }
    return w.turned + (size_t)(index % LCTX_VL) * lctx_n_key(n);
}

void select_tile(const lctx_select_args & a, const lctx_select_tile & t, const lctx_select_scratch & w) {
    const int n = n_scored(a, t);
    if (n > 0) {
        lctx_score(a, t, {0, n, -1}, w.s, w);
    }
    if (n > 0 && a.chunks.mass > 0.0f) {
        lctx_to_choices(a, t, n, w.s);
    }
    for (int i = 0; i < t.n_column(); i++) {
        select_column(a, t, i, scores_of(a, t, i, i % LCTX_VL == 0, w.s, w), w);
    }
}

// How choices are cut into tiles.
struct cut {
    int n_choice;  // of a tile: what few tokens leave of the columns, more choices fill
    int n_token;   // of a tile, at most
    int n_tile;    // of every token

    explicit cut(const lctx_select_args & a) {
        const int per_choice = lctx_columns_per_choice(a), together = lctx_choices_per_tile(a);
        n_choice = together * per_choice <= LCTX_MAX_COLUMNS ? together : 1;
        n_token = LCTX_MAX_COLUMNS / (per_choice * n_choice);
        n_tile = (a.n_choice + n_choice - 1) / n_choice;
    }
    lctx_select_tile at(const lctx_select_args & a, int32_t first, int32_t n, int index) const {
        const int choice = index * n_choice;
        return {first, n, choice, std::min(n_choice, a.n_choice - choice)};
    }
    // Few tokens: there are fewer tiles than keep the threads busy, so that all threads score every one.
    bool is_shared(const lctx_select_args & a, int nth) const { return nth > 1 && (int64_t)a.n_tokens * n_tile < 4 * nth; }
    // Floats for the scores of one such tile, of one token.
    size_t n_float(const lctx_select_args & a) const { return lctx_n_score(a, n_choice * lctx_columns_per_choice(a)); }
};

// A thread for every tile.
void select_tiles(const ggml_compute_params * params, const lctx_select_args & a, const cut & c, const lctx_select_scratch & w) {
    int64_t job = 0;
    for (int32_t t = 0, n = 0; t < a.n_tokens; t += n) {
        n = 1;
        while (n < c.n_token && t + n < a.n_tokens && a.rows[t + n].seq == a.rows[t].seq) {
            n++;
        }
        for (int i = 0; i < c.n_tile; i++, job++) {
            if (job % params->nth == params->ith) {
                select_tile(a, c.at(a, t, n, i), w);
            }
        }
    }
}

// All threads for every token: they score PART chunks at a time, and then make one choice at a time. s: [n_tokens * n_tile][n_float]
void select_shared(const ggml_compute_params * params, const lctx_select_args & a, const cut & c, float * s,
                   const lctx_select_scratch & w) {
    constexpr int PART = LCTX_VL;  // these and the next ones fit in the first-level cache
    const int n_job = a.n_tokens * c.n_tile, n_part = (int)lctx_ceil_div(a.n_chunk_max, PART);
    const auto tile_of = [&](int job) { return c.at(a, job / c.n_tile, 1, job % c.n_tile); };
    const auto scores_of_job = [&](int job) { return s + job * c.n_float(a); };
    for (int64_t i = params->ith; i < (int64_t)n_job * n_part; i += params->nth) {
        const int job = (int)(i / n_part), first = (int)(i % n_part) * PART;
        const lctx_select_tile t = tile_of(job);
        const int n = n_scored(a, t), next = first + PART * params->nth;
        const lctx_chunk_range r = {first, std::min(first + PART, n), next < n ? next : -1};
        if (r.first < r.end) {
            lctx_score(a, t, r, scores_of_job(job), w);
        }
    }
    ggml_barrier(params->threadpool);
    if (a.chunks.mass > 0.0f) {
        for (int job = params->ith; job < n_job; job += params->nth) {
            lctx_to_choices(a, tile_of(job), n_scored(a, tile_of(job)), scores_of_job(job));
        }
        ggml_barrier(params->threadpool);
    }
    for (int i = params->ith; i < n_job * c.n_choice; i += params->nth) {
        const lctx_select_tile t = tile_of(i / c.n_choice);
        if (i % c.n_choice < t.n_column()) {
            select_column(a, t, i % c.n_choice, scores_of(a, t, i % c.n_choice, true, scores_of_job(i / c.n_choice), w), w);
        }
    }
}

}  // namespace

size_t lctx_cpu_select_wsize(const lctx_select_args & args, int n_tasks) {
    const cut c(args);
    const size_t shared = c.is_shared(args, n_tasks) ? c.n_float(args) * args.n_tokens * c.n_tile * sizeof(float) : 0;
    return LCTX_CACHE_LINE + lctx_select_scratch::size(args) * n_tasks + shared;
}

void lctx_cpu_select(const ggml_compute_params * params, const lctx_select_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const lctx_select_scratch w(base + params->ith * lctx_select_scratch::size(args), args);
    const cut c(args);
    if (c.is_shared(args, params->nth)) {
        return select_shared(params, args, c, (float *)(base + params->nth * lctx_select_scratch::size(args)), w);
    }
    select_tiles(params, args, c, w);
}
