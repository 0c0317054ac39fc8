// *attend* for heads that chose their own chunks (lists.h).
//
// A job is one KV head and a block of tokens: its (token, query head) columns keep their softmax states while the job walks over
// the chunks. With few jobs (decode) each is split over its chunks and the partial states are merged at the end.
#include "block.h"
#include "ggml-cpu-impl.h"
#include "lists.h"

namespace {

struct plan : lctx_list_plan {
    int max_state;  // columns of a job, padded to vector width
    int dim_v;      // padded to vector width
    int n_job = 0;
    int n_split = 1;

    plan(const lctx_attend_args & a, int n_thread)
        : lctx_list_plan(a, n_thread),
          max_state(lctx_round_up(token_block * n_rep, LCTX_VL)),
          dim_v(lctx_round_up(a.head_dim_v, LCTX_VL)) {}
    void set_cut(const lctx_attend_args & a, const int32_t * cut, int n_thread) {
        use_cut(cut);
        n_job = a.n_head_kv * n_block;
        n_split = n_thread > 1 && n_job < JOBS_PER_THREAD * n_thread ? (int)lctx_ceil_div(JOBS_PER_THREAD * n_thread, n_job) : 1;
    }
    lctx_list_block block(int job) const { return {*this, job / n_block, job % n_block}; }
    size_t state_size() const { return lctx_states::n_float(max_state, dim_v); }
    lctx_states states(float * base) const { return {base, max_state, dim_v}; }
    // n_job * n_split stays below JOBS_PER_THREAD * n_thread + n_job, wherever there are partial states
    static int64_t max_partial(int n_thread) { return n_thread > 1 ? 2 * JOBS_PER_THREAD * n_thread : 0; }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    lctx_block_scratch block;
    lctx_states picked;  // of the columns that read a chunk
    float * states;      // of all columns of a job
    void * lists;

    static constexpr int N = LCTX_MAX_COLUMNS;
    static size_t n_float(const lctx_attend_args & a, const plan & g) {
        return lctx_block_scratch::n_float(N, a.head_dim_k, g.dim_v) + lctx_states::n_float(N, g.dim_v) + g.state_size();
    }
    static size_t size(const lctx_attend_args & a, const plan & g) {
        return GGML_PAD(n_float(a, g) * sizeof(float) + lctx_lists::size(a, g), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const plan & g)
        : block((float *)base, N, a.head_dim_k, g.dim_v),
          picked((float *)base + lctx_block_scratch::n_float(N, a.head_dim_k, g.dim_v), N, g.dim_v),
          states(picked.out(N)),
          lists(states + g.state_size()) {}
};

void copy_state(const lctx_states & from, int at_from, const lctx_states & to, int at_to) {
    to.m[at_to] = from.m[at_from];
    to.l[at_to] = from.l[at_from];
    memcpy(to.out(at_to), from.out(at_from), to.dim_v * sizeof(float));
}

// Up to MAX_COLUMNS entries of one chunk.
void attend_entries(const lctx_attend_args & a, const plan & g, const lctx_list_block & b, const scratch & w, const lctx_states & st,
                    const lctx_list_entry * e, int n) {
    const int32_t seq = a.segs[e[0].seg].seq;
    const lctx_slots slots(a.cache, b.head_kv, seq);
    const lctx_list_range r(a, slots, e, n);
    if (r.lo >= r.hi) {  // evicted
        return;
    }
    const lctx_columns columns(w.block.queries, n, a.head_dim_k);
    lctx_load_queries(a, g, b, e, columns, w.block.rotated);
    std::fill_n(w.picked.m, columns.n_pad, -INFINITY);
    std::fill_n(w.picked.l, columns.n_pad, 0.0f);
    for (int i = 0; i < n; i++) {
        copy_state(st, e[i].column, w.picked, i);
    }
    for (int slot = r.lo; slot < r.hi; slot = r.block_hi(slot)) {
        const int n_slot = r.block_hi(slot) - slot;
        const lctx_block block = {slot, n_slot, b.head_kv, seq, lctx_is_near(a, e[0].seg), slot + n_slot == r.hi};
        lctx_attend_block(a, columns, slots, block, w.picked, w.block, [&](float * s, int slot_step, int column_step) {
            if (r.is_partial(slot, n_slot)) {
                lctx_list_mask(a, e, n, n_slot, s, slot_step, column_step, [&](int x) { return slots.row(slot + x); });
            }
        });
    }
    for (int i = 0; i < n; i++) {
        copy_state(w.picked, i, st, e[i].column);
    }
}

// Part `split` of the chunks of a job.
void attend_job(const lctx_attend_args & a, const plan & g, const lctx_list_block & b, const scratch & w, const lctx_states & st,
                int split) {
    const lctx_lists lists(w.lists, g);
    lctx_invert(a, g, b, lists);
    st.clear(b.n_column);
    const int64_t n_entry = lists.start[g.n_bucket];
    const int first = (int)(n_entry * split / g.n_split), last = (int)(n_entry * (split + 1) / g.n_split);
    for (int bucket = 0; bucket < g.n_bucket; bucket++) {
        // a chunk belongs to the part in which its first entry lies
        if (lists.start[bucket] < first || lists.start[bucket] >= last) {
            continue;
        }
        for (int i = lists.start[bucket]; i < lists.start[bucket + 1]; i += LCTX_MAX_COLUMNS) {
            attend_entries(a, g, b, w, st, lists.entries + i, std::min(LCTX_MAX_COLUMNS, lists.start[bucket + 1] - i));
        }
    }
}

void write_job(const lctx_attend_args & a, const plan & g, const lctx_list_block & b, const lctx_states & st) {
    for (int c = 0; c < b.n_column; c++) {
        lctx_write_state(a, b.token(g, c), b.head(g, c), st.m[c], st.l[c], st.out(c));
    }
}

void merge_job(const lctx_attend_args & a, const plan & g, int index, float * partials) {
    const lctx_list_block b = g.block(index);
    float * first = partials + (size_t)index * g.n_split * g.state_size();
    const lctx_states st = g.states(first);
    for (int split = 1; split < g.n_split; split++) {
        for (int c = 0; c < b.n_column; c++) {
            st.merge(c, g.states(first + split * g.state_size()));
        }
    }
    write_job(a, g, b, st);
}

size_t partial_size(const plan & g, int n_thread) {
    return (size_t)plan::max_partial(n_thread) * g.state_size() * sizeof(float);
}

}  // namespace

size_t lctx_cpu_attend_chunks_wsize(const lctx_attend_args & args, int n_tasks) {
    // fewer threads than planned for have larger jobs
    size_t most = 0;
    for (int n = 1; n <= n_tasks; n++) {
        const plan g(args, n);
        most = std::max(most, scratch::size(args, g) * n + partial_size(g, n));
    }
    return LCTX_CACHE_LINE + most + (args.n_tokens + 2) * sizeof(int32_t);
}

void lctx_cpu_attend_chunks(const ggml_compute_params * params, const lctx_attend_args & args) {
    plan g(args, params->nth);
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args, g), args, g);
    float * partials = (float *)(base + params->nth * scratch::size(args, g));
    int32_t * cut = (int32_t *)((char *)partials + partial_size(g, params->nth));

    if (params->ith == 0) {
        g.cut_tokens(args, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.set_cut(args, cut, params->nth);
    for (int part = params->ith; part < g.n_job * g.n_split; part = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const lctx_states st = g.states(g.n_split > 1 ? partials + (size_t)part * g.state_size() : w.states);
        const lctx_list_block b = g.block(part / g.n_split);
        attend_job(args, g, b, w, st, part % g.n_split);
        if (g.n_split == 1) {
            write_job(args, g, b, st);
        }
    }
    if (g.n_split > 1) {
        ggml_barrier(params->threadpool);
        for (int index = params->ith; index < g.n_job; index += params->nth) {
            merge_job(args, g, index, partials);
        }
    }
}
