// *evict*: rows without enough votes leave, the others move up inside the pages of their head, as they are stored.
//
// A job is one KV head of one sequence.
#include "columns.h"
#include "ggml-cpu-impl.h"
#include "half.h"
#include "index.h"

namespace {

struct ranked {
    uint32_t rank;
    int32_t cell;
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    ranked * order;  // [n_row_max]
    char * keep;     // [n_row_max]

    static size_t size(const lctx_evict_args & a) {
        return GGML_PAD((sizeof(ranked) + 1) * (size_t)a.cache.held.n_row_max, LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_evict_args & a)
        : order((ranked *)base), keep((char *)(order + a.cache.held.n_row_max)) {}
};

// Keep the best of cells [0, n) by score, n_best of them; of equals the newer one.
void keep_best(const lctx_held & held, lctx_score kind, int32_t n, int32_t n_best, const scratch & w) {
    for (int32_t cell = 0; cell < n; cell++) {
        w.order[cell] = {lctx_held::rank(kind, held.scores()[cell]), cell};
    }
    std::nth_element(w.order, w.order + n_best, w.order + n, [](const ranked & a, const ranked & b) {
        return a.rank != b.rank ? a.rank > b.rank : a.cell > b.cell;
    });
    for (int32_t i = 0; i < n_best; i++) {
        w.keep[w.order[i].cell] = 1;
    }
}

// Decide which of n_held rows stay after row p, at most `budget` of them if the rule has one.
void decide(const lctx_evict_params & params, const lctx_held & held, int32_t n_held, int32_t p, int32_t budget,
            const scratch & w) {
    const lctx_retain & r = params.retain;
    const int32_t n_old = std::min(held.cell(r.first_safe(p, params.chunk_size)), n_held);
    std::fill_n(w.keep, n_held, 1);
    if (r.budget == 0) {
        for (int32_t cell = 0; cell < n_old; cell++) {
            w.keep[cell] = p - held.scores()[cell] < r.window;
        }
    } else if (n_held > budget) {
        const int32_t n_best = std::max(0, budget - (n_held - n_old));
        std::fill_n(w.keep, n_old, 0);
        if (n_best < n_old) {
            keep_best(held, r.score, n_old, n_best, w);
        }
    }
}

// A chunk whose last row was evicted is no longer a candidate.
void forget_chunks(const lctx_evict_args & a, const lctx_held & held, int32_t n_held, int32_t head_kv, int32_t seq,
                   const scratch & w) {
    const int32_t size = a.params.chunk_size;
    for (int32_t cell = 0; cell < n_held;) {
        const int32_t chunk = held.rows()[cell] / size;
        bool is_left = false;
        for (; cell < n_held && held.rows()[cell] / size == chunk; cell++) {
            is_left = is_left || w.keep[cell];
        }
        for (int32_t i = 0; !is_left && i < a.n_summary; i++) {
            char * summary = a.summaries + chunk * a.summary_stride +
                             (head_kv * a.n_summary + i) * a.summary_head_stride + seq * a.summary_seq_stride;
            memset(summary, 0xff, a.summary_stride);  // NaN as floats, as halves, and as scales of blocks
        }
    }
}

// Move the rows that stay up; returns how many they are.
int32_t compact(const lctx_evict_args & a, const lctx_held & held, int32_t n_held, int32_t head_kv, int32_t seq,
                const scratch & w) {
    const lctx_index_rows rows = {a.cache, head_kv, seq};
    int32_t to = 0;
    for (int32_t from = 0; from < n_held; from++) {
        if (!w.keep[from]) {
            continue;
        }
        if (to != from) {
            memcpy(lctx_key_row(a.cache, to, head_kv, seq), lctx_key_row(a.cache, from, head_kv, seq),
                   a.cache.k_pool.row_size);
            if (!lctx_values_in_keys(a.cache)) {
                memcpy(lctx_value_row(a.cache, to, head_kv, seq), lctx_value_row(a.cache, from, head_kv, seq),
                       a.cache.v_pool.row_size);
            }
            if (a.cache.index.data) {
                constexpr int32_t GROUP = lctx_index_shape::GROUP;
                lctx_index_move(a.index, rows.group(from / GROUP), from % GROUP, rows.group(to / GROUP), to % GROUP);
            }
            held.rows()[to] = held.rows()[from];
            held.scores()[to] = held.scores()[from];
        }
        to++;
    }
    return to;
}

void evict_head(const lctx_evict_args & a, int32_t head_kv, int32_t seq, int32_t p, const scratch & w) {
    const lctx_held held = lctx_cells(a.cache, head_kv, seq).held;
    const int32_t n_held = p + 1 - held.n_gone();
    decide(a.params, held, n_held, p, lctx_budget_of(a, head_kv, seq), w);
    if (a.summaries) {
        forget_chunks(a, held, n_held, head_kv, seq, w);
    }
    const int32_t n_left = compact(a, held, n_held, head_kv, seq, w);
    if (a.params.retain.resets) {
        std::fill_n(held.scores(), n_left, lctx_held::first_score(a.params.retain.score));
    }
    held.n_gone() = p + 1 - n_left;
    held.dense_from() = p + 1;
}

}  // namespace

size_t lctx_cpu_evict_wsize(const lctx_evict_args & args, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(args) * n_tasks;
}

void lctx_cpu_evict(const ggml_compute_params * params, const lctx_evict_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args), args);
    for (int32_t job = params->ith; job < args.n_head_kv * args.n_seq; job += params->nth) {
        const int32_t seq = job / args.n_head_kv;
        if (args.due[seq] >= 0) {
            evict_head(args, job % args.n_head_kv, seq, args.due[seq], w);
        }
    }
}
