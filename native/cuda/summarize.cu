// *summarize*: what a query compares itself with to find a chunk; computed when the chunk's last row is stored.
//
// attention (LongHeads, eq. 1-2), per query head: O = softmax(Q K^T) V over the chunk without a causal mask, q = mean of the rows of
// O, c = softmax(q K^T) K, of keys as they are stored. Per KV head, of keys turned to their own positions: minmax, largest and smallest
// value of every channel; moments, its mean and scale^2/2 times its variance; outlier, the key farthest from the mean of all, after the
// moments of the others.
//
// q is computed from the mean of the weights over the queries, so that V is read once; that takes the sums of the softmax first, and
// the scores a second time.
#include "channels.h"
#include "kernels.h"
#include "product.h"

namespace {

constexpr int THREADS = lctx_product::THREADS, TILE = lctx_product::TILE, WARPS = THREADS / LCTX_WARP;
constexpr int SHARE = 16;  // tokens that a block looks through for those which complete a chunk

// The tokens of [from, end), at most 32, that complete a chunk, as bits; all lanes of a warp come here.
__device__ uint32_t completing(const lctx_summarize_args & a, int32_t from, int32_t end) {
    const int32_t t = from + lctx_lane();
    return lctx_ballot(t < lctx_min(end, a.n_tokens) && (a.rows[t].row + 1) % a.params.chunk_size == 0);
}

// The first token that completes a chunk in the `range`-th run of chunk_size tokens, or -1. It is the only one when they are of one
// sequence.
__device__ int32_t first_completing(const lctx_summarize_args & a, int range) {
    const int32_t from = range * a.params.chunk_size, end = from + a.params.chunk_size;
    for (int32_t t = from; t < lctx_min(end, a.n_tokens); t += LCTX_WARP) {
        if (const uint32_t bits = completing(a, t, end)) {
            return t + __ffs((int)bits) - 1;
        }
    }
    return -1;
}

// A block per SHARE tokens and KV head.
__global__ void __launch_bounds__(THREADS, 2) summarize_channels(lctx_summarize_args a) {
    const int32_t from = (int)blockIdx.x * SHARE;
    for (uint32_t rest = completing(a, from, from + SHARE); rest; rest &= rest - 1) {
        const lctx_completed c(a, from + __ffs((int)rest) - 1, (int)blockIdx.y);
        const lctx_channels channels(a, c);
        switch (a.params.representation) {
            case LCTX_REPRESENT_MINMAX:    channels.minmax(); break;
            case LCTX_REPRESENT_MOMENTS:   channels.moments(); break;
            case LCTX_REPRESENT_OUTLIER:   channels.outlier(); break;
            case LCTX_REPRESENT_ATTENTION: break;
        }
        channels.put();
    }
}

// ---- attention ----

// One query head of a chunk.
struct attention {
    const lctx_summarize_args & a;
    const lctx_completed & c;
    int head;
    int32_t ring;  // where the queries of the chunk begin in the ring: the half in which it was begun
    float scale;
    lctx_product product;
    float * columns;  // [WARPS][TILE] weights of a tile of keys
    float * parts;    // [THREADS * 8]
    float * query;    // [head_dim_k]
    int32_t * token;  // [TILE] token of the batch that holds a query, -1: it is in the ring

    static size_t shared(const lctx_summarize_args & a) {
        return (lctx_product::N_FLOAT + WARPS * TILE + THREADS * 8 + a.head_dim_k) * sizeof(float) + TILE * sizeof(int32_t);
    }
    __device__ attention(const lctx_summarize_args & a, const lctx_completed & c, int head) : a(a), c(c), head(head) {
        const int32_t open = a.rows[c.last].open;
        ring = (open < 0 ? ~open : open) / a.params.chunk_size * a.params.chunk_size;
        scale = a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale;
        product.slabs = (float *)lctx_shared();
        columns = product.slabs + lctx_product::N_FLOAT;
        parts = columns + WARPS * TILE;
        query = parts + THREADS * 8;
        token = (int32_t *)(query + a.head_dim_k);
    }
    __device__ float capped(float s) const { return a.params.softcap != 0.0f ? a.params.softcap * lctx_tanh(s) : s; }

    // Where queries [first, first + TILE) of the chunk are.
    __device__ void find_queries(int first) const {
        const int thread = (int)threadIdx.x;
        if (thread < TILE) {
            token[thread] = -1;
        }
        __syncthreads();
        for (int32_t t = thread; t <= c.last; t += THREADS) {
            const int i = a.rows[t].row - c.first_row - first;
            if (a.rows[t].seq == c.seq && i >= 0 && i < TILE) {
                atomicMax(token + i, t);
            }
        }
        __syncthreads();
    }
    __device__ void query_8(int first, int i, int d, float (&x)[8]) const {
        if (first + i >= a.params.chunk_size) {
            return;
        }
        lctx_load_8((token[i] < 0 ? lctx_open_row(a, ring + first + i, head, c.seq) : lctx_query_row(a, token[i], head)) + d, x);
        for (int e = 0; e < 8; e++) {
            x[e] *= scale;
        }
    }
    // Scores of a tile of queries and one of keys.
    __device__ void score(int first, int first_key, float (&s)[4][4]) const {
        const auto queries = [&](int i, int d, float(&x)[8]) { query_8(first, i, d, x); };
        const auto keys = [&](int i, int d, float(&x)[8]) {
            if (first_key + i < a.params.chunk_size) {
                lctx_key_8(a, c, first_key + i, d, x);
            }
        };
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                s[i][j] = 0.0f;
            }
        }
        product.add(a.head_dim_k, queries, keys, s);
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                s[i][j] = first_key + product.b(j) < a.params.chunk_size ? capped(s[i][j]) : -INFINITY;
            }
        }
    }
    // Take a tile of scores into the largest score and the sum of exp(score - largest) of each query.
    __device__ void take(const float (&s)[4][4], float (&most)[4], float (&sum)[4]) const {
        for (int i = 0; i < 4; i++) {
            const float top = lctx_warp_max(fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3])), 16);
            const float now = fmaxf(most[i], top);
            const float add = lctx_warp_sum(expf(s[i][0] - now) + expf(s[i][1] - now) + expf(s[i][2] - now) + expf(s[i][3] - now), 16);
            sum[i] = sum[i] * expf(most[i] - now) + add;
            most[i] = now;
        }
    }
    // Weights of a tile of keys, summed over the queries of each warp.
    __device__ void add_up(int first, const float (&s)[4][4], const float (&most)[4], const float (&sum)[4]) const {
        for (int j = 0; j < 4; j++) {
            float weight = 0.0f;
            for (int i = 0; i < 4; i++) {
                weight += first + product.a(i) < a.params.chunk_size ? expf(s[i][j] - most[i]) / sum[i] : 0.0f;
            }
            weight += lctx_shuffle_xor(weight, 16);
            if (lctx_lane() < 16) {
                columns[lctx_warp() * TILE + product.b(j)] = weight;
            }
        }
        __syncthreads();
    }
    __device__ float weight(int i) const {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            sum += columns[w * TILE + i];
        }
        return sum;
    }

    // What queries [first, first + TILE) add to the mean output; write(element, value).
    template <typename W> __device__ void mean_of(int first, W && write) const {
        const int size = a.params.chunk_size;
        const lctx_sharing share(a.head_dim_v);
        float most[4], sum[4], s[4][4], o[8] = {};
        for (int i = 0; i < 4; i++) {
            most[i] = -INFINITY, sum[i] = 0.0f;
        }
        find_queries(first);
        for (int k = 0; k < size; k += TILE) {
            score(first, k, s);
            take(s, most, sum);
        }
        for (int k = 0; k < size; k += TILE) {
            score(first, k, s);
            add_up(first, s, most, sum);
            for (int i = share.row; share.works() && i < lctx_min(TILE, size - k); i += share.n_row) {
                float v[8];
                lctx_value_8(a, c, k + i, share.d, v);
                add(o, weight(i), v);
            }
        }
        share.reduce(o, parts, [](float x, float y) { return x + y; }, [&](int d, float x) { write(d, x / (float)size); });
    }
    __device__ static void add(float (&o)[8], float weight, const float (&x)[8]) {
        for (int i = 0; i < 8; i++) {
            o[i] += weight * x[i];
        }
    }

    // The mean output lives in the space of V. Where the converter has put the rows of Wk, not of Wv, in the order of rotated pairs,
    // dimension i of V meets dimension 2i of K, and i + dim/2 meets 2i + 1.
    __device__ int in_key_order(int d) const {
        const int half = a.head_dim_k / 2;
        return !a.params.key_pairs || a.head_dim_k % 2 != 0 ? d : d < half ? 2 * d : 2 * (d - half) + 1;
    }
    // Scores of keys [first, first + TILE) with the mean query, four lanes each, to columns[0 .. TILE).
    __device__ void score_mean(int first) const {
        const int i = (int)threadIdx.x / 4;
        float s = 0.0f;
        for (int d = (int)threadIdx.x % 4 * 8; first + i < a.params.chunk_size && d < a.head_dim_k; d += 32) {
            float k[8];
            lctx_key_8(a, c, first + i, d, k);
            for (int e = 0; e < 8; e++) {
                s += k[e] * query[d + e];
            }
        }
        s = lctx_warp_sum(s, 4);
        __syncthreads();
        if (threadIdx.x % 4 == 0) {
            columns[i] = first + i < a.params.chunk_size ? capped(s) : -INFINITY;
        }
        __syncthreads();
    }
    // c = softmax(q K^T) K, the mean query in `query`.
    __device__ void summarize(uint16_t * dst) const {
        const int size = a.params.chunk_size;
        const lctx_sharing share(a.head_dim_k);
        float most = -INFINITY, sum = 0.0f, o[8] = {};
        for (int k = 0; k < size; k += TILE) {
            score_mean(k);
            const float s0 = columns[lctx_lane()], s1 = columns[lctx_lane() + LCTX_WARP];
            const float now = fmaxf(most, lctx_warp_max(fmaxf(s0, s1))), factor = expf(most - now);
            sum = sum * factor + lctx_warp_sum(expf(s0 - now) + expf(s1 - now));
            most = now;
            for (int i = 0; i < 8; i++) {
                o[i] *= factor;
            }
            for (int i = share.row; share.works() && i < lctx_min(TILE, size - k); i += share.n_row) {
                float x[8];
                lctx_key_8(a, c, k + i, share.d, x);
                add(o, expf(columns[i] - now), x);
            }
        }
        share.reduce(o, parts, [](float x, float y) { return x + y; }, [&](int d, float x) { dst[d] = lctx_to_half(x / sum, 0); });
    }
};

int n_tile(const lctx_summarize_args & a) {
    return (int)lctx_div_up(a.params.chunk_size, TILE);
}

int n_range(const lctx_summarize_args & a) {
    return (int)lctx_div_up(a.n_tokens, a.params.chunk_size);
}

// What every tile of queries adds to the mean output, for the first chunk that a range of tokens completes: a block per range, head
// and tile. means: [n_range][n_head][n_tile][head_dim_v]
__global__ void __launch_bounds__(THREADS, 2) mean_outputs(lctx_summarize_args a, float * means) {
    const int range = (int)blockIdx.x, head = (int)blockIdx.y, tile = (int)blockIdx.z;
    const int32_t last = first_completing(a, range);
    if (last < 0) {
        return;
    }
    const lctx_completed c(a, last, head / (a.n_head / a.n_head_kv));
    float * to = means + (((size_t)range * a.n_head + head) * gridDim.z + tile) * a.head_dim_v;
    attention(a, c, head).mean_of(tile * TILE, [&](int d, float x) { to[d] = x; });
}

// The rest, and all of the other chunks: a block per SHARE tokens and query head.
__global__ void __launch_bounds__(THREADS, 2) attention_summaries(lctx_summarize_args a, const float * means, int n_tile) {
    const int32_t from = (int)blockIdx.x * SHARE;
    const int head = (int)blockIdx.y, thread = (int)threadIdx.x;
    for (uint32_t rest = completing(a, from, from + SHARE); rest; rest &= rest - 1) {
        const lctx_completed c(a, from + __ffs((int)rest) - 1, head / (a.n_head / a.n_head_kv));
        const attention at(a, c, head);
        const int range = c.last / a.params.chunk_size;
        const float * of_tiles = means + ((size_t)range * a.n_head + head) * n_tile * a.head_dim_v;
        const bool is_done = first_completing(a, range) == c.last;
        for (int d = thread; d < a.head_dim_v; d += THREADS) {
            at.query[at.in_key_order(d)] = 0.0f;
        }
        for (int tile = 0; tile < n_tile; tile++) {
            const auto add = [&](int d, float x) { at.query[at.in_key_order(d)] += at.scale * x; };
            for (int d = thread; is_done && d < a.head_dim_v; d += THREADS) {
                add(d, of_tiles[tile * a.head_dim_v + d]);
            }
            if (!is_done) {
                at.mean_of(tile * TILE, add);
            }
        }
        __syncthreads();
        at.summarize((uint16_t *)lctx_summary_row(a, c, head));
    }
}

// The queries of chunks that stay open: a warp per token and head.
__global__ void keep_queries(lctx_summarize_args a) {
    const int64_t job = (int64_t)blockIdx.x * WARPS + lctx_warp();
    if (job >= (int64_t)a.n_tokens * a.n_head) {
        return;
    }
    const int32_t token = (int32_t)(job / a.n_head), head = (int32_t)(job % a.n_head), open = a.rows[token].open;
    if (open < 0) {
        return;
    }
    float * to = lctx_open_row(a, open, head, a.rows[token].seq);
    for (int d = lctx_lane() * 8; d < a.head_dim_k; d += LCTX_WARP * 8) {
        float x[8];
        lctx_load_8(lctx_query_row(a, token, head) + d, x);
        lctx_store_8(to + d, x);
    }
}

}  // namespace

size_t lctx_cuda_summarize_wsize(const lctx_cuda_device &, const lctx_summarize_args & args) {
    const bool by_attention = args.params.representation == LCTX_REPRESENT_ATTENTION;
    return by_attention ? (size_t)n_range(args) * args.n_head * n_tile(args) * args.head_dim_v * sizeof(float) : 0;
}

void lctx_cuda_summarize(const lctx_cuda_queue & queue, const lctx_summarize_args & args) {
    const unsigned n_share = (unsigned)lctx_div_up(args.n_tokens, SHARE);
    if (args.params.representation != LCTX_REPRESENT_ATTENTION) {
        const size_t of_channels = lctx_channels::shared(args, THREADS);
        return lctx_launch(summarize_channels, dim3(n_share, args.n_head_kv), THREADS, of_channels, queue.stream, args);
    }
    float * means = (float *)queue.work;
    const size_t shared = attention::shared(args);
    lctx_launch(mean_outputs, dim3(n_range(args), args.n_head, n_tile(args)), THREADS, shared, queue.stream, args, means);
    lctx_launch(attention_summaries, dim3(n_share, args.n_head), THREADS, shared, queue.stream, args, (const float *)means, n_tile(args));
    // the queries of a finished chunk may lie where those of an open one go
    const int64_t n = (int64_t)args.n_tokens * args.n_head;
    lctx_launch(keep_queries, dim3((unsigned)lctx_div_up(n, WARPS)), THREADS, 0, queue.stream, args);
}
