// *attend*: every query over its segments of stored rows.
//
// Work is cut into tiles (walk.h). Per span and block of up to 64 cells: S = K Q^T, online softmax, O += P V. With few tiles (decode) each
// is also split over the blocks that it reads, and the partial states are merged at the end.
#include "block.h"
#include "ggml-cpu-impl.h"
#include "walk.h"

namespace {

struct plan : lctx_tiling {
    int dim_v;  // padded to vector width
    int64_t n_tile = 0;
    int n_split = 1;  // parts of a tile's blocks

    plan(const lctx_attend_args & a, int n_thread) : lctx_tiling(a, n_thread), dim_v(lctx_round_up(a.head_dim_v, LCTX_VL)) {}
    void set_cut(const lctx_attend_args & a, const int32_t * cut, int n_thread) {
        use_cut(cut);
        n_tile = (int64_t)a.n_head_kv * tiles_per_head();
        n_split = n_thread > 1 && n_tile < TILES_PER_THREAD * n_thread ? (int)lctx_ceil_div(TILES_PER_THREAD * n_thread, n_tile) : 1;
    }
    // Late tokens read most: handing them out first keeps the threads even.
    lctx_tile tile(int64_t index) const {
        const int at = (int)(index % tiles_per_head());
        return {*this, (int)(index / tiles_per_head()), at / n_token_tile, n_token_tile - 1 - at % n_token_tile};
    }
    size_t state_size() const { return lctx_states::n_float(max_column, dim_v); }
    lctx_states states(float * base) const { return {base, max_column, dim_v}; }
    // n_tile * n_split stays below TILES_PER_THREAD * n_thread + n_tile, and n_tile below that, wherever there are partial states.
    size_t partial_size(int n_thread) const {
        return n_thread > 1 ? (size_t)2 * TILES_PER_THREAD * n_thread * state_size() * sizeof(float) : 0;
    }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    lctx_block_scratch block;
    float * states;      // of all columns of a tile
    lctx_states picked;  // of the columns that read a span
    lctx_spans spans;

    static size_t block_size(const lctx_attend_args & a, const plan & g) {
        return GGML_PAD(lctx_block_scratch::n_float(g.max_reader(), a.head_dim_k, g.dim_v) * sizeof(float), LCTX_CACHE_LINE);
    }
    static size_t states_size(const plan & g) { return (lctx_states::n_float(g.max_reader(), g.dim_v) + g.state_size()) * sizeof(float); }
    static size_t size(const lctx_attend_args & a, const plan & g) {
        return GGML_PAD(block_size(a, g) + states_size(g) + lctx_spans::size(a, g), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const plan & g)
        : block((float *)base, g.max_reader(), a.head_dim_k, g.dim_v),
          states((float *)(base + block_size(a, g))),
          picked(states + g.state_size(), g.max_reader(), g.dim_v),
          spans(base + block_size(a, g) + states_size(g), g) {}
};

void copy_state(const lctx_states & from, int at_from, const lctx_states & to, int at_to) {
    to.m[at_to] = from.m[at_from];
    to.l[at_to] = from.l[at_from];
    memcpy(to.out(at_to), from.out(at_from), to.dim_v * sizeof(float));
}

// The states of the readers: those of the tile when all columns read the span, else copies.
lctx_states states_of(const lctx_span & span, const lctx_tile & tile, const scratch & w, const lctx_states & st, int n_pad) {
    if (span.n == tile.n_column) {
        return st;
    }
    std::fill_n(w.picked.m, n_pad, -INFINITY);
    std::fill_n(w.picked.l, n_pad, 0.0f);
    for (int i = 0; i < span.n; i++) {
        copy_state(st, span.readers[i].column, w.picked, i);
    }
    return w.picked;
}

// Blocks [first, end) of a span.
LCTX_ALONE void attend_span(const lctx_attend_args & a, const lctx_tile & tile, const lctx_span & span, int first, int end,
                            const scratch & w, const lctx_states & st) {
    const lctx_columns columns(w.block.queries, span.n, a.head_dim_k);
    span.load_queries(a, tile, columns, w.block.rotated);
#if LCTX_HAS_PAIRS
    if (lctx_in_pairs(a, columns)) {
        lctx_pair_rows(columns.q, a.head_dim_k, columns.n_pad);
    }
#endif
#if LCTX_HAS_KEY_INTEGERS
    if (lctx_in_integers(a, columns)) {
        lctx_round_queries(columns);
    }
#endif
    const lctx_states own = states_of(span, tile, w, st, columns.n_pad);
    for (int i = first; i < end; i++) {
        const int index = span.first_block() + i, cell = span.block_lo(index), n = span.block_hi(index) - cell;
        const lctx_block block = {cell, n, span.head_kv, span.seq, span.near, i + 1 < end ? cell + n : span.next};
        lctx_attend_block(a, columns, span.cells, block, own, w.block, [&](float * s, int cell_step, int column_step) {
            if (span.is_partial(cell, n)) {
                span.mask(a, n, s, cell_step, column_step, [&](int x) { return cell + x; });
            }
        });
    }
    for (int i = 0; own.m != st.m && i < span.n; i++) {
        copy_state(own, i, st, span.readers[i].column);
    }
}

// Part `split` of the blocks that a tile reads.
void attend_tile(const lctx_attend_args & a, const plan & g, const lctx_tile & tile, const scratch & w, const lctx_states & st, int split) {
    lctx_invert(a, g, tile, w.spans);
    st.clear(lctx_round_up(tile.n_column, LCTX_VL));
    int64_t n_block = 0;
    if (g.n_split > 1) {
        lctx_each_span(a, g, tile.head_kv, w.spans, [&](const lctx_span & span) { n_block += span.n_block(); });
    }
    const int64_t part_first = n_block * split / g.n_split;
    const int64_t part_end = g.n_split > 1 ? n_block * (split + 1) / g.n_split : INT64_MAX;
    int64_t at = 0;  // blocks of the spans before
    lctx_each_span(a, g, tile.head_kv, w.spans, [&](const lctx_span & span) {
        const int64_t first = std::max<int64_t>(part_first - at, 0), end = std::min<int64_t>(part_end - at, span.n_block());
        if (first < end) {
            attend_span(a, tile, span, (int)first, (int)end, w, st);
        }
        at += span.n_block();
    });
}

void write_tile(const lctx_attend_args & a, const lctx_tile & tile, const lctx_states & st) {
    for (int c = 0; c < tile.n_column; c++) {
        lctx_write_state(a, tile.token(c), tile.head(c), st.m[c], st.l[c], st.out(c));
    }
}

void merge_tile(const lctx_attend_args & a, const plan & g, int64_t index, float * partials) {
    const lctx_tile tile = g.tile(index);
    float * first = partials + (size_t)index * g.n_split * g.state_size();
    const lctx_states st = g.states(first);
    for (int split = 1; split < g.n_split; split++) {
        for (int c = 0; c < tile.n_column; c++) {
            st.merge(c, g.states(first + split * g.state_size()));
        }
    }
    write_tile(a, tile, st);
}

}  // namespace

size_t lctx_cpu_attend_wsize(const lctx_attend_args & args, int n_tasks) {
    // fewer threads than planned for have larger tiles
    size_t most = 0;
    for (int n = 1; n <= n_tasks; n++) {
        const plan g(args, n);
        most = std::max(most, scratch::size(args, g) * n + g.partial_size(n));
    }
    return LCTX_CACHE_LINE + most + (args.n_tokens + 2) * sizeof(int32_t);
}

void lctx_cpu_attend(const ggml_compute_params * params, const lctx_attend_args & args) {
    plan g(args, params->nth);
    // a vector that straddles two cache lines costs two loads
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args, g), args, g);
    float * partials = (float *)(base + params->nth * scratch::size(args, g));
    int32_t * cut = (int32_t *)((char *)partials + g.partial_size(params->nth));

    if (params->ith == 0) {
        g.cut_tokens(args, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.set_cut(args, cut, params->nth);
    for (int64_t job = params->ith; job < g.n_tile * g.n_split; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const lctx_tile tile = g.tile(job / g.n_split);
        const lctx_states st = g.states(g.n_split > 1 ? partials + (size_t)job * g.state_size() : w.states);
        attend_tile(args, g, tile, w, st, (int)(job % g.n_split));
        if (g.n_split == 1) {
            write_tile(args, tile, st);
        }
    }
    if (g.n_split > 1) {
        ggml_barrier(params->threadpool);
        for (int64_t index = params->ith; index < g.n_tile; index += params->nth) {
            merge_tile(args, g, index, partials);
        }
    }
}
