// *vote*: the queries of the batch vote for the rows that they have read, now that their LSE is known.
//
// A job is one KV head and every n_split-th block of its cells: a row's score has one writer, and its votes come in the
// order of the tokens. What a tile of chosen chunks reads is looked up once for all its jobs, so these take tile after
// tile together. Scores are computed once more rather than kept: a product of the queries with K, for the rows whose
// fate is still open.
#include "ballots.h"
#include "ggml-cpu-impl.h"
#include "walk.h"

namespace {

constexpr int JOBS_PER_THREAD = 4;

// Gives a job of a KV head every n_split-th block of cells.
struct split {
    int index, n_split;

    int first(int block) const { return lctx_first_mine(block, index, n_split); }
    // Return whether any of cells [lo, hi) is here.
    bool has(int lo, int hi) const { return lo < hi && first(lo / LCTX_BLOCK) * LCTX_BLOCK < hi; }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * s;  // [BLOCK][MAX_COLUMNS]
    lctx_ballots ballots;
    float * queries;
    float * k;  // [BLOCK][head_dim_k]
    float * rotated;

    static size_t n_float(const lctx_attend_args & a) {
        return (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS + lctx_ballots::n_float() +
               lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k) + (size_t)a.head_dim_k * (LCTX_BLOCK + 1);
    }
    static size_t size(const lctx_attend_args & a) { return GGML_PAD(n_float(a) * sizeof(float), LCTX_CACHE_LINE); }
    scratch(char * base, const lctx_attend_args & a)
        : s((float *)base), ballots(s + (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS) {
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
    return std::any_of(v.voters + token0, v.voters + token0 + n_token,
                       [](const lctx_voter & voter) { return voter.votes != 0; });
}

// f(picked, n) for the open cells of an item that are this split's, up to LCTX_BLOCK at a time: few of a page may be
// open, and a product with few rows is not worth its name.
template <typename F>
void each_open(const lctx_vote_args & v, const lctx_item & item, int32_t border, const split & mine, F && f) {
    int32_t picked[2 * LCTX_BLOCK];
    int n = 0;
    for (int block = mine.first(item.first_block()); block * LCTX_BLOCK < item.hi; block += mine.n_split) {
        const int cell = item.block_lo(block);
        n += lctx_pick_open(v.retain, item.cells.held, border, cell, item.block_hi(block) - cell, picked + n);
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
void score_keys(const lctx_attend_args & a, const lctx_item & item, const lctx_columns & columns,
                const int32_t * picked, int n, const scratch & w) {
    int64_t step = a.head_dim_k;
    const float * k = w.k;
    if (picked[n - 1] - picked[0] == n - 1 && picked[n - 1] / LCTX_BLOCK == picked[0] / LCTX_BLOCK) {
        const lctx_stored rows =
            lctx_stored_keys(a.cache, item.cells, item.near, picked[0], n, item.head_kv, item.seq, a.head_dim_k, w.k);
        k = lctx_unpack(rows, n, a.head_dim_k, w.k, &step, a.head_dim_k);
    } else {
        lctx_gather_keys(a.cache, item.cells, item.near, picked, n, item.head_kv, item.seq, a.head_dim_k, w.k);
    }
    lctx_scores(columns, k, step, n, w.s, false);
    lctx_softcap(w.s, (size_t)n * columns.n_pad, a.params.softcap);
}

// Ballots and queries of the readers, which are the columns.
void load_readers(const lctx_vote_args & v, const lctx_tile & tile, const lctx_item & item,
                  const lctx_columns & columns, const scratch & w) {
    const lctx_attend_args & a = v.attend;
    w.ballots.clear();
    for (int i = 0; i < item.n; i++) {
        const lctx_reader & reader = item.readers[i];
        const int token = tile.token(reader.column);
        if (v.voters[token].votes) {
            const lctx_segment * segs = a.segs + reader.seg / a.n_seg * a.n_seg;
            w.ballots.set(i, lse_of(a, token, tile.head(reader.column)), lctx_rows_read(segs, a.n_seg),
                          v.voters[token].row);
        }
    }
    item.load_queries(a, tile, columns, w.rotated);
}

void vote_item(const lctx_vote_args & v, const lctx_tile & tile, const lctx_item & item, const scratch & w,
               const split & mine) {
    const lctx_attend_args & a = v.attend;
    const lctx_columns columns(w.queries, item.n, a.head_dim_k);
    const int32_t border = v.retain.border(v.voters[tile.token0].row);  // of all tokens: no ubatch crosses one
    bool loaded = false;
    each_open(v, item, border, mine, [&](const int32_t * picked, int n) {
        if (!loaded) {
            load_readers(v, tile, item, columns, w);
            loaded = true;
        }
        score_keys(a, item, columns, picked, n, w);
        if (item.is_partial(picked[0], picked[n - 1] + 1 - picked[0])) {
            item.mask(a, n, w.s, columns.n_pad, 1, [&](int i) { return picked[i]; });
        }
        lctx_count_votes(item.cells.held, v.retain.score, w.ballots, w.s, item.n, columns.n_pad, picked, n);
    });
}

lctx_tile tile_of(const lctx_tiling & t, int head_kv, int index) {
    return {t, head_kv, index % t.n_head_tile, index / t.n_head_tile};
}

void vote_tile(const lctx_vote_args & v, const lctx_tiling & t, const lctx_tile & tile, const lctx_tile_plan & plan,
               const scratch & w, const split & mine) {
    for (int i = 0; i < plan.n; i++) {
        if (mine.has(plan.lo[i], plan.hi[i])) {
            lctx_each_item(v.attend, t, tile.head_kv, plan, i, i + 1,
                           [&](const lctx_item & item) { vote_item(v, tile, item, w, mine); });
        }
    }
}

// The tiles of a KV head, in the order of their tokens; the job looks up what they read.
void vote_head(const lctx_vote_args & v, const lctx_tiling & t, int head_kv, const lctx_tile_plan & plan,
               const scratch & w, const split & mine) {
    for (int i = 0; i < t.tiles_per_head(); i++) {
        const lctx_tile tile = tile_of(t, head_kv, i);
        if (any_votes(v, tile.token0, tile.n_token)) {
            lctx_invert(v.attend, t, tile, plan);
            vote_tile(v, t, tile, plan, w, mine);
        }
    }
}

// Cuts the work, and sizes the buffers of what tiles read.
struct schedule : lctx_tiling {
    int n_split;    // of a KV head
    bool together;  // they share what a tile reads: where nothing is chosen it has few items
    int n_buffer;   // one for each KV head then, else for each thread
    size_t buffer_size;

    schedule(const lctx_attend_args & a, int n_thread)
        : lctx_tiling(a),
          n_split(n_thread > 1 ? (int)lctx_ceil_div(JOBS_PER_THREAD * n_thread, a.n_head_kv) : 1),
          together(n_split > 1 && a.params.chunk_size > 0),
          n_buffer(together ? a.n_head_kv : n_thread),
          buffer_size(GGML_PAD(lctx_tile_plan::size(a, *this), LCTX_CACHE_LINE)) {}
    size_t size() const { return n_buffer * buffer_size; }
    lctx_tile_plan plan(char * buffers, int i) const { return {buffers + i * buffer_size, *this}; }
};

// f(KV head, mine): the jobs of all KV heads, taken by threads as they come. Between barriers.
template <typename F> void each_job(const ggml_compute_params * params, int n_head_kv, int n_split, F && f) {
    for (int job = params->ith; job < n_head_kv * n_split; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        f(job / n_split, split{job % n_split, n_split});
    }
}

// Tile after tile of all KV heads.
void vote_together(const ggml_compute_params * params, const lctx_vote_args & v, const schedule & g, const scratch & w,
                   char * buffers) {
    const int n_head_kv = v.attend.n_head_kv;
    for (int i = 0; i < g.tiles_per_head(); i++) {
        const lctx_tile first = tile_of(g, 0, i);
        if (!any_votes(v, first.token0, first.n_token)) {
            continue;
        }
        for (int head = params->ith; head < n_head_kv; head += params->nth) {
            lctx_invert(v.attend, g, tile_of(g, head, i), g.plan(buffers, head));
        }
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
        each_job(params, n_head_kv, g.n_split, [&](int head, const split & mine) {
            vote_tile(v, g, tile_of(g, head, i), g.plan(buffers, head), w, mine);
        });
        ggml_barrier(params->threadpool);
    }
}

// Return arguments for the same votes in which the lists of tiles, if there are any, are written out for every token at
// `segs`.
lctx_vote_args expanded(const lctx_vote_args & args, const lctx_segment * segs) {
    const bool has_tiles = args.attend.params.tiles.n_tile > 0;
    return {has_tiles ? lctx_expanded_args(args.attend, segs) : args.attend, args.voters, args.retain};
}

// segs: [n_tokens][n_choice][n_seg] of `all`.
void expand(const ggml_compute_params * params, const lctx_attend_args & from, const lctx_attend_args & all,
            lctx_segment * segs) {
    for (int32_t token = params->ith; token < all.n_tokens && from.params.tiles.n_tile > 0; token += params->nth) {
        for (int32_t i = 0; i < all.n_choice * all.n_seg; i++) {
            segs[(int64_t)token * all.n_choice * all.n_seg + i] = lctx_expanded(
                from.choices(), from.params.n_run, from.params.chunk_size, token, i / all.n_seg, i % all.n_seg);
        }
    }
    ggml_barrier(params->threadpool);
}

}  // namespace

size_t lctx_cpu_vote_wsize(const lctx_vote_args & args, int n_tasks) {
    const lctx_attend_args a = expanded(args, nullptr).attend;
    return LCTX_CACHE_LINE + lctx_expanded_size(args.attend) + scratch::size(a) * n_tasks +
           schedule(a, n_tasks).size() + lctx_tiling::cut_size(a) * sizeof(int32_t);
}

void lctx_cpu_vote(const ggml_compute_params * params, const lctx_vote_args & given) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    auto * segs = (lctx_segment *)base;
    base += lctx_expanded_size(given.attend);
    const lctx_vote_args args = expanded(given, segs);
    const lctx_attend_args & a = args.attend;
    expand(params, given.attend, a, segs);
    schedule g(a, params->nth);
    const scratch w(base + params->ith * scratch::size(a), a);
    char * buffers = base + params->nth * scratch::size(a);
    int32_t * cut = (int32_t *)(buffers + g.size());
    if (params->ith == 0) {
        g.cut_tokens(a, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.use_cut(cut);
    const auto keep_scores = [&](int head, const split & mine) {
        lctx_keep_scores(a.cache, args.voters, a.n_tokens, head, mine.index, mine.n_split);
    };
    if (g.together) {
        each_job(params, a.n_head_kv, g.n_split, keep_scores);
        ggml_barrier(params->threadpool);  // before jobs are numbered again
        vote_together(params, args, g, w, buffers);
    } else {
        each_job(params, a.n_head_kv, g.n_split, [&](int head, const split & mine) {
            keep_scores(head, mine);
            vote_head(args, g, head, g.plan(buffers, params->ith), w, mine);
        });
    }
}
