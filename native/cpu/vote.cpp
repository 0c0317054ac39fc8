// *vote*: the queries of the batch vote for the rows that they have read, now that their LSE is known.
//
// A job is one KV head and every n_split-th block of its slots: a row's score has one writer, and its votes come in the order of the
// tokens. Scores are computed once more rather than kept: a product of the queries with K, for the rows whose fate is still open.
#include "ballots.h"
#include "ggml-cpu-impl.h"
#include "lists.h"
#include "tiles.h"

namespace {

constexpr int JOBS_PER_THREAD = 4;

int n_split_of(const lctx_attend_args & a, int n_thread) {
    return n_thread > 1 ? (int)lctx_ceil_div(JOBS_PER_THREAD * n_thread, a.n_head_kv) : 1;
}

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * s;  // [BLOCK][MAX_COLUMNS]
    lctx_ballots ballots;
    float * queries;
    float * k;  // [BLOCK][head_dim_k]
    float * rotated;
    void * lists;

    static size_t size(const lctx_attend_args & a, size_t lists_size) {
        const size_t n = (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS + lctx_ballots::n_float() +
                         lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k) + (size_t)a.head_dim_k * (LCTX_BLOCK + 1);
        return GGML_PAD(n * sizeof(float) + lists_size, LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a) : s((float *)base), ballots(s + (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS) {
        float * p = s + (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS + lctx_ballots::n_float();
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k);
        k = p, p += (size_t)LCTX_BLOCK * a.head_dim_k;
        rotated = p, p += a.head_dim_k;
        lists = p;
    }
};

float lse_of(const lctx_attend_args & a, int token, int head) {
    return a.lse[(size_t)token * a.n_head + head];
}

bool any_votes(const lctx_vote_args & v, int token0, int n_token) {
    return std::any_of(v.voters + token0, v.voters + token0 + n_token, [](const lctx_voter & voter) { return voter.votes != 0; });
}

// f(picked, n) for the open slots of [lo, hi) that are this part's, up to LCTX_BLOCK at a time: few of a page may be open, and a product
// with few rows is not worth its name.
template <typename F>
void each_open(const lctx_vote_args & v, const lctx_slots & slots, int32_t border, int lo, int hi, int split, int n_split, F && f) {
    int32_t picked[2 * LCTX_BLOCK];
    int n = 0;
    for (int slot = lo, end; slot < hi; slot = end) {
        end = std::min(hi, (slot / LCTX_BLOCK + 1) * LCTX_BLOCK);
        if (lctx_is_mine(slot, split, n_split)) {
            n += lctx_pick_open(v.retain, slots.held, border, slot, end - slot, picked + n);
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

// Scores of n picked slots: w.s, [n][n_pad].
void score_keys(const lctx_attend_args & a, const lctx_slots & slots, const lctx_columns & columns, bool near, const int32_t * picked,
                int n, int head_kv, int32_t seq, const scratch & w) {
    int64_t step = a.head_dim_k;
    const float * k = w.k;
    if (picked[n - 1] - picked[0] == n - 1 && picked[n - 1] / LCTX_BLOCK == picked[0] / LCTX_BLOCK) {
        const lctx_stored rows = lctx_stored_keys(a.cache, slots, near, picked[0], n, head_kv, seq, a.head_dim_k, w.k);
        k = lctx_unpack(rows, n, a.head_dim_k, w.k, &step, a.head_dim_k);
    } else {
        lctx_gather_keys(a.cache, slots, near, picked, n, head_kv, seq, a.head_dim_k, w.k);
    }
    lctx_scores(columns, k, step, n, w.s, false);
    lctx_softcap(w.s, (size_t)n * columns.n_pad, a.params.softcap);
}

void vote_tile(const lctx_vote_args & v, const lctx_tile & t, const scratch & w, int split, int n_split) {
    const lctx_attend_args & a = v.attend;
    const lctx_slots slots(a.cache, t.head_kv, lctx_segment_of(a, t.token0, 0).seq);
    const lctx_columns columns(w.queries, t.n_col, a.head_dim_k);
    const int32_t border = v.retain.border(v.voters[t.token0].row);  // of all tokens: no ubatch crosses one
    w.ballots.clear();
    for (int c = 0; c < t.n_col; c++) {
        const int token = t.token(c);
        if (v.voters[token].votes) {
            w.ballots.set(c, lse_of(a, token, t.head(c)), lctx_span(&lctx_segment_of(a, token, 0), a.n_seg), v.voters[token].row);
        }
    }
    for (int seg = 0; seg < a.n_seg; seg++) {
        const lctx_tile_range r(a, t, slots, seg);
        const bool near = (a.params.near_mask >> seg) & 1;
        bool loaded = false;
        each_open(v, slots, border, r.lo, r.hi, split, n_split, [&](const int32_t * picked, int n) {
            if (!loaded) {
                lctx_load_queries(a, t, seg, columns, w.rotated);
                loaded = true;
            }
            score_keys(a, slots, columns, near, picked, n, t.head_kv, lctx_segment_of(a, t.token0, 0).seq, w);
            if (r.is_partial(picked[0], picked[n - 1] + 1 - picked[0])) {
                lctx_tile_mask(a, t, seg, n, w.s, t.n_col_pad, 1, [&](int i) { return slots.row(picked[i]); });
            }
            lctx_count_votes(slots.held, v.retain.score, w.ballots, w.s, t.n_col, t.n_col_pad, picked, n);
        });
    }
}

void vote_job(const lctx_vote_args & v, const lctx_tiling & g, int head_kv, const scratch & w, int split, int n_split) {
    lctx_keep_scores(v.attend.cache, v.voters, v.attend.n_tokens, head_kv, split, n_split);
    for (int token_tile = 0; token_tile < g.n_token_tile; token_tile++) {
        for (int head_tile = 0; head_tile < g.n_head_tile; head_tile++) {
            const lctx_tile t(g, head_kv, head_tile, token_tile);
            if (any_votes(v, t.token0, t.n_token)) {
                vote_tile(v, t, w, split, n_split);
            }
        }
    }
}

// Ballots and queries of the entries that are the columns.
void load_entries(const lctx_vote_args & v, const lctx_list_plan & g, const lctx_list_block & b, const lctx_list_entry * e,
                  const lctx_columns & columns, const scratch & w) {
    const lctx_attend_args & a = v.attend;
    w.ballots.clear();
    for (int i = 0; i < columns.n; i++) {
        const int token = b.token(g, e[i].column);
        if (v.voters[token].votes) {
            const lctx_segment * segs = a.segs + e[i].seg / a.n_seg * a.n_seg;
            w.ballots.set(i, lse_of(a, token, b.head(g, e[i].column)), lctx_span(segs, a.n_seg), v.voters[token].row);
        }
    }
    lctx_load_queries(a, g, b, e, columns, w.rotated);
}

// Up to MAX_COLUMNS entries of one chunk.
void vote_entries(const lctx_vote_args & v, const lctx_list_plan & g, const lctx_list_block & b, const scratch & w,
                  const lctx_list_entry * e, int n, int split, int n_split) {
    const lctx_attend_args & a = v.attend;
    const lctx_slots slots(a.cache, b.head_kv, a.segs[e[0].seg].seq);
    const lctx_list_range r(a, slots, e, n);
    const lctx_columns columns(w.queries, n, a.head_dim_k);
    const int32_t border = v.retain.border(v.voters[b.token0].row);
    bool loaded = false;
    each_open(v, slots, border, r.lo, r.hi, split, n_split, [&](const int32_t * picked, int n_open) {
        if (!loaded) {
            load_entries(v, g, b, e, columns, w);
            loaded = true;
        }
        score_keys(a, slots, columns, lctx_is_near(a, e[0].seg), picked, n_open, b.head_kv, a.segs[e[0].seg].seq, w);
        if (r.is_partial(picked[0], picked[n_open - 1] + 1 - picked[0])) {
            lctx_list_mask(a, e, n, n_open, w.s, columns.n_pad, 1, [&](int i) { return slots.row(picked[i]); });
        }
        lctx_count_votes(slots.held, v.retain.score, w.ballots, w.s, n, columns.n_pad, picked, n_open);
    });
}

void vote_lists(const lctx_vote_args & v, const lctx_list_plan & g, int head_kv, const scratch & w, int split, int n_split) {
    const lctx_lists lists(w.lists, g);
    lctx_keep_scores(v.attend.cache, v.voters, v.attend.n_tokens, head_kv, split, n_split);
    for (int index = 0; index < g.n_block; index++) {
        const lctx_list_block b(g, head_kv, index);
        if (!any_votes(v, b.token0, b.n_token)) {
            continue;
        }
        lctx_invert(v.attend, g, b, lists);
        for (int bucket = 0; bucket < g.n_bucket; bucket++) {
            for (int i = lists.start[bucket]; i < lists.start[bucket + 1]; i += LCTX_MAX_COLUMNS) {
                vote_entries(v, g, b, w, lists.entries + i, std::min(LCTX_MAX_COLUMNS, lists.start[bucket + 1] - i), split, n_split);
            }
        }
    }
}

// Every thread takes jobs: f(head_kv, scratch, split, n_split).
template <typename Plan, typename F>
void share_out(const ggml_compute_params * params, const lctx_attend_args & a, Plan & g, size_t lists_size, F && f) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(a, lists_size), a);
    int32_t * cut = (int32_t *)(base + params->nth * scratch::size(a, lists_size));
    if (params->ith == 0) {
        g.cut_tokens(a, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.use_cut(cut);
    const int n_split = n_split_of(a, params->nth);
    for (int job = params->ith; job < a.n_head_kv * n_split; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        f(job / n_split, w, job % n_split, n_split);
    }
}

size_t wsize(const lctx_attend_args & a, size_t lists_size, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(a, lists_size) * n_tasks + (a.n_tokens + 2) * sizeof(int32_t);
}

// Blocks of tokens as one thread would cut them: their size must not depend on who is there to help.
lctx_list_plan list_plan(const lctx_attend_args & a) {
    return {a, 1};
}

}  // namespace

size_t lctx_cpu_vote_wsize(const lctx_vote_args & args, int n_tasks) {
    return wsize(args.attend, 0, n_tasks);
}

void lctx_cpu_vote(const ggml_compute_params * params, const lctx_vote_args & args) {
    lctx_tiling g(args.attend);
    share_out(params, args.attend, g, 0,
              [&](int head_kv, const scratch & w, int split, int n_split) { vote_job(args, g, head_kv, w, split, n_split); });
}

size_t lctx_cpu_vote_chunks_wsize(const lctx_vote_args & args, int n_tasks) {
    return wsize(args.attend, lctx_lists::size(args.attend, list_plan(args.attend)), n_tasks);
}

void lctx_cpu_vote_chunks(const ggml_compute_params * params, const lctx_vote_args & args) {
    lctx_list_plan g = list_plan(args.attend);
    share_out(params, args.attend, g, lctx_lists::size(args.attend, g),
              [&](int head_kv, const scratch & w, int split, int n_split) { vote_lists(args, g, head_kv, w, split, n_split); });
}
