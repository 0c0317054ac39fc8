// *center*: every query counts into the mean of its head; at a border the rows that a KV head holds are scored with the means of its
// query heads.
//
// TriAttention (arXiv 2604.04921): the queries of a head gather around a center before they are rotated, so how far a key stands from
// later queries says how much attention it will get. A stored key carries its own position, so the mean over the distances is one product
// with a center that is turned once.
//
// A job is one KV head: its scores come once in evict_every tokens.
#include "ballots.h"
#include "ggml-cpu-impl.h"

namespace {

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * scores;   // [n_row_max] of one query head
    float * center;   // [head_dim]
    float * spread;   // [n_pair]
    float * lengths;  // [n_pair] of the pairs of a key
    float * keys;     // [PAGE_ROWS][head_dim]

    static size_t size(const lctx_center_args & a) {
        const size_t n = a.cache.held.n_row_max + (size_t)a.head_dim * (LCTX_PAGE_ROWS + 1) + 2 * a.n_pair;
        return GGML_PAD(n * sizeof(float), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_center_args & a) : keys((float *)base) {
        center = keys + (size_t)a.head_dim * LCTX_PAGE_ROWS;
        spread = center + a.head_dim;
        lengths = spread + a.n_pair;
        scores = lengths + a.n_pair;
    }
};

// Sums begin with the first token, and are kept as they were before the ubatch.
void keep_sums(const lctx_center_args & a, int32_t head) {
    for (int32_t t = 0; t < a.n_tokens; t++) {
        const lctx_voter & voter = a.voters[t];
        const lctx_query_sums sums = a.sums_of(head, voter.seq);
        const bool is_first = t == 0 || a.voters[t - 1].seq != voter.seq;
        if (is_first && voter.row == 0) {
            std::fill_n(sums.data, lctx_query_sums::plane(a.head_dim), 0.0f);
        }
        if (is_first && voter.undo_from >= 0) {
            std::copy_n(sums.data, lctx_query_sums::plane(a.head_dim), sums.undo());
        }
    }
}

// One by one: a sum must not depend on where the tokens were cut.
void add_queries(const lctx_center_args & a, int32_t head) {
    for (int32_t t = 0; t < a.n_tokens; t++) {
        const lctx_query_sums sums = a.sums_of(head, a.voters[t].seq);
        const float * q = a.query(t, head);
        for (int32_t d = 0; d < a.head_dim; d++) {
            sums.queries()[d] += q[d];
        }
        for (int32_t i = 0; i < a.n_pair; i++) {
            const lctx_pair_at at = a.pair(i);
            sums.lengths()[i] += lctx_length(q[at.first], q[at.second]);
        }
    }
}

// The center of a head as the queries after `token` bring it.
void make_center(const lctx_center_args & a, int32_t head, int32_t token, const scratch & w) {
    const lctx_query_sums sums = a.sums_of(head, a.voters[token].seq);
    const auto n = (float)(a.voters[token].row + 1);
    const float * cs = a.angles + (size_t)a.rows[token].angle * 2 * a.n_pair;
    for (int32_t d = 2 * a.n_pair; d < a.head_dim; d++) {
        w.center[d] = sums.queries()[d] / n;
    }
    for (int32_t i = 0; i < a.n_pair; i++) {
        const lctx_pair_at at = a.pair(i);
        const lctx_expected_pair pair(sums, at, i, n, cs + 2 * i, a.ahead + 2 * i);
        w.center[at.first] = pair.first;
        w.center[at.second] = pair.second;
        w.spread[i] = pair.spread;
    }
}

// The score of one key, which is as it was before it was transformed.
float score(const lctx_center_args & a, const float * key, const scratch & w) {
    for (int32_t i = 0; i < a.n_pair; i++) {
        const lctx_pair_at at = a.pair(i);
        w.lengths[i] = lctx_length(key[at.first], key[at.second]);
    }
    return lctx_dot(w.center, key, a.head_dim) + lctx_dot(w.spread, w.lengths, a.n_pair);
}

// w.scores of all cells for one query head.
void score_cells(const lctx_center_args & a, int32_t head_kv, int32_t seq, int32_t n_held, const scratch & w) {
    for (int32_t cell = 0; cell < n_held; cell += LCTX_PAGE_ROWS) {
        const int n = std::min(LCTX_PAGE_ROWS, n_held - cell);
        lctx_unpack_rows(a.cache.k_pool.type, lctx_key_row(a.cache, cell, head_kv, seq), a.cache.k_pool.row_size, n, a.head_dim, w.keys,
                         a.head_dim);
        lctx_transform(w.keys, n * a.head_dim, a.params.hadamard.k);
        for (int i = 0; i < n; i++) {
            w.scores[cell + i] = score(a, w.keys + (size_t)i * a.head_dim, w);
        }
    }
}

// Deviations from the mean, in units of the standard deviation; the largest of all query heads stays.
void count(const lctx_held & held, int32_t n_held, bool is_first, const scratch & w) {
    double sum = 0.0, squares = 0.0;
    for (int32_t cell = 0; cell < n_held; cell++) {
        sum += w.scores[cell];
    }
    const double mean = sum / n_held;
    for (int32_t cell = 0; cell < n_held; cell++) {
        squares += (w.scores[cell] - mean) * (w.scores[cell] - mean);
    }
    const double unit = squares > 0.0 ? 1.0 / sqrt(squares / n_held) : 0.0;
    for (int32_t cell = 0; cell < n_held; cell++) {
        const auto z = (float)((w.scores[cell] - mean) * unit);
        int32_t & best = held.scores()[cell];
        best = lctx_held::as_score(is_first ? z : std::max(lctx_held::as_float(best), z));
    }
}

void score_head(const lctx_center_args & a, int32_t head_kv, int32_t token, const scratch & w) {
    const int32_t seq = a.voters[token].seq, ratio = a.n_head / a.n_head_kv;
    const lctx_held held = lctx_cells(a.cache, head_kv, seq).held;
    const int32_t n_held = held.cell(a.voters[token].row) + 1;
    for (int32_t i = 0; i < ratio; i++) {
        make_center(a, head_kv * ratio + i, token, w);
        score_cells(a, head_kv, seq, n_held, w);
        count(held, n_held, i == 0, w);
    }
}

}  // namespace

size_t lctx_cpu_center_wsize(const lctx_center_args & args, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(args) * n_tasks;
}

void lctx_cpu_center(const ggml_compute_params * params, const lctx_center_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args), args);
    const int32_t ratio = args.n_head / args.n_head_kv;
    for (int32_t head_kv = params->ith; head_kv < args.n_head_kv; head_kv += params->nth) {
        lctx_keep_scores(args.cache, args.voters, args.n_tokens, head_kv, 0, 1);
        for (int32_t head = head_kv * ratio; head < (head_kv + 1) * ratio; head++) {
            keep_sums(args, head);
            add_queries(args, head);
        }
        for (int32_t token = 0; token < args.n_tokens; token++) {
            if (args.is_due(token)) {
                score_head(args, head_kv, token, w);
            }
        }
    }
}
