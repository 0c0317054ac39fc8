// *vote*: the queries of the batch vote for the rows that they have read, now that their LSE is known.
//
// A block of threads takes pages of one KV head, so that a row's score has one writer, and goes over the tokens of
// their sequence in order, so that a sum does not depend on how they were cut. Scores are computed as in *attend*, for
// the rows of the page whose fate is open.
#include "expand.h"
#include "flash.h"
#include "hadamard.h"
#include "kernels.h"
#include "tile.h"
#include "voters.h"
#include "walk.h"

namespace {

// Columns, (token, head, segment), that meet the rows of a page, or of half a page, at once: half of the warps take
// half of the rows. Tiles of wide heads are smaller, so that they fit into shared memory.
template <int DIM_> struct shape {
    static constexpr int DIM = DIM_;  // of K, padded
    static constexpr bool WIDE = DIM > 256;
    static constexpr int ROWS = WIDE ? LCTX_PAGE_ROWS / 2 : LCTX_PAGE_ROWS;
    static constexpr int COLUMNS = WIDE ? 16 : 32, WARP_COLUMNS = 16, WARP_ROWS = ROWS / 2;
    static constexpr int THREADS = WIDE ? 64 : 128;
    static constexpr int BLOCKS = DIM > 128 ? 2 : 4;  // of a multiprocessor, for which there are registers
    static constexpr int STRIDE = DIM + 8;
    static constexpr int SCORE_STRIDE = ROWS + 8;  // so that the lanes of a warp write to different banks
    static_assert(THREADS == LCTX_WARP * (COLUMNS / WARP_COLUMNS) * (ROWS / WARP_ROWS),
                  "a warp for every part of a product");
};

// A column as a voter.
struct ballot {
    int32_t row0, row1;  // what it reads
    int32_t step;        // its row
    float level;  // its LSE where scores are weights; else the least score of an important row: LSE - ln t. Base 2
};

template <typename S> struct memory {
    alignas(16) uint16_t k[S::ROWS * S::STRIDE];
    alignas(16) uint16_t q[S::COLUMNS * S::STRIDE];
    float scores[S::COLUMNS * S::SCORE_STRIDE];
    ballot ballots[2][S::COLUMNS];  // those of the next columns are written while these are counted
    int32_t cell[S::ROWS];          // open ones
    int32_t row[S::ROWS];
    int32_t start[S::THREADS];  // number of the first column of each list
    int32_t first[S::THREADS];  // its first segment
    int32_t sums[LCTX_WARP];
};

// The scores from before the ubatch, of the rows that this block has.
template <typename S> __device__ void keep_scores(const lctx_vote_args & v, const lctx_run & r, int head_kv) {
    const int32_t undo_from = v.voters[r.end - 1].undo_from;
    if (undo_from < 0) {
        return;
    }
    const lctx_voted at(v, r, head_kv);
    for (int page = (int)blockIdx.x; page * S::ROWS < at.n_held; page += (int)gridDim.x) {
        const int cell = page * S::ROWS + (int)threadIdx.x;
        if ((int)threadIdx.x < S::ROWS && cell < at.n_held) {
            at.held.undo()[cell] = at.held.scores()[cell];
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        at.held.undo_from() = undo_from;
    }
}

// The lists of segments of the voting tokens for one KV head: by token, then by heads that share one.
struct lists {
    const lctx_attend_args & a;
    lctx_cuda_lists segs;
    int token0, head0, n_choice, n_head;

    __device__ lists(const lctx_attend_args & a, int token0, int head_kv)
        : a(a), segs{a}, token0(token0), head0(head_kv * (a.n_head / a.n_head_kv)) {
        n_choice = segs.by_chunk() ? a.n_choice / a.n_head_kv : 1;
        n_head = a.n_head / a.n_head_kv / n_choice;
    }
    __device__ int token(int list) const { return token0 + list / n_choice; }
    __device__ int head(int list) const { return head0 + list % n_choice * n_head; }
    __device__ const lctx_segment * of(int list) const { return segs.of(token(list), head(list)); }
};

// ---- what many pages need is made once ----

struct prepared {
    float * ln_rows;     // ln t of every list, where heads choose; else nullptr
    uint16_t * queries;  // [n_seg][n_tokens][n_head][DIM] turned to where they look from, where many tokens read the
                         // same; else nullptr

    static size_t n_list(const lctx_attend_args & a) {
        return a.params.chunk_size > 0 ? (size_t)a.n_tokens * a.n_choice : 0;
    }
    template <typename S> static size_t n_query(const lctx_attend_args & a) {
        const bool many = a.params.chunk_size == 0 && a.n_tokens * (a.n_head / a.n_head_kv) > S::COLUMNS;
        return many ? (size_t)a.n_seg * a.n_tokens * a.n_head * S::DIM : 0;
    }
    template <typename S> static size_t size(const lctx_attend_args & a) {
        return n_list(a) * sizeof(float) + n_query<S>(a) * sizeof(uint16_t);
    }
    template <typename S> static prepared in(char * work, const lctx_attend_args & a) {
        return {n_list(a) > 0 ? (float *)work : nullptr, n_query<S>(a) > 0 ? (uint16_t *)work : nullptr};
    }
    template <typename S> __device__ uint16_t * query(const lctx_attend_args & a, int seg, int token, int head) const {
        return queries + (((size_t)seg * a.n_tokens + token) * a.n_head + head) * S::DIM;
    }
};

// Rows that the segments of a list item.
__device__ int32_t rows_read(const lctx_segment * segs, int n_seg) {
    int32_t n = 0;
    for (int i = 0; i < n_seg; i++) {
        n += lctx_max(0, segs[i].row1 - segs[i].row0);
    }
    return n;
}

__global__ void count_rows(const lctx_attend_args a, prepared made) {
    lctx_begin();
    const int list = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (list < a.n_tokens * a.n_choice) {
        made.ln_rows[list] = logf((float)rows_read(a.segs + (int64_t)list * a.n_seg, a.n_seg));
    }
}

// Of queries: scores are base 2 without softcap, as in *attend*.
__device__ float query_scale(const lctx_attend_args & a) {
    return a.params.softcap != 0.0f ? a.params.scale / a.params.softcap : a.params.scale * LCTX_LOG2_E;
}

// Dimensions d and d + 1 of a query that looks from `angle`.
__device__ uint32_t turned(const lctx_attend_args & a, int token, int head, int32_t angle, int d) {
    if (d >= a.head_dim_k) {
        return 0;
    }
    const float scale = query_scale(a);
    const float * q = (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
    const float * cs = a.angles + (size_t)angle * a.n_dims;
    return lctx_pack_limited(scale * lctx_rotated(q, d, cs, a.n_dims, a.params.rope_mode),
                             scale * lctx_rotated(q, d + 1, cs, a.n_dims, a.params.rope_mode));
}

// A block of threads for a token and segment.
template <typename S> __global__ void turn_queries(const lctx_attend_args a, prepared made) {
    lctx_begin();
    const int token = (int)blockIdx.x, seg = (int)blockIdx.y;
    const lctx_segment segment = a.segs[(int64_t)token * a.n_seg + seg];
    if (segment.row0 >= segment.row1) {
        return;
    }
    for (int head = lctx_warp(); a.params.hadamard.k != 0 && head < a.n_head; head += S::THREADS / LCTX_WARP) {
        lctx_put_query<S::DIM>(a, token, head, segment.angle, query_scale(a), made.query<S>(a, seg, token, head));
    }
    for (int i = (int)threadIdx.x; a.params.hadamard.k == 0 && i < a.n_head * S::DIM / 2; i += S::THREADS) {
        const int head = i / (S::DIM / 2), d = i % (S::DIM / 2) * 2;
        *(uint32_t *)(made.query<S>(a, seg, token, head) + d) = turned(a, token, head, segment.angle, d);
    }
}

// Segments [first, first + n) of a list.
struct range {
    int first, n;
};

// Those of [first, end) that read rows between lo and hi: they ascend, and what is unused or empty comes last.
__device__ range range_of(const lctx_segment * segs, int first, int end, int32_t lo, int32_t hi) {
    for (int n = end - first; n > 0;) {
        const lctx_segment & s = segs[first + n / 2];
        const bool is_before = s.row0 < s.row1 && s.row1 <= lo;
        first += is_before ? n / 2 + 1 : 0;
        n = is_before ? n - n / 2 - 1 : n / 2;
    }
    range p = {first, 0};
    for (; first < end && segs[first].row0 < segs[first].row1 && segs[first].row0 <= hi; first++) {
        p.n++;
    }
    return p;
}

// The query of a column that is still to be made.
struct wanted {
    int token = -1, head = 0;  // token -1: none
    int32_t angle = 0;
};

// The query of the column that a thread shares with its neighbours, and its ballot. Queries that are transformed are
// left to the warp.
template <typename S> __device__ wanted load_column(const lctx_vote_args & v, const prepared & made, const lists & l,
                                                    int list0, int first, int n_column, memory<S> & m,
                                                    ballot * ballots) {
    constexpr int SHARE = S::THREADS / S::COLUMNS;
    const lctx_attend_args & a = v.attend;
    const int c = (int)threadIdx.x / SHARE, mine = (int)threadIdx.x % SHARE;
    const bool is_left = a.params.hadamard.k != 0 && !made.queries;
    if (first + c >= n_column) {
        return {};
    }
    int at = 0;  // the last list that begins here or before
    for (int step = S::THREADS / 2; step > 0; step /= 2) {
        at += m.start[at + step] <= first + c ? step : 0;
    }
    const int list = list0 + at, in_list = first + c - m.start[at], seg = m.first[at] + in_list / l.n_head;
    const int token = l.token(list), head = l.head(list) + in_list % l.n_head;
    const lctx_segment segment = l.of(list)[seg];
    uint16_t * q = m.q + c * S::STRIDE;
    if (made.queries) {
        const uint16_t * from = made.query<S>(a, seg, token, head);
        for (int d = 8 * mine; d < S::DIM; d += 8 * SHARE) {
            *(uint4 *)(q + d) = *(const uint4 *)(from + d);
        }
    } else if (!is_left) {
        for (int d = 2 * mine; d < S::DIM; d += 2 * SHARE) {
            *(uint32_t *)(q + d) = turned(a, token, head, segment.angle, d);
        }
    }
    if (mine == 0) {
        const float lse = a.lse[(size_t)token * a.n_head + head];
        float ln_t = 0.0f;
        if (!lctx_is_weight(v.retain.score)) {
            ln_t = made.ln_rows ? made.ln_rows[(l.of(list) - a.segs) / a.n_seg]
                                : logf((float)rows_read(l.of(list), a.n_seg));
        }
        ballots[c] = {segment.row0, segment.row1, v.voters[token].row, LCTX_LOG2_E * (lse - ln_t)};
    }
    return is_left ? wanted{token, head, segment.angle} : wanted{};
}

// Columns [first, first + COLUMNS) of n_column: their queries and their ballots.
template <typename S> __device__ void load_columns(const lctx_vote_args & v, const prepared & made, const lists & l,
                                                   int list0, int first, int n_column, memory<S> & m,
                                                   ballot * ballots) {
    constexpr int SHARE = S::THREADS / S::COLUMNS;
    const wanted mine = load_column(v, made, l, list0, first, n_column, m, ballots);
    for (int lane = 0; v.attend.params.hadamard.k != 0 && lane < LCTX_WARP;
         lane += SHARE) {  // the columns of this warp
        const int token = lctx_shuffle(mine.token, lane), head = lctx_shuffle(mine.head, lane);
        const int32_t angle = lctx_shuffle(mine.angle, lane);
        if (token >= 0) {
            uint16_t * to = m.q + (lctx_warp() * LCTX_WARP + lane) / SHARE * S::STRIDE;
            lctx_put_query<S::DIM>(v.attend, token, head, angle, query_scale(v.attend), to);
        }
    }
}

// The open keys of the page as a tile.
template <typename S>
__device__ void load_keys(const lctx_attend_args & a, const lctx_voted & at, bool near, int n_open, memory<S> & m) {
    const lctx_pool_args & pool = a.cache.k_pool;
    const auto row = [&](int i) {
        return near ? lctx_near_row(a.cache, m.row[i], at.head_kv, at.seq)
                    : lctx_key_row(a.cache, m.cell[i], at.head_kv, at.seq);
    };
    if (pool.type == GGML_TYPE_F16) {
        lctx_cuda_copy_rows<S>(a.head_dim_k, 0, n_open, row, m.k);
        lctx_copy_end_group();
        lctx_copy_wait<0>();
    } else {
        lctx_cuda_unpack_rows<S>(pool.type, a.head_dim_k, 0, n_open, row, m.k);
    }
}

// Scores of up to COLUMNS columns and the open rows, base 2.
template <typename S> __device__ void score(const lctx_attend_args & a, int n_column, int n_open, memory<S> & m) {
    constexpr int COLUMN_WARPS = S::COLUMNS / S::WARP_COLUMNS;
    const int column0 = lctx_warp() % COLUMN_WARPS * S::WARP_COLUMNS, row0 = lctx_warp() / COLUMN_WARPS * S::WARP_ROWS;
    if (column0 >= n_column || row0 >= n_open) {
        return;
    }
    lctx_cuda_flash<S::DIM, S::WARP_ROWS> f;
    lctx_cuda_queries<S::DIM, false> q;
    q.take(m.q + column0 * S::STRIDE);
    f.scores(q, m.k + row0 * S::STRIDE);
    f.each_score([&](float s, int i, int row) {
        m.scores[(column0 + f.column(i)) * S::SCORE_STRIDE + row0 + row] =
            a.params.softcap != 0.0f ? LCTX_LOG2_E * a.params.softcap * lctx_tanh(s) : s;
    });
}

// The score of the row of this thread after the votes of n columns. s: its scores
template <typename S> __device__ int32_t count(lctx_score kind, int32_t score, int32_t row, const ballot * ballots,
                                               const float * s, int n_column) {
    float sum = lctx_held::as_float(score), most = sum;
    for (int c = 0; c < n_column; c++) {
        const ballot & b = ballots[c];
        const float x = s[c * S::SCORE_STRIDE];
        const bool reads = b.row0 <= row && row < b.row1, important = reads && x >= b.level;
        float weight = 0.0f;
        switch (kind) {
            case LCTX_SCORE_LAST:  score = important ? lctx_max(score, b.step) : score; break;
            case LCTX_SCORE_COUNT: score += important; break;
            default:               weight = reads ? lctx_exp2(x - b.level) : 0.0f;
        }
        sum += weight;
        most = weight > most ? weight : most;
    }
    return kind == LCTX_SCORE_SUM   ? lctx_held::as_score(sum)
           : kind == LCTX_SCORE_MAX ? lctx_held::as_score(most)
                                    : score;
}

__device__ bool needs_votes(const lctx_retain & r, int32_t row, int32_t score, int32_t border) {
    return !r.one_vote_is_enough() || r.is_open(row, score, border);
}

// The votes of tokens [token0, end) for the open rows of a page, as far as segments of one phase read them. score: of
// this thread's row
template <typename S> __device__ void vote_phase(const lctx_vote_args & v, const prepared & made, const lists & l,
                                                 int end, int phase, const lctx_voted & at, int n_open,
                                                 int32_t & score_of_mine, memory<S> & m) {
    const int n_list = (end - l.token0) * l.n_choice, mine = (int)threadIdx.x;
    bool loaded = false;
    for (int list0 = 0, turn = 0; list0 < n_list; list0 += S::THREADS) {
        range p = {0, 0};
        if (list0 + mine < n_list && v.voters[l.token(list0 + mine)].votes) {
            p = range_of(l.of(list0 + mine), l.segs.first(phase), l.segs.end(phase), m.row[0], m.row[n_open - 1]);
        }
        int n_column;
        m.start[mine] = lctx_block_scan(p.n * l.n_head, m.sums, n_column);
        m.first[mine] = p.first;
        if (n_column == 0) {
            continue;
        }
        if (!loaded) {
            load_keys(v.attend, at, l.segs.is_near(phase), n_open, m);
            loaded = true;
        }
        __syncthreads();
        for (int first = 0; first < n_column; first += S::COLUMNS, turn ^= 1) {
            const int n = lctx_min(S::COLUMNS, n_column - first);
            load_columns(v, made, l, list0, first, n_column, m, m.ballots[turn]);
            __syncthreads();
            score(v.attend, n, n_open, m);
            __syncthreads();
            if (mine < n_open) {
                score_of_mine =
                    count<S>(v.retain.score, score_of_mine, m.row[mine], m.ballots[turn], m.scores + mine, n);
            }
        }
    }
}

// The votes of tokens [token0, end) for one page.
template <typename S> __device__ void vote_page(const lctx_vote_args & v, const prepared & made, const lists & l,
                                                int end, const lctx_voted & at, int page, memory<S> & m) {
    const int mine = (int)threadIdx.x, cell = page * S::ROWS + mine;
    const bool here = mine < S::ROWS && cell < at.n_held;
    const int32_t row = here ? at.held.rows()[cell] : 0;
    const bool is_open = here && needs_votes(v.retain, row, at.held.scores()[cell], at.border);
    int n_open;
    const int index = lctx_block_scan(is_open, m.sums, n_open);
    if (n_open == 0) {
        return;
    }
    if (is_open) {
        m.cell[index] = cell;
        m.row[index] = row;
    }
    __syncthreads();
    int32_t score = mine < n_open ? at.held.scores()[m.cell[mine]] : 0;
    for (int near = 1; near >= 0; near--) {  // what is near to a query is far from later ones
        for (int phase = 0; phase < l.segs.n_phase(); phase++) {
            if (l.segs.is_near(phase) == (near != 0)) {
                vote_phase(v, made, l, end, phase, at, n_open, score, m);
            }
        }
    }
    if (mine < n_open) {
        at.held.scores()[m.cell[mine]] = score;
    }
}

template <typename S> __global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    vote(const lctx_vote_args v, prepared made) {
    lctx_begin();
    auto & m = *(memory<S> *)lctx_shared();
    const int head_kv = (int)blockIdx.y;
    lctx_each_run(v.voters, v.attend.n_tokens, [&](const lctx_run & r) { keep_scores<S>(v, r, head_kv); });
    __syncthreads();
    lctx_each_run(v.voters, v.attend.n_tokens, [&](const lctx_run & r) {
        const int first = lctx_find_token(r.first, r.end, [&](int token) { return v.voters[token].votes != 0; });
        if (first == r.end) {
            return;
        }
        const lctx_voted at(v, r, head_kv);
        const lists l(v.attend, first, head_kv);
        for (int page = (int)blockIdx.x; page * S::ROWS < at.n_held; page += (int)gridDim.x) {
            vote_page(v, made, l, r.end, at, page, m);
        }
        __syncthreads();  // another run may be of the same sequence
    });
}

template <typename S> void launch(const lctx_cuda_queue & queue, const lctx_vote_args & v) {
    constexpr int PER_MULTIPROCESSOR = 8;  // blocks, so that none of them waits long for another
    const lctx_attend_args & a = v.attend;
    const prepared made = prepared::in<S>(queue.work, a);
    if (made.ln_rows) {
        const dim3 grid((unsigned)lctx_div_up(a.n_tokens * a.n_choice, S::THREADS));
        lctx_launch(count_rows, grid, S::THREADS, 0, queue.stream, a, made);
    }
    if (made.queries) {
        lctx_launch(turn_queries<S>, dim3(a.n_tokens, a.n_seg), S::THREADS, 0, queue.stream, a, made);
    }
    const int n_page = (int)lctx_div_up(a.cache.held.n_row_max, S::ROWS);
    const int n_block = (int)lctx_div_up(PER_MULTIPROCESSOR * queue.device.n_multiprocessor, a.n_head_kv);
    lctx_launch(vote<S>, dim3(lctx_min(n_page, n_block), a.n_head_kv), S::THREADS, sizeof(memory<S>), queue.stream, v,
                made);
}

// f(shape) with the shape of these arguments.
template <typename F> auto with_shape(const lctx_attend_args & a, F && f) {
    return lctx_cuda_with_width(a.head_dim_k, [&](auto width) { return f(shape<decltype(width)::DIM>()); });
}

}  // namespace

size_t lctx_cuda_vote_wsize(const lctx_cuda_device & device, const lctx_vote_args & args) {
    if (const size_t expanded = lctx_expanded_size(args.attend)) {
        return expanded +
               lctx_cuda_vote_wsize(device, {lctx_expanded_args(args.attend, nullptr), args.voters, args.retain});
    }
    return with_shape(args.attend, [&](auto s) { return prepared::size<decltype(s)>(args.attend); });
}

void lctx_cuda_vote(const lctx_cuda_queue & queue, const lctx_vote_args & args) {
    if (args.attend.params.tiles.n_tile > 0) {
        return lctx_cuda_run_expanded(queue, args.attend,
                                      [&](const lctx_cuda_queue & rest, const lctx_attend_args & attend) {
                                          lctx_cuda_vote(rest, {attend, args.voters, args.retain});
                                      });
    }
    with_shape(args.attend, [&](auto s) { launch<decltype(s)>(queue, args); });
}
