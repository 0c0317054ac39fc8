// *summarize*: what a query compares itself with to find a chunk; computed when the chunk's last row is stored.
//
// attention: O = softmax(Q K^T) V over the chunk without a causal mask, q = mean of the rows of O, c = softmax(q K^T)
// K. The others are computed of the keys alone (../ops/summaries.h).
#include "columns.h"
#include "ggml-cpu-impl.h"
#include "half.h"

namespace {

struct scratch {
    float * s;              // [chunk_size][MAX_COLUMNS]
    float * v;              // [chunk_size][dim_v]
    float * o;              // [MAX_COLUMNS][dim_v]
    float *m, *l, *factor;  // [MAX_COLUMNS]
    float * queries;
    float * k;        // [chunk_size][head_dim_k]
    float * rotated;  // [head_dim_k]
    float * summary;  // [LCTX_MOST_VECTORS*head_dim_k]
    float * mean;     // [dim_v]
    float * weights;  // [chunk_size]
    int32_t * token;  // [chunk_size] token of the batch that holds a row's query, -1: it is in the ring

    static int pad_v(const lctx_summarize_args & a) { return lctx_round_up(a.head_dim_v, LCTX_VL); }
    static size_t size(const lctx_summarize_args & a) {
        const size_t n_chunk = a.params.chunk_size, dim_v = pad_v(a);
        const size_t n = n_chunk * (LCTX_MAX_COLUMNS + dim_v + a.head_dim_k + 2) + LCTX_MAX_COLUMNS * (dim_v + 3) +
                         lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k) +
                         (1 + LCTX_MOST_VECTORS) * a.head_dim_k + dim_v;
        return GGML_PAD(n * sizeof(float), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_summarize_args & a) {
        const size_t n_chunk = a.params.chunk_size, dim_v = pad_v(a);
        float * p = (float *)base;
        s = p, p += n_chunk * LCTX_MAX_COLUMNS;
        v = p, p += n_chunk * dim_v;
        o = p, p += LCTX_MAX_COLUMNS * dim_v;
        m = p, p += LCTX_MAX_COLUMNS;
        l = p, p += LCTX_MAX_COLUMNS;
        factor = p, p += LCTX_MAX_COLUMNS;
        queries = p, p += lctx_columns::n_float(LCTX_MAX_COLUMNS, a.head_dim_k);
        k = p, p += n_chunk * a.head_dim_k;
        rotated = p, p += a.head_dim_k;
        summary = p, p += LCTX_MOST_VECTORS * a.head_dim_k;
        mean = p, p += dim_v;
        weights = p, p += n_chunk;
        token = (int32_t *)p;
    }
};

// The chunk whose last row is stored by token `last`: all its rows are held.
struct chunk {
    int32_t seq, first_row, last, index;

    chunk(const lctx_summarize_args & a, int32_t last)
        : seq(a.rows[last].seq),
          first_row(a.rows[last].row + 1 - a.params.chunk_size),
          last(last),
          index(first_row / a.params.chunk_size) {}
};

// f(offset in the chunk, first cell, number of rows) for the runs of a chunk that lie in one page.
template <typename F> void each_run(const lctx_summarize_args & a, int32_t first_cell, F && f) {
    for (int i = 0; i < a.params.chunk_size;) {
        const int n = std::min(a.params.chunk_size - i, LCTX_PAGE_ROWS - (first_cell + i) % LCTX_PAGE_ROWS);
        f(i, first_cell + i, n);
        i += n;
    }
}

void load_keys(const lctx_summarize_args & a, const chunk & c, int head_kv, const scratch & w) {
    const size_t row_size = a.cache.k_pool.row_size;
    const auto load = [&](int i, const char * src, int n) {
        lctx_unpack_rows(a.cache.k_pool.type, src, row_size, n, a.head_dim_k, w.k + (size_t)i * a.head_dim_k,
                         a.head_dim_k);
        lctx_transform(w.k + (size_t)i * a.head_dim_k, n * a.head_dim_k, a.params.hadamard.k);
    };
    each_run(a, lctx_cells(a.cache, head_kv, c.seq).cell(c.first_row),
             [&](int i, int32_t cell, int n) { load(i, lctx_key_row(a.cache, cell, head_kv, c.seq), n); });
}

void load_values(const lctx_summarize_args & a, const chunk & c, int head_kv, const scratch & w) {
    const int dim_v = scratch::pad_v(a);
    each_run(a, lctx_cells(a.cache, head_kv, c.seq).cell(c.first_row), [&](int i, int32_t cell, int n) {
        const char * src = lctx_value_row(a.cache, cell, head_kv, c.seq);
        lctx_unpack_rows(a.cache.v_pool.type, src, a.cache.v_pool.row_size, n, a.head_dim_v, w.v + (size_t)i * dim_v,
                         dim_v);
    });
}

// Find the queries of the chunk: among the tokens of this batch, or (-1) in the ring.
void find_queries(const lctx_summarize_args & a, const chunk & c, const scratch & w) {
    std::fill_n(w.token, a.params.chunk_size, -1);
    for (int32_t t = 0; t <= c.last; t++) {
        const int32_t i = a.rows[t].row - c.first_row;
        if (a.rows[t].seq == c.seq && i >= 0 && i < a.params.chunk_size) {
            w.token[i] = t;
        }
    }
}

float * open_row(const lctx_summarize_args & a, int32_t row, int head, int32_t seq) {
    return (float *)(a.open + row * a.open_stride + head * a.open_head_stride + seq * a.open_seq_stride);
}

// The query of a token, rotated to its offset in its chunk.
void rotate_query(const lctx_summarize_args & a, int32_t token, int head, float * to) {
    const float * q = (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
    lctx_rotate_row(q, to, a.head_dim_k, a.angles + (size_t)a.rows[token].angle * a.n_dims, a.n_dims,
                    a.params.rope_mode);
}

// mean = mean over the chunk's queries of softmax(q K^T) V
void mean_output(const lctx_summarize_args & a, const chunk & c, int head, const scratch & w) {
    const int size = a.params.chunk_size, dim_v = scratch::pad_v(a);
    const int32_t at = a.rows[c.last].open;
    const int32_t ring = (at < 0 ? ~at : at) / size * size;  // the half in which the chunk was begun
    std::fill_n(w.mean, dim_v, 0.0f);
    for (int first = 0; first < size; first += LCTX_MAX_COLUMNS) {
        const lctx_columns columns(w.queries, std::min(LCTX_MAX_COLUMNS, size - first), a.head_dim_k);
        columns.clear();
        for (int i = 0; i < columns.n; i++) {
            const int32_t token = w.token[first + i];
            const float * q = open_row(a, ring + first + i, head, c.seq);
            if (token >= 0) {
                rotate_query(a, token, head, w.rotated);
                q = w.rotated;
            }
            columns.set(i, q, lctx_query_scale(a.params.scale, a.params.softcap));
        }
        std::fill_n(w.m, columns.n_pad, -INFINITY);
        std::fill_n(w.l, columns.n_pad, 0.0f);
        lctx_scores(columns, w.k, a.head_dim_k, size, w.s, false);
        lctx_softcap(w.s, (size_t)size * columns.n_pad, a.params.softcap);
        lctx_softmax_block(w.s, size, columns.n_pad, w.m, w.l, w.factor);
        lctx_gemm(columns.n, dim_v, size, w.s, 1, columns.n_pad, w.v, dim_v, w.o, dim_v, false);
        for (int i = 0; i < columns.n; i++) {
            for (int d = 0; d < a.head_dim_v; d++) {
                w.mean[d] += w.o[(size_t)i * dim_v + d] / (w.l[i] * (float)size);
            }
        }
    }
    lctx_transform(w.mean, a.head_dim_v, a.params.hadamard.v);
}

// The mean output lives in the space of V. Where the converter has put the rows of Wk, not of Wv, in the order of
// rotated pairs, dimension i of V meets dimension 2i of K, and i + dim/2 meets 2i + 1.
void to_key_order(const lctx_summarize_args & a, const float * mean, float * dst) {
    const int half = a.head_dim_k / 2;
    for (int i = 0; i < a.head_dim_k; i++) {
        dst[i] = a.params.key_pairs && a.head_dim_k % 2 == 0 ? mean[i / 2 + (i % 2) * half] : mean[i];
    }
}

// c = softmax(q K^T) K
void attention_summary(const lctx_summarize_args & a, const scratch & w) {
    float * c = w.summary;
    const int size = a.params.chunk_size;
    to_key_order(a, w.mean, w.rotated);
    float most = -INFINITY, sum = 0.0f;
    for (int i = 0; i < size; i++) {
        w.weights[i] = lctx_query_scale(a.params.scale, a.params.softcap) *
                       lctx_dot(w.k + (size_t)i * a.head_dim_k, w.rotated, a.head_dim_k);
    }
    lctx_softcap(w.weights, size, a.params.softcap);
    for (int i = 0; i < size; i++) {
        most = std::max(most, w.weights[i]);
    }
    std::fill_n(c, a.head_dim_k, 0.0f);
    for (int i = 0; i < size; i++) {
        const float p = expf(w.weights[i] - most);
        sum += p;
        for (int d = 0; d < a.head_dim_k; d++) {
            c[d] += p * w.k[(size_t)i * a.head_dim_k + d];
        }
    }
    for (int d = 0; d < a.head_dim_k; d++) {
        c[d] /= sum;
    }
}

void extremes(const lctx_summarize_args & a, const scratch & w) {
    const int dim = a.head_dim_k;
    float * dst = w.summary;
    memcpy(dst, w.k, dim * sizeof(float));
    memcpy(dst + dim, w.k, dim * sizeof(float));
    for (int i = 1; i < a.params.chunk_size; i++) {
        for (int d = 0; d < dim; d++) {
            dst[d] = std::max(dst[d], w.k[(size_t)i * dim + d]);
            dst[dim + d] = std::min(dst[dim + d], w.k[(size_t)i * dim + d]);
        }
    }
}

void mean_key(const lctx_summarize_args & a, const scratch & w, float * mean) {
    const int dim = a.head_dim_k, size = a.params.chunk_size;
    std::fill_n(mean, dim, 0.0f);
    for (int i = 0; i < size; i++) {
        for (int d = 0; d < dim; d++) {
            mean[d] += w.k[(size_t)i * dim + d] / (float)size;
        }
    }
}

// scale^2/2 times the variance of all keys but number `without`; a second pass: the mean of some channels is far larger
// than what they differ by.
void variance(const lctx_summarize_args & a, const scratch & w, const float * mean, int without, float * dst) {
    const int dim = a.head_dim_k, size = a.params.chunk_size;
    const float factor = 0.5f * a.params.scale * a.params.scale / (float)(size - 1);
    std::fill_n(dst, dim, 0.0f);
    for (int i = 0; i < size; i++) {
        for (int d = 0; i != without && d < dim; d++) {
            const float x = w.k[(size_t)i * dim + d] - mean[d];
            dst[d] += factor * x * x;
        }
    }
}

// The first of the keys that are farthest from their mean.
int find_outlier(const lctx_summarize_args & a, const scratch & w, const float * mean) {
    const int dim = a.head_dim_k;
    float most = -1.0f;
    int farthest = 0;
    for (int i = 0; i < a.params.chunk_size; i++) {
        const float * key = w.k + (size_t)i * dim;
        float distance = 0.0f;
        for (int d = 0; d < dim; d++) {
            distance += (key[d] - mean[d]) * (key[d] - mean[d]);
        }
        if (distance > most) {
            most = distance, farthest = i;
        }
    }
    return farthest;
}

void outlier(const lctx_summarize_args & a, const scratch & w) {
    const int dim = a.head_dim_k;
    float *mean = w.summary, *farthest = w.summary + 2 * dim;
    mean_key(a, w, mean);
    const int at = find_outlier(a, w, mean);
    memcpy(farthest, w.k + (size_t)at * dim, dim * sizeof(float));
    for (int d = 0; d < dim; d++) {
        mean[d] += (mean[d] - farthest[d]) / (float)(a.params.chunk_size - 1);
    }
    variance(a, w, mean, at, w.summary + dim);
}

// Bounds stay bounds: maxima (up > 0) are rounded up and minima (up < 0) down; up = 0: to the nearest.
void put(const float * x, int n, int up, ggml_fp16_t * dst) {
    for (int i = 0; i < n; i++) {
        dst[i] = lctx_to_half(x[i], up);
    }
}

void put_bytes(const float * x, int n, block_q8_0 * dst) {
    for (int b = 0; b < n / QK8_0; b++, x += QK8_0, dst++) {
        float most = 0.0f;
        for (int i = 0; i < QK8_0; i++) {
            most = fabsf(x[i]) <= most || most != most ? most : fabsf(x[i]);  // NaN stays
        }
        dst->d = lctx_to_half(most / 127.0f, 1);
        for (int i = 0; i < QK8_0; i++) {
            dst->qs[i] = lctx_to_byte(x[i], ggml_fp16_to_fp32(dst->d));
        }
    }
}

// The summary of the keys of a chunk, to w.summary; false where it needs the queries too.
bool summarize_keys(const lctx_summarize_args & a, const scratch & w) {
    switch (a.params.representation) {
        case LCTX_REPRESENT_MINMAX:    extremes(a, w); return true;
        case LCTX_REPRESENT_OUTLIER:   outlier(a, w); return true;
        case LCTX_REPRESENT_ATTENTION:
        case LCTX_REPRESENT_KEYS1:
        case LCTX_REPRESENT_KEYS2:     break;
    }
    return false;
}

void put_summary(const lctx_summarize_args & a, const float * x, char * dst) {
    const lctx_summary_kind kind = lctx_summary_kind_of(a.params.representation);
    const int dim = a.head_dim_k;
    if (a.summary_type == GGML_TYPE_F32) {
        memcpy(dst, x, kind.n_vector * dim * sizeof(float));
    } else if (a.summary_type == GGML_TYPE_Q8_0) {
        put_bytes(x, kind.n_vector * dim, (block_q8_0 *)dst);
    } else {
        for (int vector = 0; vector < kind.n_vector; vector++) {
            put(x + vector * dim, dim, !kind.has_bounds ? 0 : vector == 0 ? 1 : -1, (ggml_fp16_t *)dst + vector * dim);
        }
    }
}

void summarize(const lctx_summarize_args & a, const chunk & c, int head_kv, const scratch & w) {
    const auto put = [&](int head) {
        put_summary(
            a, w.summary,
            a.summaries + c.index * a.summary_stride + head * a.summary_head_stride + c.seq * a.summary_seq_stride);
    };
    load_keys(a, c, head_kv, w);
    if (summarize_keys(a, w)) {
        return put(head_kv);
    }
    load_values(a, c, head_kv, w);
    find_queries(a, c, w);
    const int n_summary = a.n_head / a.n_head_kv;
    for (int head = head_kv * n_summary; head < (head_kv + 1) * n_summary; head++) {
        mean_output(a, c, head, w);
        attention_summary(a, w);
        put(head);
    }
}

}  // namespace

size_t lctx_cpu_summarize_wsize(const lctx_summarize_args & args, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(args) * n_tasks;
}

void lctx_cpu_summarize(const ggml_compute_params * params, const lctx_summarize_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args), args);
    int64_t job = 0;
    for (int32_t t = 0; t < args.n_tokens; t++) {
        if ((args.rows[t].row + 1) % args.params.chunk_size != 0) {
            continue;
        }
        for (int head_kv = 0; head_kv < args.n_head_kv; head_kv++, job++) {
            if (job % params->nth == params->ith) {
                summarize(args, chunk(args, t), head_kv, w);
            }
        }
    }
    if (args.params.representation != LCTX_REPRESENT_ATTENTION) {
        return;
    }
    ggml_barrier(params->threadpool);  // the queries of a finished chunk may lie where those of an open one go
    for (int64_t i = params->ith; i < (int64_t)args.n_tokens * args.n_head; i += params->nth) {
        const int32_t t = (int32_t)(i / args.n_head), head = (int32_t)(i % args.n_head);
        if (args.rows[t].open >= 0) {
            rotate_query(args, t, head, open_row(args, args.rows[t].open, head, args.rows[t].seq));
        }
    }
}
