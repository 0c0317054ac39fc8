// *attend*: every query over its segments of stored rows.
//
// Work is cut into tiles (tiles.h), so that a block of K and V rows is unpacked once for all columns of a tile. Per block of up to 64
// slots: S = K Q^T, online softmax, O += P V. With few tiles (decode) each tile is also split over its blocks and the partial states are
// merged at the end.
#include "block.h"
#include "ggml-cpu-impl.h"
#include "tiles.h"

namespace {

// How the work is cut into jobs: parts of tiles.
struct plan : lctx_tiling {
    int dim_v;  // padded to vector width
    int64_t n_tile = 0;
    int n_split = 1;  // parts of a tile's blocks

    explicit plan(const lctx_attend_args & a) : lctx_tiling(a), dim_v(lctx_round_up(a.head_dim_v, LCTX_VL)) {}
    void set_cut(const lctx_attend_args & a, const int32_t * cut, int n_thread) {
        use_cut(cut);
        n_tile = (int64_t)a.n_head_kv * tiles_per_head();
        n_split = n_thread > 1 && n_tile < 4 * n_thread ? (int)lctx_ceil_div(4 * n_thread, n_tile) : 1;
    }
    // Late tokens read most: handing them out first keeps the threads even.
    lctx_tile tile(int64_t index) const {
        const int at = (int)(index % tiles_per_head());
        return {*this, (int)(index / tiles_per_head()), at / n_token_tile, n_token_tile - 1 - at % n_token_tile};
    }
    size_t state_size() const { return lctx_states::n_float(max_col, dim_v); }
    lctx_states states(float * base) const { return {base, max_col, dim_v}; }
    // n_tile * n_split stays below 4 n_thread + n_tile, and n_tile below 4 n_thread, wherever there are partial states.
    static int64_t max_states(int n_thread) { return n_thread > 1 ? 8 * n_thread : 0; }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    lctx_block_scratch block;
    float * states;

    static size_t block_size(const lctx_attend_args & a, const plan & g) {
        return GGML_PAD(lctx_block_scratch::n_float(g.max_col, a.head_dim_k, g.dim_v) * sizeof(float), LCTX_CACHE_LINE);
    }
    static size_t size(const lctx_attend_args & a, const plan & g) {
        return block_size(a, g) + GGML_PAD(g.state_size() * sizeof(float), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const plan & g)
        : block((float *)base, g.max_col, a.head_dim_k, g.dim_v), states((float *)(base + block_size(a, g))) {}
};

// Part `split` of the blocks of a tile.
void attend_tile(const lctx_attend_args & a, const plan & g, const lctx_tile & t, const scratch & w, const lctx_states & st, int split) {
    const lctx_slots slots(a.cache, t.head_kv, lctx_segment_of(a, t.token0, 0).seq);
    int64_t n_block = 0;
    for (int seg = 0; seg < a.n_seg; seg++) {
        n_block += lctx_tile_range(a, t, slots, seg).n_block();
    }
    int64_t first = n_block * split / g.n_split, last = n_block * (split + 1) / g.n_split;
    const lctx_columns columns(w.block.queries, t.n_col, a.head_dim_k);
    st.clear(t.n_col_pad);
    for (int seg = 0; seg < a.n_seg && last > 0; seg++) {
        const lctx_tile_range r(a, t, slots, seg);
        const int64_t b0 = std::max<int64_t>(first, 0), b1 = std::min<int64_t>(last, r.n_block());
        if (b0 < b1) {
            lctx_load_queries(a, t, seg, columns, w.block.rotated);
        }
        for (int64_t i = b0; i < b1; i++) {
            const int index = r.first_block() + (int)i, slot = r.block_lo(index), n = r.block_hi(index) - slot;
            const bool near = (a.params.near_mask >> seg) & 1;
            const lctx_block block = {slot, n, t.head_kv, lctx_segment_of(a, t.token0, seg).seq, near, i + 1 == b1};
            lctx_attend_block(a, columns, slots, block, st, w.block, [&](float * s, int slot_step, int column_step) {
                if (r.is_partial(slot, n)) {
                    lctx_tile_mask(a, t, seg, n, s, slot_step, column_step, [&](int x) { return slots.row(slot + x); });
                }
            });
        }
        first -= r.n_block();
        last -= r.n_block();
    }
}

void write_tile(const lctx_attend_args & a, const lctx_tile & t, const lctx_states & st) {
    for (int c = 0; c < t.n_col; c++) {
        lctx_write_state(a, t.token(c), t.head(c), st.m[c], st.l[c], st.out(c));
    }
}

void merge_tile(const lctx_attend_args & a, const plan & g, int64_t index, float * partials) {
    const lctx_tile t = g.tile(index);
    float * first = partials + (size_t)index * g.n_split * g.state_size();
    const lctx_states st = g.states(first);
    for (int split = 1; split < g.n_split; split++) {
        for (int c = 0; c < t.n_col; c++) {
            st.merge(c, g.states(first + split * g.state_size()));
        }
    }
    write_tile(a, t, st);
}

}  // namespace

size_t lctx_cpu_attend_wsize(const lctx_attend_args & args, int n_tasks) {
    const plan g(args);
    const size_t partials = (size_t)plan::max_states(n_tasks) * g.state_size() * sizeof(float);
    return LCTX_CACHE_LINE + scratch::size(args, g) * n_tasks + partials + (args.n_tokens + 2) * sizeof(int32_t);
}

void lctx_cpu_attend(const ggml_compute_params * params, const lctx_attend_args & args) {
    plan g(args);
    // a vector that straddles two cache lines costs two loads
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args, g), args, g);
    float * partials = (float *)(base + params->nth * scratch::size(args, g));
    int32_t * cut = (int32_t *)(partials + plan::max_states(params->nth) * g.state_size());

    if (params->ith == 0) {
        g.cut_tokens(args, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    g.set_cut(args, cut, params->nth);
    for (int64_t job = params->ith; job < g.n_tile * g.n_split; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const lctx_tile t = g.tile(job / g.n_split);
        const lctx_states st = g.states(g.n_split > 1 ? partials + (size_t)job * g.state_size() : w.states);
        attend_tile(args, g, t, w, st, (int)(job % g.n_split));
        if (g.n_split == 1) {
            write_tile(args, t, st);
        }
    }
    if (g.n_split > 1) {
        ggml_barrier(params->threadpool);
        for (int64_t index = params->ith; index < g.n_tile; index += params->nth) {
            merge_tile(args, g, index, partials);
        }
    }
}
