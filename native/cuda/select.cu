// *select*: every query scores the far chunks of its base at their angles and keeps the best (LongHeads, eq. 3).
//
// ../ops/summaries.h says what a score is. Of tiles, some queries are compared, and a list of chunks is chosen for each
// KV head.
#include "choose.h"
#include "references.h"
#include "tile-lists.h"
#include "tile-queries.h"
#include "tile-scores.h"

namespace {

constexpr int FEW = 8;            // tokens: a block of threads for a choice
constexpr int WARPS = 8;          // of a block, each with chunks of its own
constexpr int CHUNKS = 4;         // of a warp
constexpr int PREPARE_WARPS = 4;  // of a block, each with a query of its own
constexpr int CHOOSE_WARPS = 4;   // of a block, each with a choice of its own
constexpr int CHOICE_WARPS = 32;  // of a block that has one choice: few blocks run, and each pass waits for memory

// ---- queries ----

// A warp for a query: head and slot.
__global__ void prepare_queries(lctx_select_args a, lctx_select_plan p) {
    lctx_begin();
    lctx_let_next_begin();
    const int i = (int)blockIdx.x, job = (int)blockIdx.y * PREPARE_WARPS + lctx_warp();
    const int head = job / a.chunks.n_range, slot = job % a.chunks.n_range;
    if (head >= a.n_head) {
        return;
    }
    const int32_t token = p.token(a, i), angle = lctx_range_of(a, token, slot).angle;
    if (lctx_chunk_range(a, token, slot).empty()) {
        return;
    }
    char * to = p.query(a, i, head, slot);
    if (!a.chunks.by_keys()) {
        return rotate_query(a, token, head, angle, (float *)to);
    }
    float * q = (float *)lctx_shared() + lctx_warp() * a.head_dim;
    rotate_query(a, token, head, angle, q);
    round_query(a, q, (lctx_key_query *)to);
}

// ---- chunks of a warp ----

// Gives a warp the chunks of a list to score, for token i of the slab.
struct warp_job {
    int i, list, chunk0;
    int32_t token;

    __device__ warp_job(const lctx_select_args & a, const lctx_select_plan & p)
        : i((int)blockIdx.x),
          list((int)blockIdx.y),
          chunk0(((int)blockIdx.z * WARPS + lctx_warp()) * CHUNKS),
          token(p.token(a, i)) {}
    // f(slot, chunks) for its chunks.
    template <typename F> __device__ void each_slot(const lctx_select_args & a, F && f) const {
        for (int slot = 0; slot < a.chunks.n_range; slot++) {
            const lctx_chunk_range r = lctx_chunk_range(a, token, slot).within(chunk0, chunk0 + CHUNKS);
            if (!r.empty()) {
                f(slot, r);
            }
        }
    }
    __device__ void put(const lctx_select_args & a, const lctx_select_plan & p, int head, int chunk,
                        float score) const {
        if (lctx_lane() == 0) {
            p.scores_of(a, i, head)[chunk] = score;
        }
    }
};

// ---- scores by summaries ----

// Elements [d, d + 8) of a summary.
__device__ void summary_8(const lctx_select_args & a, const char * summary, int d, float (&x)[8]) {
    if (a.summary_type == GGML_TYPE_Q8_0) {
        lctx_load_8<lctx_cuda_q8_0>(summary, d, x);
    } else {
        lctx_load_8<lctx_cuda_f16>(summary, d, x);
    }
}

// The log of what a chunk attracts: its other keys, each `others` on average, and its outlier.
__device__ float attraction(const lctx_select_args & a, float others, float outlier) {
    const float all = others + logf(a.chunks.n_other());
    return fmaxf(all, outlier) + log1pf(expf(-fabsf(all - outlier)));
}

// Scores of chunks of r, CHUNKS at most, for one query.
__device__ void score_summaries_of(const lctx_select_args & a, const float * query, const char * summaries,
                                   const lctx_chunk_range & r, float (&score)[CHUNKS]) {
    float others[CHUNKS] = {}, outlier[CHUNKS] = {};
    const lctx_summary_kind kind = a.chunks.summary();
    for (int d = lctx_lane() * 8; d < kind.n_vector * a.head_dim; d += LCTX_WARP * 8) {
        const int vector = d / a.head_dim;
        const bool is_outlier = kind.has_outlier && vector == kind.n_sum();
        float q[8];
        lctx_load_8(query + d % a.head_dim, q);
        for (int c = 0; c < CHUNKS; c++) {
            float x[8], product = 0.0f;
            summary_8(a, summaries + lctx_min(r.first + c, r.end - 1) * a.summary_stride, d, x);
            for (int i = 0; i < 8; i++) {
                product += lctx_meet(a.chunks.representation, vector, q[i], a.scale) * x[i];
            }
            others[c] += is_outlier ? 0.0f : product;
            outlier[c] += is_outlier ? product : 0.0f;
        }
    }
    for (int c = 0; c < CHUNKS; c++) {
        const float sum = lctx_warp_sum(others[c]);
        score[c] = kind.has_outlier ? attraction(a, sum, lctx_warp_sum(outlier[c])) : sum;
    }
}

__global__ void score_summaries(lctx_select_args a, lctx_select_plan p) {
    lctx_begin();
    const warp_job job(a, p);
    const int n_head = a.n_head / a.n_list;
    job.each_slot(a, [&](int slot, const lctx_chunk_range & r) {
        const int32_t seq = a.rows[job.token].seq;
        const char * summaries = a.summaries + job.list * a.summary_head_stride + seq * a.summary_seq_stride;
        for (int h = 0; h < n_head; h++) {
            const int head = job.list * n_head + h;
            float score[CHUNKS];
            score_summaries_of(a, (const float *)p.query(a, job.i, head, slot), summaries, r, score);
            for (int c = 0; c < CHUNKS && r.first + c < r.end; c++) {
                job.put(a, p, head, r.first + c, score[c]);
            }
        }
    });
}

// ---- choices ----

// A warp, or a block of N_WARP, per token and choice.
template <int N_WARP> __global__ void choose(lctx_select_args a, lctx_select_plan p) {
    lctx_begin();
    lctx_let_next_begin();
    const int64_t job = N_WARP == 1 ? (int64_t)blockIdx.x * CHOOSE_WARPS + lctx_warp() : (int64_t)blockIdx.x;
    const int choice = (int)(job % a.n_choice);
    const int64_t i = job / a.n_choice;
    if (i < p.n_slab) {
        const lctx_chosen_segments to = {a, p.token(a, (int)i), a.choices().alone(p.first + (int32_t)i, choice)};
        lctx_chooser<N_WARP>(a, to, p.scores_of(a, (int)i, choice * (a.n_head / a.n_choice))).run();
    }
}

// ---- launches ----

void launch_queries(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    const unsigned n_query = (unsigned)lctx_div_up(a.n_head * a.chunks.n_range, PREPARE_WARPS);
    const size_t shared = PREPARE_WARPS * a.head_dim * sizeof(float);
    lctx_launch(prepare_queries, dim3(p.n_slab, n_query), PREPARE_WARPS * LCTX_WARP, shared, queue.stream, a, p);
}

template <int BITS> void launch_keys(const lctx_cuda_queue & queue, const lctx_select_args & a,
                                     const lctx_select_plan & p, const lctx_new_rows & rows) {
    if (has_many_columns<BITS>(queue.device, a, p)) {
        launch_queries(queue, a, p);
        launch_key_scores<BITS, 4, 1>(queue, a, p, rows);
    } else {
        launch_key_scores<BITS, 1, 4>(queue, a, p, rows);
    }
    if (p.by_weights(a)) {
        launch_weights<BITS>(queue, a, p);
    }
}

void launch_scores(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p,
                   const lctx_new_rows & rows) {
    if (a.chunks.by_keys()) {
        return a.index.bits == 1 ? launch_keys<1>(queue, a, p, rows) : launch_keys<2>(queue, a, p, rows);
    }
    launch_queries(queue, a, p);
    const dim3 grid(p.n_slab, a.n_list, (unsigned)lctx_div_up(lctx_max(a.n_chunk_max, 1), WARPS * CHUNKS));
    lctx_launch(score_summaries, grid, WARPS * LCTX_WARP, 0, queue.stream, a, p);
}

// A block for every choice.
template <int N_WARP> void launch_blocks(const lctx_cuda_queue & queue, const lctx_select_args & a,
                                         const lctx_select_plan & p, int64_t n_job) {
    const size_t shared = lctx_chooser<N_WARP>::shared(a);
    lctx_launch(choose<N_WARP>, dim3((unsigned)n_job), N_WARP * LCTX_WARP, shared, queue.stream, a, p);
}

void launch_choices(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p) {
    constexpr int FULL = 32;  // warps of a multiprocessor: fewer wait for memory most of the time
    const int64_t n_job = (int64_t)p.n_slab * a.n_choice;
    if (p.n_all <= FEW) {
        launch_blocks<CHOICE_WARPS>(queue, a, p, n_job);
    } else if (n_job < FULL * queue.device.n_multiprocessor) {
        launch_blocks<WARPS>(queue, a, p, n_job);
    } else {
        const dim3 grid((unsigned)lctx_div_up(n_job, CHOOSE_WARPS));
        const size_t shared = CHOOSE_WARPS * lctx_chooser<1>::shared(a);
        lctx_launch(choose<1>, grid, CHOOSE_WARPS * LCTX_WARP, shared, queue.stream, a, p);
    }
}

// f(shape, plan) for tiles.
template <typename F> auto with_tiles(const lctx_select_args & a, char * work, F && f) {
    return with_tile_shape(a.index,
                           [&](auto shape) { return f(shape, lctx_tile_work(a, decltype(shape)::STEPS, work)); });
}

void select_lists(const lctx_cuda_queue & queue, const lctx_select_args & a) {
    with_tiles(a, queue.work, [&](auto shape, const lctx_tile_work & p) {
        launch_tile_queries<decltype(shape)>(queue, a, p);
        launch_tile_scores<decltype(shape)>(queue, a, p);
        launch_tile_lists(queue, a, p);
    });
}

}  // namespace

size_t lctx_cuda_select_wsize(const lctx_cuda_device & device, const lctx_select_args & args) {
    const auto size = [](auto, const lctx_tile_work & p) { return (size_t)p.end; };
    const size_t of_tiles = args.n_tile > 0 ? with_tiles(args, nullptr, size) : 0;
    return lctx_max(of_tiles, lctx_select_plan(device, args, nullptr).size(args));
}

void lctx_cuda_select(const lctx_cuda_queue & queue, const lctx_select_args & args, const lctx_new_rows & rows) {
    if (args.n_tile > 0) {
        select_lists(queue, args);
    }
    lctx_select_plan p(queue.device, args, queue.work);
    for (; p.first < p.n_all; p.first += p.n_slab) {
        p.n_slab = lctx_min(p.n_slab, p.n_all - p.first);
        launch_scores(queue, args, p, rows);
        launch_choices(queue, args, p);
    }
}
