// *attend* for heads that chose their own chunks: the choice is inverted, chunk -> the columns that read it, so that every chunk is
// unpacked for all of them at once and its products are dense. Nothing as wide as the context, no private copy of K or V.
//
// A job is one KV head and a block of tokens: its (token, query head) columns keep their softmax states while the job walks over
// the chunks. With few jobs (decode) each is split over its chunks and the partial states are merged at the end.
#include "columns.h"
#include "ggml-cpu-impl.h"

namespace {

constexpr int MAX_STATES = 1024;  // columns of a job: their outputs stay in the second-level cache
constexpr int MIN_TOKENS = 16;    // of a job, if there are so many
constexpr int JOBS_PER_THREAD = 4;

// How the work is cut. The sizes depend on shapes only; the cut of the tokens also on which sequences they belong to.
struct plan {
    int n_rep;        // query heads per KV head
    int n_choice;     // choices per KV head
    int token_block;  // most tokens of a job
    int max_state;    // columns of a job, padded to vector width
    int dim_v;        // padded to vector width
    int n_near;       // chunks that have a bucket of their own for the near ring
    int n_bucket;

    const int32_t * token_start = nullptr;  // first token of every block, and the end
    int n_block = 0;
    int n_job = 0;
    int n_split = 1;

    plan(const lctx_attend_args & a, int n_thread) {
        n_rep = a.n_head / a.n_head_kv;
        n_choice = a.n_choice / a.n_head_kv;
        const int n_wanted = (int)lctx_ceil_div(JOBS_PER_THREAD * n_thread, a.n_head_kv);
        const int most = std::max(1, MAX_STATES / n_rep);
        token_block = std::min({std::max((int)lctx_ceil_div(a.n_tokens, n_wanted), MIN_TOKENS), most, a.n_tokens});
        max_state = lctx_round_up(token_block * n_rep, LCTX_VL);
        dim_v = lctx_round_up(a.head_dim_v, LCTX_VL);
        const int n_chunk = (int)lctx_ceil_div((int64_t)a.cache.table.head_stride * LCTX_PAGE_ROWS, a.params.chunk_size);
        n_bucket = a.cache.near.data ? 2 * n_chunk : n_chunk;
    }
    void set_cut(const lctx_attend_args & a, const int32_t * cut, int n_thread) {
        n_block = cut[0];
        token_start = cut + 1;
        n_job = a.n_head_kv * n_block;
        n_split = n_thread > 1 && n_job < JOBS_PER_THREAD * n_thread ? (int)lctx_ceil_div(JOBS_PER_THREAD * n_thread, n_job) : 1;
    }
    size_t state_size() const { return (size_t)max_state * (2 + dim_v); }
    // n_job * n_split stays below JOBS_PER_THREAD * n_thread + n_job, wherever there are partial states
    static int64_t max_partial(int n_thread) { return n_thread > 1 ? 2 * JOBS_PER_THREAD * n_thread : 0; }
};

// A column that reads a chunk: entry of the inverted list.
struct entry {
    int32_t column;
    int32_t seg;
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
    int32_t * start;  // [n_bucket + 1]
    entry * entries;  // by bucket

    static size_t n_entry(const lctx_attend_args & a, const plan & g) { return (size_t)g.token_block * g.n_rep * a.n_seg; }
    static size_t size(const lctx_attend_args & a, const plan & g) {
        const size_t n_float = (size_t)LCTX_MAX_COLUMNS * (LCTX_BLOCK + g.dim_v + 3) + (size_t)LCTX_BLOCK * g.dim_v + g.state_size() +
                               lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k) + (size_t)a.head_dim_k * (LCTX_BLOCK + 1);
        return GGML_PAD(n_float * sizeof(float) + (g.n_bucket + 1) * sizeof(int32_t) + n_entry(a, g) * sizeof(entry), LCTX_CACHE_LINE);
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
        start = (int32_t *)p;
        entries = (entry *)(start + g.n_bucket + 1);
    }
};

struct job {
    int head_kv, token0, n_token, n_column;

    job(const plan & g, int index) {
        head_kv = index / g.n_block;
        token0 = g.token_start[index % g.n_block];
        n_token = g.token_start[index % g.n_block + 1] - token0;
        n_column = n_token * g.n_rep;
    }
    int token(const plan & g, int column) const { return token0 + column / g.n_rep; }
    int head(const plan & g, int column) const { return head_kv * g.n_rep + column % g.n_rep; }
};

bool is_near(const lctx_attend_args & a, int seg) {
    return a.cache.near.data && seg >= a.params.near_from;
}

// f(bucket, column, index of the segment) for every segment of the job that holds rows.
template <typename F> void each_segment(const lctx_attend_args & a, const plan & g, const job & j, F && f) {
    const int heads_per_choice = g.n_rep / g.n_choice;
    const int near_bucket = g.n_bucket / 2;
    for (int c = 0; c < j.n_token * g.n_choice; c++) {
        const int64_t first = ((int64_t)(j.token0 + c / g.n_choice) * a.n_choice + j.head_kv * g.n_choice + c % g.n_choice) * a.n_seg;
        for (int i = 0; i < a.n_seg; i++) {
            const lctx_segment & sg = a.segs[first + i];
            if (sg.row0 >= sg.row1) {
                continue;
            }
            const int bucket = sg.row0 / a.params.chunk_size + (is_near(a, i) ? near_bucket : 0);
            for (int h = 0; h < heads_per_choice; h++) {
                f(bucket, c * heads_per_choice + h, (int32_t)(first + i));
            }
        }
    }
}

// Invert: entries[start[b] .. start[b + 1]) are the columns that read bucket b.
void invert(const lctx_attend_args & a, const plan & g, const job & j, const scratch & w) {
    std::fill_n(w.start, g.n_bucket + 1, 0);
    each_segment(a, g, j, [&](int bucket, int, int32_t) { w.start[bucket + 1]++; });
    for (int b = 0; b < g.n_bucket; b++) {
        w.start[b + 1] += w.start[b];
    }
    each_segment(a, g, j, [&](int bucket, int column, int32_t seg) { w.entries[w.start[bucket]++] = {column, seg}; });
    for (int b = g.n_bucket; b > 0; b--) {
        w.start[b] = w.start[b - 1];
    }
    w.start[0] = 0;
}

// Rows that any of the entries reads, and rows that all of them read.
struct range {
    int lo, hi, all_lo, all_hi;

    range(const lctx_attend_args & a, const entry * e, int n)
        : lo(a.segs[e[0].seg].row0), hi(a.segs[e[0].seg].row1), all_lo(lo), all_hi(hi) {
        for (int i = 1; i < n; i++) {
            const lctx_segment & sg = a.segs[e[i].seg];
            lo = std::min(lo, sg.row0), all_lo = std::max(all_lo, sg.row0);
            hi = std::max(hi, sg.row1), all_hi = std::min(all_hi, sg.row1);
        }
    }
};

// Bring the columns of n entries together: rotated queries and states.
void gather(const lctx_attend_args & a, const plan & g, const job & j, const scratch & w, const states & st, const entry * e, int n) {
    const lctx_columns columns(w.queries, LCTX_MAX_COLUMNS, n, a.head_dim_k);
    const float scale = lctx_query_scale(a.params.scale, a.params.softcap);
    columns.clear();
    std::fill_n(w.m, columns.n_pad, -INFINITY);
    std::fill_n(w.l, columns.n_pad, 0.0f);
    for (int i = 0; i < n; i++) {
        const int c = e[i].column;
        const float * q = (const float *)(a.q + j.head(g, c) * a.q_head_stride + j.token(g, c) * a.q_token_stride);
        lctx_rotate_row(q, w.rotated, a.head_dim_k, a.angles + (size_t)a.segs[e[i].seg].angle * a.n_dims, a.n_dims, a.params.rope_mode);
        columns.set(i, w.rotated, scale);
        w.m[i] = st.m[c];
        w.l[i] = st.l[c];
        memcpy(w.o + (size_t)i * g.dim_v, st.o + (size_t)c * g.dim_v, g.dim_v * sizeof(float));
    }
}

void scatter(const plan & g, const scratch & w, const states & st, const entry * e, int n) {
    for (int i = 0; i < n; i++) {
        const int c = e[i].column;
        st.m[c] = w.m[i];
        st.l[c] = w.l[i];
        memcpy(st.o + (size_t)c * g.dim_v, w.o + (size_t)i * g.dim_v, g.dim_v * sizeof(float));
    }
}

// Take away the rows outside an entry's own segment.
void mask(const lctx_attend_args & a, const scratch & w, const entry * e, const lctx_columns & columns, int row, int n_row) {
    for (int i = 0; i < columns.n; i++) {
        const lctx_segment & sg = a.segs[e[i].seg];
        for (int r = 0; r < n_row; r++) {
            if (row + r < sg.row0 || row + r >= sg.row1) {
                w.s[r * columns.n_pad + i] = -INFINITY;
            }
        }
    }
}

// One block of rows for up to MAX_COLUMNS entries.
void attend_block(const lctx_attend_args & a, const plan & g, const job & j, const scratch & w, const entry * e, int n, bool near, int row,
                  int n_row, bool masked) {
    const int32_t seq = a.segs[e[0].seg].seq;
    const lctx_columns columns(w.queries, LCTX_MAX_COLUMNS, n, a.head_dim_k);
    const char *k_src = lctx_key_row(a.cache, near, row, j.head_kv, seq), *v_src = lctx_value_row(a.cache, row, j.head_kv, seq);
    int64_t k_row, v_row;
    const float * k = lctx_unpack(a.cache.k_pool, k_src, n_row, a.head_dim_k, w.k, &k_row, a.head_dim_k);
    lctx_scores(columns, k, k_row, n_row, w.s, false);
    lctx_softcap(w.s, (size_t)n_row * columns.n_pad, a.params.softcap);
    if (masked) {
        mask(a, w, e, columns, row, n_row);
    }
    if (lctx_softmax_block(w.s, n_row, columns.n_pad, w.m, w.l, w.factor)) {
        lctx_rescale(w.o, w.factor, n, g.dim_v);
    }
    const float * v = lctx_unpack(a.cache.v_pool, v_src, n_row, a.head_dim_v, w.v, &v_row, g.dim_v);
    lctx_gemm(n, g.dim_v, n_row, w.s, 1, columns.n_pad, v, v_row, w.o, g.dim_v, true);
}

void attend_entries(const lctx_attend_args & a, const plan & g, const job & j, const scratch & w, const states & st, const entry * e, int n,
                    bool near) {
    const range r(a, e, n);
    gather(a, g, j, w, st, e, n);
    for (int row = r.lo; row < r.hi;) {
        const int n_row = std::min(r.hi, (row / LCTX_BLOCK + 1) * LCTX_BLOCK) - row;
        attend_block(a, g, j, w, e, n, near, row, n_row, row < r.all_lo || row + n_row > r.all_hi);
        row += n_row;
    }
    scatter(g, w, st, e, n);
}

// Part `split` of the chunks of a job.
void attend_job(const lctx_attend_args & a, const plan & g, const job & j, const scratch & w, const states & st, int split) {
    invert(a, g, j, w);
    st.clear(g, j.n_column);
    const int64_t n_entry = w.start[g.n_bucket];
    const int first = (int)(n_entry * split / g.n_split), last = (int)(n_entry * (split + 1) / g.n_split);
    for (int b = 0; b < g.n_bucket; b++) {
        // a chunk belongs to the part in which its first entry lies
        if (w.start[b] < first || w.start[b] >= last) {
            continue;
        }
        for (int i = w.start[b]; i < w.start[b + 1]; i += LCTX_MAX_COLUMNS) {
            const int n = std::min(LCTX_MAX_COLUMNS, w.start[b + 1] - i);
            attend_entries(a, g, j, w, st, w.entries + i, n, is_near(a, (int)(w.entries[i].seg % a.n_seg)));
        }
    }
}

void write_job(const lctx_attend_args & a, const plan & g, const job & j, const states & st) {
    for (int c = 0; c < j.n_column; c++) {
        lctx_write_state(a, j.token(g, c), j.head(g, c), st.m[c], st.l[c], st.o + (size_t)c * g.dim_v);
    }
}

void merge_job(const lctx_attend_args & a, const plan & g, int index, float * partials) {
    const job j(g, index);
    const states st(partials + (size_t)index * g.n_split * g.state_size(), g);
    for (int split = 1; split < g.n_split; split++) {
        const states part(partials + ((size_t)index * g.n_split + split) * g.state_size(), g);
        for (int c = 0; c < j.n_column; c++) {
            const size_t at = (size_t)c * g.dim_v;
            lctx_softmax_merge(st.m[c], st.l[c], st.o + at, part.m[c], part.l[c], part.o + at, g.dim_v);
        }
    }
    write_job(a, g, j, st);
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
        lctx_cut_tokens(args.n_tokens, g.token_block, cut,
                        [&](int32_t i) { return args.segs[(int64_t)i * args.n_choice * args.n_seg].seq; });
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.set_cut(args, cut, params->nth);
    for (int part = params->ith; part < g.n_job * g.n_split; part = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int index = part / g.n_split;
        const states st(g.n_split > 1 ? partials + (size_t)part * g.state_size() : w.state, g);
        const job j(g, index);
        attend_job(args, g, j, w, st, part % g.n_split);
        if (g.n_split == 1) {
            write_job(args, g, j, st);
        }
    }
    if (g.n_split > 1) {
        ggml_barrier(params->threadpool);
        for (int index = params->ith; index < g.n_job; index += params->nth) {
            merge_job(args, g, index, partials);
        }
    }
}
