// *attend*: every query over its segments of stored rows.
//
// Work is cut into tiles of up to LCTX_MAX_COLUMNS columns, one column per (token, query head) of one KV head, so that a block of
// K and V rows is unpacked once for all of them. Per block of up to 64 rows: S = K Q^T, online softmax, O += P V.
// With few tiles (decode) each tile is also split over its blocks and the partial states are merged at the end.
#include "columns.h"
#include "ggml-cpu-impl.h"

#include <climits>

namespace {

constexpr int BLOCK = LCTX_BLOCK;

// How the work is cut. The sizes depend on shapes only; the cut of the tokens also on which sequences they belong to.
struct tiling {
    int n_rep;        // query heads per KV head
    int head_block;   // query heads per tile
    int token_block;  // most tokens per tile
    int n_head_tile;
    int max_col;  // padded to vector width
    int dim_v;    // padded to vector width

    const int32_t * token_start = nullptr;  // first token of every token tile, and the end
    int n_token_tile = 0;
    int64_t n_tile = 0;
    int n_split = 1;  // parts of a tile's blocks

    explicit tiling(const lctx_attend_args & a) {
        n_rep = a.n_head / a.n_head_kv;
        head_block = std::min(n_rep, LCTX_MAX_COLUMNS);
        token_block = std::min(std::max(LCTX_MAX_COLUMNS / head_block, 1), a.n_tokens);
        n_head_tile = (int)lctx_ceil_div(n_rep, head_block);
        max_col = lctx_round_up(head_block * token_block, LCTX_VL);
        dim_v = lctx_round_up(a.head_dim_v, LCTX_VL);
    }
    // Take the cut that lctx_cut_tokens made: int32 [n_token_tile, starts ...].
    void set_cut(const lctx_attend_args & a, const int32_t * cut, int n_thread) {
        n_token_tile = cut[0];
        token_start = cut + 1;
        n_tile = (int64_t)a.n_head_kv * n_head_tile * n_token_tile;
        n_split = n_thread > 1 && n_tile < 4 * n_thread ? (int)lctx_ceil_div(4 * n_thread, n_tile) : 1;
    }
    // Floats of one partial state: m, l, o of every column.
    size_t state_size() const { return (size_t)max_col * (2 + dim_v); }
    // n_tile * n_split stays below 4 n_thread + n_tile, and n_tile below 4 n_thread, wherever there are partial states.
    static int64_t max_states(int n_thread) { return n_thread > 1 ? 8 * n_thread : 0; }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * queries;  // lctx_columns: rotated, scaled queries
    float * k;        // [BLOCK][head_dim_k]
    float * v;        // [BLOCK][dim_v]
    float * s;        // [BLOCK][n_col]
    float * factor;   // [n_col]
    float * rotated;  // [head_dim_k]
    float * state;    // m, l, o

    static size_t size(const lctx_attend_args & a, const tiling & t) {
        const size_t n = lctx_columns::n_float(t.max_col, a.head_dim_k) + (size_t)a.head_dim_k * (BLOCK + 1) +
                         (size_t)BLOCK * (t.dim_v + t.max_col) + t.max_col + t.state_size();
        return GGML_PAD(n * sizeof(float), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const tiling & t) {
        float * p = (float *)base;
        s = p, p += (size_t)BLOCK * t.max_col;
        v = p, p += (size_t)BLOCK * t.dim_v;
        state = p, p += t.state_size();
        factor = p, p += t.max_col;
        queries = p, p += lctx_columns::n_float(t.max_col, a.head_dim_k);
        k = p, p += (size_t)BLOCK * a.head_dim_k;
        rotated = p;
    }
};

// One tile: columns (token0 .. token0 + n_token) x (head0 .. head0 + n_head) of KV head head_kv.
struct tile {
    int head_kv, head0, n_head, token0, n_token, n_col, n_col_pad, max_col;
    float *m, *l, *o;  // [n_col_pad], [n_col_pad], [n_col_pad][dim_v]

    tile(const tiling & t, int64_t index, float * state) {
        const int64_t per_head = (int64_t)t.n_head_tile * t.n_token_tile;
        // late tokens read most: handing them out first keeps the threads even
        const int token_tile = (int)(t.n_token_tile - 1 - index % t.n_token_tile);
        token0 = t.token_start[token_tile];
        n_token = t.token_start[token_tile + 1] - token0;
        const int head_tile = (int)(index % per_head) / t.n_token_tile;
        head_kv = (int)(index / per_head);
        head0 = head_kv * t.n_rep + head_tile * t.head_block;
        n_head = std::min(t.head_block, t.n_rep - head_tile * t.head_block);
        n_col = n_head * n_token;
        n_col_pad = lctx_round_up(n_col, LCTX_VL);
        max_col = t.max_col;
        m = state;
        l = m + t.max_col;
        o = l + t.max_col;
    }
    void clear(const tiling & t) const {
        std::fill_n(m, n_col_pad, -INFINITY);
        std::fill_n(l, n_col_pad, 0.0f);
        std::fill_n(o, (size_t)n_col * t.dim_v, 0.0f);
    }
    int token(int col) const { return token0 + col / n_head; }
    int head(int col) const { return head0 + col % n_head; }
};

// Rows that any token of a tile reads in one segment, and the rows that all of them read.
struct range {
    int lo = INT_MAX, hi = 0;          // union
    int all_lo = 0, all_hi = INT_MAX;  // intersection

    int64_t n_block() const { return lo < hi ? lctx_ceil_div(hi, BLOCK) - lo / BLOCK : 0; }
};

const lctx_segment & segment(const lctx_attend_args & a, int token, int seg) {
    return a.segs[(size_t)token * a.n_seg + seg];
}

range segment_range(const lctx_attend_args & a, const tile & t, int seg) {
    range r;
    for (int i = 0; i < t.n_token; i++) {
        const lctx_segment & sg = segment(a, t.token0 + i, seg);
        if (sg.row0 < sg.row1) {
            r.lo = std::min(r.lo, sg.row0);
            r.hi = std::max(r.hi, sg.row1);
        }
        r.all_lo = std::max(r.all_lo, sg.row0);
        r.all_hi = std::min(r.all_hi, sg.row1);
    }
    return r;
}

// Rotate the queries of the tile to the positions from which they look at the segment.
void load_queries(const lctx_attend_args & a, const tile & t, int seg, const scratch & w) {
    const lctx_columns columns(w.queries, t.max_col, t.n_col, a.head_dim_k);
    const float scale = lctx_query_scale(a.params.scale, a.params.softcap);
    columns.clear();
    for (int c = 0; c < t.n_col; c++) {
        const float * q = (const float *)(a.q + t.head(c) * a.q_head_stride + t.token(c) * a.q_token_stride);
        const float * cs = a.angles + (size_t)segment(a, t.token(c), seg).angle * a.n_dims;
        lctx_rotate_row(q, w.rotated, a.head_dim_k, cs, a.n_dims, a.params.rope_mode);
        columns.set(c, w.rotated, scale);
    }
}

// Take away the rows outside a token's own segment.
void mask_block(const lctx_attend_args & a, const tile & t, const scratch & w, int seg, int row, int n) {
    for (int i = 0; i < t.n_token; i++) {
        const lctx_segment & sg = segment(a, t.token0 + i, seg);
        for (int r = 0; r < n; r++) {
            if (row + r < sg.row0 || row + r >= sg.row1) {
                std::fill_n(w.s + r * t.n_col_pad + i * t.n_head, t.n_head, -INFINITY);
            }
        }
    }
}

void attend_block(const lctx_attend_args & a, const tiling & g, const tile & t, const scratch & w, int seg, const range & r, int row,
                  int n) {
    const int32_t seq = segment(a, t.token0, seg).seq;
    const bool near = (a.params.near_mask >> seg) & 1;
    const char *k_src = lctx_key_row(a.cache, near, row, t.head_kv, seq), *v_src = lctx_value_row(a.cache, row, t.head_kv, seq);
    int64_t k_row, v_row;
    const float * k = lctx_unpack(a.cache.k_pool, k_src, n, a.head_dim_k, w.k, &k_row, a.head_dim_k);
    lctx_scores(lctx_columns(w.queries, t.max_col, t.n_col, a.head_dim_k), k, k_row, n, w.s, false);
    lctx_softcap(w.s, (size_t)n * t.n_col_pad, a.params.softcap);
    if (row < r.all_lo || row + n > r.all_hi) {
        mask_block(a, t, w, seg, row, n);
    }
    if (lctx_softmax_block(w.s, n, t.n_col_pad, t.m, t.l, w.factor)) {
        lctx_rescale(t.o, w.factor, t.n_col, g.dim_v);
    }
    const float * v = lctx_unpack(a.cache.v_pool, v_src, n, a.head_dim_v, w.v, &v_row, g.dim_v);
    lctx_gemm(t.n_col, g.dim_v, n, w.s, 1, t.n_col_pad, v, v_row, t.o, g.dim_v, true);
}

// Part `split` of the blocks of a tile.
void attend_tile(const lctx_attend_args & a, const tiling & g, const tile & t, const scratch & w, int split) {
    int64_t n_block = 0;
    for (int seg = 0; seg < a.n_seg; seg++) {
        n_block += segment_range(a, t, seg).n_block();
    }
    int64_t first = n_block * split / g.n_split, last = n_block * (split + 1) / g.n_split;
    t.clear(g);
    for (int seg = 0; seg < a.n_seg && last > 0; seg++) {
        const range r = segment_range(a, t, seg);
        const int64_t b0 = std::max<int64_t>(first, 0), b1 = std::min(last, r.n_block());
        if (b0 < b1) {
            load_queries(a, t, seg, w);
        }
        for (int64_t b = b0; b < b1; b++) {
            const int block_row = (int)(r.lo / BLOCK + b) * BLOCK;
            const int row = std::max(r.lo, block_row);
            attend_block(a, g, t, w, seg, r, row, std::min(r.hi, block_row + BLOCK) - row);
        }
        first -= r.n_block();
        last -= r.n_block();
    }
}

void write_tile(const lctx_attend_args & a, const tiling & g, const tile & t) {
    for (int c = 0; c < t.n_col; c++) {
        lctx_write_state(a, t.token(c), t.head(c), t.m[c], t.l[c], t.o + (size_t)c * g.dim_v);
    }
}

void merge_tile(const lctx_attend_args & a, const tiling & g, int64_t index, float * partials) {
    const tile t(g, index, partials + (size_t)index * g.n_split * g.state_size());
    for (int split = 1; split < g.n_split; split++) {
        const tile part(g, index, partials + ((size_t)index * g.n_split + split) * g.state_size());
        for (int c = 0; c < t.n_col; c++) {
            lctx_softmax_merge(t.m[c], t.l[c], t.o + (size_t)c * g.dim_v, part.m[c], part.l[c], part.o + (size_t)c * g.dim_v, g.dim_v);
        }
    }
    write_tile(a, g, t);
}

}  // namespace

size_t lctx_cpu_attend_wsize(const lctx_attend_args & args, int n_tasks) {
    const tiling g(args);
    const size_t partials = (size_t)tiling::max_states(n_tasks) * g.state_size() * sizeof(float);
    return LCTX_CACHE_LINE + scratch::size(args, g) * n_tasks + partials + (args.n_tokens + 2) * sizeof(int32_t);
}

void lctx_cpu_attend(const ggml_compute_params * params, const lctx_attend_args & args) {
    tiling g(args);
    // a vector that straddles two cache lines costs two loads
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args, g), args, g);
    float * partials = (float *)(base + params->nth * scratch::size(args, g));
    int32_t * cut = (int32_t *)(partials + tiling::max_states(params->nth) * g.state_size());

    if (params->ith == 0) {
        // a tile reads one page list, so it ends where the sequence changes
        lctx_cut_tokens(args.n_tokens, g.token_block, cut, [&](int32_t i) { return segment(args, i, 0).seq; });
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.set_cut(args, cut, params->nth);
    for (int64_t job = params->ith; job < g.n_tile * g.n_split; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t index = job / g.n_split;
        const tile t(g, index, g.n_split > 1 ? partials + (size_t)job * g.state_size() : w.state);
        attend_tile(args, g, t, w, (int)(job % g.n_split));
        if (g.n_split == 1) {
            write_tile(args, g, t);
        }
    }
    if (g.n_split > 1) {
        ggml_barrier(params->threadpool);
        for (int64_t index = params->ith; index < g.n_tile; index += params->nth) {
            merge_tile(args, g, index, partials);
        }
    }
}
