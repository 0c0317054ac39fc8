// *attend*: every query over its segments of stored rows.
//
// Work is cut into tiles (walk.h). Per item and block of up to 64 cells: S = K Q^T, online softmax, O += P V. With few
// tiles (decode) each is also split over the blocks that it reads, and the partial states are merged in their order at
// the end: the bits of a sum do not depend on the number of threads. With params.fixed they depend on the query alone:
// tiles of any size are computed in the same way, and states are merged at fixed cells.
#include "ggml-cpu-impl.h"
#include "lists.h"

namespace {

struct schedule : lctx_tiling {
    int dim_v;  // padded to vector width
    int64_t n_tile = 0;
    int n_split = 1;  // of a tile's blocks
    int n_piece = 1;  // of a segment, where splits end at fixed cells

    static constexpr int JOBS = 24;                  // at least, where the rows allow it
    static constexpr int SPLIT_ROWS = 256;           // of a split, at least
    static constexpr int PIECE_BLOCKS = 8;           // of a split that ends at fixed cells
    static constexpr size_t PIECES_SIZE = 32 << 20;  // of the states of those that threads share, at most

    explicit schedule(const lctx_attend_args & a) : lctx_tiling(a), dim_v(lctx_round_up(a.head_dim_v, LCTX_VL)) {}
    void set_cut(const lctx_attend_args & a, const int32_t * cut) {
        use_cut(cut);
        n_tile = (int64_t)a.n_head_kv * tiles_per_head();
        if (n_tile < JOBS && a.params.fixed) {
            n_piece = shares_pieces(a) ? (int)lctx_ceil_div(std::max(1, last_row(a)), PIECE_BLOCKS * LCTX_BLOCK) : 1;
            n_split = shares_pieces(a) ? n_run * n_piece : 1;
        } else if (n_tile < JOBS) {
            n_split = (int)std::max<int64_t>(1, std::min(lctx_ceil_div(JOBS, n_tile), most_rows(a) / SPLIT_ROWS));
        }
    }
    // The most rows that a token reads with its first heads.
    static int64_t most_rows(const lctx_attend_args & a) {
        int64_t most = 0;
        for (int32_t token = 0; token < a.choices().n_alone(); token++) {
            const lctx_segment * segs = a.segs + (int64_t)token * a.n_choice * a.n_seg;
            int64_t n = 0;
            for (int i = 0; i < a.n_seg; i++) {
                n += std::max(0, segs[i].row1 - segs[i].row0);
            }
            most = std::max(most, n);
        }
        return most;
    }
    // The last row that a token reads, and the next one.
    static int32_t last_row(const lctx_attend_args & a) {
        int32_t last = 0;
        for (int64_t i = 0; i < (int64_t)a.choices().n_alone() * a.n_choice * a.n_seg; i++) {
            last = std::max(last, a.segs[i].row1);
        }
        return last;
    }
    int64_t least_tiles(const lctx_attend_args & a) const {
        return (int64_t)a.n_head_kv * n_head_tile * lctx_ceil_div(a.choices().n_alone(), tile_tokens);
    }
    // Return the bytes for splits that end at fixed cells, all of which wait until they are merged. If they would be
    // too many, a tile has one thread.
    size_t pieces_size(const lctx_attend_args & a) const {
        const int64_t n_tile_most = std::min<int64_t>(JOBS, (int64_t)a.n_head_kv * n_head_tile * a.n_tokens);
        const int64_t n_block = (int64_t)a.cache.table.head_stride << a.cache.table.shift >> LCTX_PAGE_SHIFT;
        return n_tile_most * n_run * lctx_ceil_div(n_block, PIECE_BLOCKS) * state_size() * sizeof(float);
    }
    bool has_pieces(const lctx_attend_args & a) const { return a.params.fixed && a.params.chunk_size == 0; }
    bool shares_pieces(const lctx_attend_args & a) const {
        return has_pieces(a) && least_tiles(a) < JOBS && pieces_size(a) <= PIECES_SIZE;
    }
    // Late tokens read most: handing them out first keeps the threads even.
    lctx_tile tile(int64_t index) const {
        const int at = (int)(index % tiles_per_head());
        return {*this, (int)(index / tiles_per_head()), at / n_token_tile, n_token_tile - 1 - at % n_token_tile};
    }
    size_t state_size() const { return lctx_states::n_float(max_column, dim_v); }
    lctx_states states(float * base) const { return {base, max_column, dim_v}; }
    // n_tile * n_split stays below JOBS + n_tile, and n_tile below that, wherever there are partial states.
    size_t partial_size(const lctx_attend_args & a) const {
        return a.params.fixed ? (shares_pieces(a) ? pieces_size(a) : 0)
                              : (size_t)2 * JOBS * state_size() * sizeof(float);
    }
    // Return the bytes for what the tiles read, which is looked up once for all their splits.
    size_t shared_plans_size(const lctx_attend_args & a) const {
        return least_tiles(a) < JOBS ? JOBS * GGML_PAD(lctx_tile_plan::size(a, *this), LCTX_CACHE_LINE) : 0;
    }
    lctx_tile_plan shared_plan(const lctx_attend_args & a, char * base, int64_t index) const {
        return {base + index * GGML_PAD(lctx_tile_plan::size(a, *this), LCTX_CACHE_LINE), *this};
    }
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    lctx_block_scratch block;
    float * states;      // of all columns of a tile, and of one of its pieces
    lctx_states picked;  // of the columns that read an item
    lctx_turned turned;
    lctx_tile_plan plan;
    lctx_list_scratch list;  // in the same place: lists are read before

    static size_t block_size(const lctx_attend_args & a, const schedule & g) {
        return GGML_PAD(lctx_block_scratch::n_float(g.max_reader(), a.head_dim_k, g.dim_v) * sizeof(float),
                        LCTX_CACHE_LINE);
    }
    // pointers, sums, and a row for columns that are not there
    static size_t picked_size(const schedule & g) {
        return g.max_reader() * (sizeof(float *) + 2 * sizeof(float)) + g.dim_v * sizeof(float);
    }
    static size_t states_size(const lctx_attend_args & a, const schedule & g) {
        return GGML_PAD(picked_size(g) + (g.has_pieces(a) ? 2 : 1) * g.state_size() * sizeof(float), LCTX_CACHE_LINE);
    }
    static size_t size(const lctx_attend_args & a, const schedule & g) {
        const size_t of_tiles =
            block_size(a, g) + states_size(a, g) + lctx_turned::size(a, g) + lctx_tile_plan::size(a, g);
        return GGML_PAD(std::max(of_tiles, lctx_list_scratch::size(a)), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_attend_args & a, const schedule & g)
        : block((float *)base, g.max_reader(), a.head_dim_k, g.dim_v),
          states((float *)(base + block_size(a, g) + picked_size(g))),
          picked((float *)((float **)(base + block_size(a, g)) + g.max_reader()), (float **)(base + block_size(a, g)),
                 g.max_reader(), g.dim_v),
          turned(base + block_size(a, g) + states_size(a, g), a, g),
          plan(base + block_size(a, g) + states_size(a, g) + lctx_turned::size(a, g), g),
          list(base, a) {}
};

// The states of the readers: those of the tile when all columns read the item, else sums of their own and the outputs
// of the tile.
lctx_states states_of(const lctx_item & item, const lctx_tile & tile, const scratch & w, const lctx_states & st,
                      int n_pad) {
    if (item.n == tile.n_column) {
        return st;
    }
    std::fill_n(w.picked.m, n_pad, -INFINITY);
    std::fill_n(w.picked.l, n_pad, 0.0f);
    for (int i = 0; i < item.n; i++) {
        const int column = item.readers[i].column;
        w.picked.m[i] = st.m[column], w.picked.l[i] = st.l[column], w.picked.anywhere[i] = st.out(column);
    }
    std::fill_n(w.picked.anywhere + item.n, lctx_few_pad(item.n) - item.n, w.picked.l + (w.picked.l - w.picked.m));
    return w.picked;
}

// Blocks [first, end) of an item.
LCTX_ALONE void attend_item(const lctx_attend_args & a, const lctx_tile & tile, const lctx_item & item, int first,
                            int end, const scratch & w, const lctx_states & st) {
    const lctx_columns columns(w.block.queries, item.n, a.head_dim_k, a.params.fixed,
                               lctx_as_rows(a, item.n, item.is_chunk));
    item.load_queries(a, tile, columns, w.block.rotated, w.turned);
    lctx_round_for_scores(a, columns);
    const lctx_states own = states_of(item, tile, w, st, columns.n_pad);
    lctx_attend_blocks(a, columns, item, first, end, own, w.block);
    for (int i = 0; own.m != st.m && i < item.n; i++) {
        st.m[item.readers[i].column] = own.m[i], st.l[item.readers[i].column] = own.l[i];
    }
}

// All that a tile reads, in pieces that end at fixed cells.
void attend_pieces(const lctx_attend_args & a, const schedule & g, const lctx_tile & tile, const lctx_tile_plan & plan,
                   const scratch & w, const lctx_states & st) {
    const lctx_states piece = g.states(w.states + g.state_size());
    st.clear(lctx_round_up(tile.n_column, LCTX_VL));
    lctx_each_item(a, g, tile.head_kv, plan, 0, plan.n, [&](const lctx_item & item) {
        for (int first = 0, end = 0; first < item.n_block(); first = end) {
            const int next = lctx_round_up(item.first_block() + first + 1, schedule::PIECE_BLOCKS);
            end = std::min(item.n_block(), next - item.first_block());
            piece.clear(lctx_round_up(tile.n_column, LCTX_VL));
            attend_item(a, tile, item, first, end, w, piece);
            for (int c = 0; c < tile.n_column; c++) {
                st.merge(c, piece);
            }
        }
    });
}

// Piece number `index` of a tile, counted over its segments.
void attend_piece(const lctx_attend_args & a, const schedule & g, const lctx_tile & tile, const lctx_tile_plan & plan,
                  const scratch & w, const lctx_states & st, int index) {
    const int segment = index / g.n_piece, first_block = index % g.n_piece * schedule::PIECE_BLOCKS;
    st.clear(lctx_round_up(tile.n_column, LCTX_VL));
    lctx_each_item(a, g, tile.head_kv, plan, segment, segment + 1, [&](const lctx_item & item) {
        const int first = std::max(0, first_block - item.first_block());
        const int end = std::min(item.n_block(), first_block + schedule::PIECE_BLOCKS - item.first_block());
        if (first < end) {
            attend_item(a, tile, item, first, end, w, st);
        }
    });
}

// Part `split` of the blocks that a tile reads.
void attend_tile(const lctx_attend_args & a, const schedule & g, const lctx_tile & tile, const lctx_tile_plan & plan,
                 const scratch & w, const lctx_states & st, int split) {
    if (g.has_pieces(a)) {
        return g.n_split > 1 ? attend_piece(a, g, tile, plan, w, st, split) : attend_pieces(a, g, tile, plan, w, st);
    }
    w.turned.fill(a, tile);
    st.clear(lctx_round_up(tile.n_column, LCTX_VL));
    const int64_t n_block = plan.n_block();
    const int split_first = (int)(n_block * split / g.n_split), split_end = (int)(n_block * (split + 1) / g.n_split);
    if (split_first == split_end) {
        return;
    }
    const int first_item = plan.item_of(split_first);
    int at = plan.n_before[first_item];  // blocks of the items before
    lctx_each_item(a, g, tile.head_kv, plan, first_item, plan.item_from(split_end), [&](const lctx_item & item) {
        const int first = std::max(split_first - at, 0), end = std::min(split_end - at, item.n_block());
        if (first < end) {
            attend_item(a, tile, item, first, end, w, st);
        }
        at += item.n_block();
    });
}

void write_tile(const lctx_attend_args & a, const lctx_tile & tile, const lctx_states & st) {
    for (int c = 0; c < tile.n_column; c++) {
        lctx_write_state(a, tile.token(c), tile.head(c), st.m[c], st.l[c], st.out(c));
    }
}

void merge_tile(const lctx_attend_args & a, const schedule & g, int64_t index, float * partials) {
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

const char * lctx_cpu_prompt_products() {
#if LCTX_HAS_KEY_INTEGERS && LCTX_HAS_PAIRS
    return "f32; quantized and bf16 in bf16; K in q8_0 and q4_0 in int8";
#elif LCTX_HAS_KEY_INTEGERS && LCTX_HAS_DOT
    return "f32; K in q8_0 and q4_0 in int8";
#elif LCTX_HAS_KEY_INTEGERS
    return "f32; K in q8_0 and q4_0 in int16";
#else
    return "f32";
#endif
}

size_t lctx_cpu_attend_wsize(const lctx_attend_args & args, int n_tasks) {
    const schedule g(args);
    return LCTX_CACHE_LINE + scratch::size(args, g) * n_tasks + g.partial_size(args) + g.shared_plans_size(args) +
           g.cut_size(args) * sizeof(int32_t);
}

// Tiles whose tokens share a list.
static void attend_lists(const ggml_compute_params * params, const lctx_attend_args & args,
                         const lctx_list_scratch & w) {
    const int64_t n_job = lctx_list_jobs(args);
    for (int64_t job = params->ith; job < n_job; job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        lctx_attend_list(args, job, w);
    }
}

// Every tile by one thread.
static void attend_whole(const ggml_compute_params * params, const lctx_attend_args & args, const schedule & g,
                         const scratch & w) {
    for (int64_t index = params->ith; index < g.n_tile; index = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const lctx_tile tile = g.tile(index);
        const lctx_states st = g.states(w.states);
        lctx_invert(args, g, tile, w.plan);
        attend_tile(args, g, tile, w.plan, w, st, 0);
        write_tile(args, tile, st);
    }
}

// Parts of tiles, whose states are merged.
static void attend_splits(const ggml_compute_params * params, const lctx_attend_args & args, const schedule & g,
                          const scratch & w, float * partials, char * shared) {
    for (int64_t index = params->ith; index < g.n_tile; index += params->nth) {
        lctx_invert(args, g, g.tile(index), g.shared_plan(args, shared, index));
    }
    ggml_barrier(params->threadpool);
    for (int64_t job = params->ith; job < g.n_tile * g.n_split;
         job = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t index = job / g.n_split;
        attend_tile(args, g, g.tile(index), g.shared_plan(args, shared, index), w,
                    g.states(partials + (size_t)job * g.state_size()), (int)(job % g.n_split));
    }
    ggml_barrier(params->threadpool);
    for (int64_t index = params->ith; index < g.n_tile; index += params->nth) {
        merge_tile(args, g, index, partials);
    }
}

void lctx_cpu_attend(const ggml_compute_params * params, const lctx_attend_args & args) {
    schedule g(args);
    // a vector that straddles two cache lines costs two loads
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args, g), args, g);
    float * partials = (float *)(base + params->nth * scratch::size(args, g));
    char * shared = (char *)partials + g.partial_size(args);
    int32_t * cut = (int32_t *)(shared + g.shared_plans_size(args));

    if (params->ith == 0) {
        g.cut_tokens(args, cut);
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    if (args.params.tiles.n_tile > 0) {
        attend_lists(params, args, w.list);
        ggml_barrier(params->threadpool);
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
        ggml_barrier(params->threadpool);
    }
    if (args.choices().n_alone() == 0) {
        return;
    }
    g.set_cut(args, cut);
    if (g.n_split == 1) {
        attend_whole(params, args, g, w);
    } else {
        attend_splits(params, args, g, w, partials, shared);
    }
}
