// *vote*: the queries of the batch vote for the rows that they have read, now that their LSE is known.
//
// A job is one KV head and every n_split-th block of its cells: a row's score has one writer, and its votes come in the order of the
// tokens. Scores are computed once more rather than kept: a product of the queries with K, for the rows whose fate is still open.
#include "ballots.h"
#include "ggml-cpu-impl.h"
#include "walk.h"

namespace {

constexpr int JOBS_PER_THREAD = 4;

// Which jobs of a KV head there are: every n_split-th block of cells.
struct share {
    int split, n_split;
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * s;  // [BLOCK][MAX_COLUMNS]
    lctx_ballots ballots;
    float * queries;
    float * k;  // [BLOCK][head_dim_k]
    float * rotated;
    lctx_spans spans;

    static size_t n_float(const lctx_attend_args & a) {
        return (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS + lctx_ballots::n_float() + lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k) +
               (size_t)a.head_dim_k * (LCTX_BLOCK + 1);
    }
    static size_t size(const lctx_attend_args & a, const lctx_tiling & t) {
        return GGML_PAD(n_float(a) * sizeof(float) + lctx_spans::size(a, t), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const lctx_tiling & t)
        : s((float *)base), ballots(s + (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS), spans(s + n_float(a), t) {
        float * p = s + (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS + lctx_ballots::n_float();
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k);
        k = p, p += (size_t)LCTX_BLOCK * a.head_dim_k;
        rotated = p;
    }
};

float lse_of(const lctx_attend_args & a, int token, int head) {
    return a.lse[(size_t)token * a.n_head + head];
}

bool any_votes(const lctx_vote_args & v, int token0, int n_token) {
    return std::any_of(v.voters + token0, v.voters + token0 + n_token, [](const lctx_voter & voter) { return voter.votes != 0; });
}

// f(picked, n) for the open cells of a span that are this part's, up to LCTX_BLOCK at a time: few of a page may be open, and a product
// with few rows is not worth its name.
template <typename F> void each_open(const lctx_vote_args & v, const lctx_span & span, int32_t border, const share & part, F && f) {
    int32_t picked[2 * LCTX_BLOCK];
    int n = 0;
    for (int cell = span.lo, end; cell < span.hi; cell = end) {
        end = span.block_hi(cell / LCTX_BLOCK);
        if (lctx_is_mine(cell, part.split, part.n_split)) {
            n += lctx_pick_open(v.retain, span.cells.held, border, cell, end - cell, picked + n);
        }
        if (n >= LCTX_BLOCK) {
            f(picked, LCTX_BLOCK);
            n -= LCTX_BLOCK;
            memmove(picked, picked + LCTX_BLOCK, n * sizeof(int32_t));
        }
    }
    if (n > 0) {
        f(picked, n);
    }
}

// Scores of n picked cells: w.s, [n][n_pad].
void score_keys(const lctx_attend_args & a, const lctx_span & span, const lctx_columns & columns, const int32_t * picked, int n,
                const scratch & w) {
    int64_t step = a.head_dim_k;
    const float * k = w.k;
    if (picked[n - 1] - picked[0] == n - 1 && picked[n - 1] / LCTX_BLOCK == picked[0] / LCTX_BLOCK) {
        const lctx_stored rows = lctx_stored_keys(a.cache, span.cells, span.near, picked[0], n, span.head_kv, span.seq, a.head_dim_k, w.k);
        k = lctx_unpack(rows, n, a.head_dim_k, w.k, &step, a.head_dim_k);
    } else {
        lctx_gather_keys(a.cache, span.cells, span.near, picked, n, span.head_kv, span.seq, a.head_dim_k, w.k);
    }
    lctx_scores(columns, k, step, n, w.s, false);
    lctx_softcap(w.s, (size_t)n * columns.n_pad, a.params.softcap);
}

// Ballots and queries of the readers, which are the columns.
void load_readers(const lctx_vote_args & v, const lctx_tile & tile, const lctx_span & span, const lctx_columns & columns,
                  const scratch & w) {
    const lctx_attend_args & a = v.attend;
    w.ballots.clear();
    for (int i = 0; i < span.n; i++) {
        const lctx_reader & reader = span.readers[i];
        const int token = tile.token(reader.column);
        if (v.voters[token].votes) {
            const lctx_segment * segs = a.segs + reader.seg / a.n_seg * a.n_seg;
            w.ballots.set(i, lse_of(a, token, tile.head(reader.column)), lctx_span_rows(segs, a.n_seg), v.voters[token].row);
        }
    }
    span.load_queries(a, tile, columns, w.rotated);
}

void vote_span(const lctx_vote_args & v, const lctx_tile & tile, const lctx_span & span, const scratch & w, const share & part) {
    const lctx_attend_args & a = v.attend;
    const lctx_columns columns(w.queries, span.n, a.head_dim_k);
    const int32_t border = v.retain.border(v.voters[tile.token0].row);  // of all tokens: no ubatch crosses one
    bool loaded = false;
    each_open(v, span, border, part, [&](const int32_t * picked, int n) {
        if (!loaded) {
            load_readers(v, tile, span, columns, w);
            loaded = true;
        }
        score_keys(a, span, columns, picked, n, w);
        if (span.is_partial(picked[0], picked[n - 1] + 1 - picked[0])) {
            span.mask(a, n, w.s, columns.n_pad, 1, [&](int i) { return picked[i]; });
        }
        lctx_count_votes(span.cells.held, v.retain.score, w.ballots, w.s, span.n, columns.n_pad, picked, n);
    });
}

// The tiles of a KV head, in the order of their tokens.
void vote_head(const lctx_vote_args & v, const lctx_tiling & t, int head_kv, const scratch & w, const share & part) {
    lctx_keep_scores(v.attend.cache, v.voters, v.attend.n_tokens, head_kv, part.split, part.n_split);
    for (int i = 0; i < t.tiles_per_head(); i++) {
        const lctx_tile tile(t, head_kv, i % t.n_head_tile, i / t.n_head_tile);
        if (any_votes(v, tile.token0, tile.n_token)) {
            lctx_invert(v.attend, t, tile, w.spans);
            lctx_each_span(v.attend, t, head_kv, w.spans, [&](const lctx_span & span) { vote_span(v, tile, span, w, part); });
        }
    }
}

}  // namespace

size_t lctx_cpu_vote_wsize(const lctx_vote_args & args, int n_tasks) {
    const lctx_attend_args & a = args.attend;
    return LCTX_CACHE_LINE + scratch::size(a, lctx_tiling(a)) * n_tasks + (a.n_tokens + 2) * sizeof(int32_t);
}

void lctx_cpu_vote(const ggml_compute_params * params, const lctx_vote_args & args) {
    const lctx_attend_args & a = args.attend;
    lctx_tiling t(a);
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(a, t), a, t);
    int32_t * cut = (int32_t *)(base + params->nth * scratch::size(a, t));
    if (params->ith == 0) {
        t.cut_tokens(a, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    t.use_cut(cut);
    const int n_split = params->nth > 1 ? (int)lctx_ceil_div(JOBS_PER_THREAD * params->nth, a.n_head_kv) : 1;
    for (int job = params->ith; job < a.n_head_kv * n_split; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        vote_head(args, t, job / n_split, w, {job % n_split, n_split});
    }
}
