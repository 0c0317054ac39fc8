// *attend* for heads that chose their own chunks (lists.h).
//
// A job is one KV head and a block of tokens: its (token, query head) columns keep their softmax states while the job walks over
// the chunks. With few jobs (decode) each is split over its chunks and the partial states are merged at the end.
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
    size_t state_size() const { return (size_t)max_state * (2 + dim_v); }
    // n_job * n_split stays below JOBS_PER_THREAD * n_thread + n_job, wherever there are partial states
    static int64_t max_partial(int n_thread) { return n_thread > 1 ? 2 * JOBS_PER_THREAD * n_thread : 0; }
};

// Softmax states of the columns of a job.
struct states {
    float * m;  // [max_state]
    float * l;
    float * o;  // [max_state][dim_v]

    states(float * base, const plan & g) : m(base), l(m + g.max_state), o(l + g.max_state) {}
    void clear(const plan & g, int n) const {
        std::fill_n(m, n, -INFINITY);
        std::fill_n(l, n, 0.0f);
        std::fill_n(o, (size_t)n * g.dim_v, 0.0f);
    }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * s;              // [BLOCK][MAX_COLUMNS]
    float * v;              // [BLOCK][dim_v]
    float * o;              // [MAX_COLUMNS][dim_v]
    float *m, *l, *factor;  // [MAX_COLUMNS]
    float * state;
    float * queries;
    float * k;  // [BLOCK][head_dim_k]
    float * rotated;
    void * lists;

    static size_t size(const lctx_attend_args & a, const plan & g) {
        const size_t n_float = (size_t)LCTX_MAX_COLUMNS * (LCTX_BLOCK + g.dim_v + 3) + (size_t)LCTX_BLOCK * g.dim_v + g.state_size() +
                               lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k) + (size_t)a.head_dim_k * (LCTX_BLOCK + 1);
        return GGML_PAD(n_float * sizeof(float) + lctx_lists::size(a, g), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const plan & g) {
        float * p = (float *)base;
        s = p, p += (size_t)LCTX_BLOCK * LCTX_MAX_COLUMNS;
        v = p, p += (size_t)LCTX_BLOCK * g.dim_v;
        o = p, p += (size_t)LCTX_MAX_COLUMNS * g.dim_v;
        m = p, p += LCTX_MAX_COLUMNS;
        l = p, p += LCTX_MAX_COLUMNS;
        factor = p, p += LCTX_MAX_COLUMNS;
        state = p, p += g.state_size();
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k);
        k = p, p += (size_t)LCTX_BLOCK * a.head_dim_k;
        rotated = p, p += a.head_dim_k;
        lists = p;
    }
};

// Bring the states of the columns of n entries together, and back.
void gather(const plan & g, const scratch & w, const states & st, const lctx_list_entry * e, const lctx_columns & columns) {
    std::fill_n(w.m, columns.n_pad, -INFINITY);
    std::fill_n(w.l, columns.n_pad, 0.0f);
    for (int i = 0; i < columns.n; i++) {
        const int c = e[i].column;
        w.m[i] = st.m[c];
        w.l[i] = st.l[c];
        memcpy(w.o + (size_t)i * g.dim_v, st.o + (size_t)c * g.dim_v, g.dim_v * sizeof(float));
    }
}

void scatter(const plan & g, const scratch & w, const states & st, const lctx_list_entry * e, int n) {
    for (int i = 0; i < n; i++) {
        const int c = e[i].column;
        st.m[c] = w.m[i];
        st.l[c] = w.l[i];
        memcpy(st.o + (size_t)c * g.dim_v, w.o + (size_t)i * g.dim_v, g.dim_v * sizeof(float));
    }
}

// Up to MAX_COLUMNS entries of one chunk.
void attend_entries(const lctx_attend_args & a, const plan & g, const lctx_list_block & b, const scratch & w, const states & st,
                    const lctx_list_entry * e, int n) {
    const int32_t seq = a.segs[e[0].seg].seq;
    const lctx_slots slots(a.cache, b.head_kv, seq);
    const lctx_list_range r(a, slots, e, n);
    const bool near = lctx_is_near(a, e[0].seg);
    if (r.lo >= r.hi) {  // evicted
        return;
    }
    const lctx_columns columns(w.queries, LCTX_MAX_COLUMNS, n, a.head_dim_k);
    lctx_load_queries(a, g, b, e, columns, w.rotated);
    gather(g, w, st, e, columns);
    for (int slot = r.lo; slot < r.hi; slot = r.block_hi(slot)) {
        const int n_slot = r.block_hi(slot) - slot;
        int64_t k_row, v_row;
        const float * k = lctx_load_keys(a.cache, slots, near, slot, n_slot, b.head_kv, seq, a.head_dim_k, w.k, &k_row);
        lctx_scores(columns, k, k_row, n_slot, w.s, false);
        lctx_softcap(w.s, (size_t)n_slot * columns.n_pad, a.params.softcap);
        if (r.is_partial(slot, n_slot)) {
            lctx_list_mask(a, columns, e, n_slot, w.s, [&](int i) { return slots.row(slot + i); });
        }
        if (lctx_softmax_block(w.s, n_slot, columns.n_pad, w.m, w.l, w.factor)) {
            lctx_rescale(w.o, w.factor, n, g.dim_v);
        }
        const char * v_src = lctx_value_row(a.cache, slot, b.head_kv, seq);
        const float * v = lctx_unpack(a.cache.v_pool, v_src, n_slot, a.head_dim_v, w.v, &v_row, g.dim_v);
        lctx_gemm(n, g.dim_v, n_slot, w.s, 1, columns.n_pad, v, v_row, w.o, g.dim_v, true);
    }
    scatter(g, w, st, e, n);
}

// Part `split` of the chunks of a job.
void attend_job(const lctx_attend_args & a, const plan & g, const lctx_list_block & b, const scratch & w, const states & st, int split) {
    const lctx_lists lists(w.lists, g);
    lctx_invert(a, g, b, lists);
    st.clear(g, b.n_column);
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

void write_job(const lctx_attend_args & a, const plan & g, const lctx_list_block & b, const states & st) {
    for (int c = 0; c < b.n_column; c++) {
        lctx_write_state(a, b.token(g, c), b.head(g, c), st.m[c], st.l[c], st.o + (size_t)c * g.dim_v);
    }
}

void merge_job(const lctx_attend_args & a, const plan & g, int index, float * partials) {
    const lctx_list_block b = g.block(index);
    const states st(partials + (size_t)index * g.n_split * g.state_size(), g);
    for (int split = 1; split < g.n_split; split++) {
        const states part(partials + ((size_t)index * g.n_split + split) * g.state_size(), g);
        for (int c = 0; c < b.n_column; c++) {
            const size_t at = (size_t)c * g.dim_v;
            lctx_softmax_merge(st.m[c], st.l[c], st.o + at, part.m[c], part.l[c], part.o + at, g.dim_v);
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
        const states st(g.n_split > 1 ? partials + (size_t)part * g.state_size() : w.state, g);
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
