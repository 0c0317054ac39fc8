// Scores chunks by keys, for *select*: levels and the bytes of queries are small integers, which f16 numbers are
// exactly, and so are their sums as floats. Tensor cores multiply 16 columns, each the query of a token and head, with
// the rows of a group (flash.h on their layout).
#pragma once

#include "index.h"
#include "new-rows.h"
#include "scores.h"

#include <climits>

namespace {

// ---- queries ----

// A query, seen from an angle; channel d by lane d % 32. to: [head_dim].
__device__ void rotate_query(const lctx_select_args & a, int32_t token, int head, int32_t angle, float * to) {
    const float * q = (const float *)(a.q + head * a.q_head_stride + token * a.q_token_stride);
    const float * cs = a.angles + (size_t)angle * a.n_dims;
    for (int d = lctx_lane(); d < a.head_dim; d += LCTX_WARP) {
        to[d] = lctx_rotated(q, d, cs, a.n_dims, a.rope_mode);
    }
}

// Round a query to bytes, as the CPU's lctx_index_round; q is in shared memory. A warp.
__device__ void round_query(const lctx_select_args & a, float * q, lctx_key_query * to) {
    lctx_transform_row(q, a.head_dim, a.index.hadamard());
    lctx_sync_warp();
    float most = 0.0f;
    bool is_finite = true;
    for (int d = lctx_lane(); d < a.head_dim; d += LCTX_WARP) {
        most = fmaxf(most, fabsf(q[d]));
        is_finite = is_finite && fabsf(q[d]) <= FLT_MAX;
    }
    most = lctx_warp_max(most);
    is_finite = lctx_ballot(!is_finite) == 0;
    const float inverse = most > 0.0f ? lctx_div(127.0f, most) : 0.0f;
    const lctx_key_order order(a.index);
    for (int i = lctx_lane(); i < order.size(); i += LCTX_WARP) {
        const int d = order.channel(i);
        to->levels()[i] = lctx_to_half(d >= 0 && d < a.head_dim && is_finite ? rintf(q[d] * inverse) : 0.0f);
    }
    if (lctx_lane() == 0) {
        to->scale = is_finite ? a.scale * most / 127.0f : NAN;
    }
}

// ---- products ----

// Tells what a block knows of a column: the chunks that it scores, of which sequence, and where.
struct key_column {
    int first, end, seq;
    int row;  // of the scores of the slab

    __device__ lctx_chunk_range range(int32_t of_seq) const {
        return seq == of_seq ? lctx_chunk_range(first, end) : lctx_chunk_range(0, 0);
    }
};

// log(sum of exp) in two numbers: the largest value, and the sum of exp(value - largest).
struct log_sum {
    float most, sum;

    // Add values of which `top` is the largest and `more` the sum of exp(value - top).
    __device__ __forceinline__ log_sum with(float top, float more) const {
        const float both = fmaxf(most, top), base = both == -INFINITY ? 0.0f : both;
        return {both, sum * expf(most - base) + more * expf(top - base)};
    }
    __device__ float value() const { return most + logf(sum); }
};

// A block: 16 TILES columns of a list, seen from the angle of a slot, and chunks at a stride. A warp takes four chunks,
// one for each lane of a quad to end up with, and of their rows GROUPS groups at a time. lane = 4 g + t. Where the row
// of the token is not written yet, the first blocks write it instead: no query scores a chunk with its own row.
template <int BITS, int TILES, int GROUPS> struct key_scorer {
    static constexpr int WARPS = 8, CHUNKS = 4, COLUMNS = 16 * TILES, GROUP = lctx_index_shape::GROUP;
    static constexpr bool PREPARES = TILES == 1;  // few queries, which each block prepares; else prepare_queries has
    using order = lctx_key_order;
    using sums = float[GROUPS][TILES][2][4];  // of two times 8 rows

    const lctx_select_args & a;
    const lctx_select_plan & p;
    const lctx_new_rows & rows;
    const int n_word, n_quad;      // of the codes of a row; of four words
    const int list, slot, n_head;  // heads of the list
    const int first, n_all;        // the first of the columns of the slab that is this block's
    char * queries;                // [COLUMNS] of p.query_size bytes, in shared memory
    key_column * columns;          // [COLUMNS]

    static size_t shared(const lctx_select_args & a, const lctx_select_plan & p) {
        return COLUMNS * (p.query_size + sizeof(key_column)) + (PREPARES ? WARPS * a.head_dim * sizeof(float) : 0);
    }

    __device__ key_scorer(const lctx_select_args & a, const lctx_select_plan & p, const lctx_new_rows & rows)
        : a(a),
          p(p),
          rows(rows),
          n_word(a.index.n_code() / a.index.WORD),
          n_quad(order(a.index).n_quad()),
          list((int)blockIdx.y / a.chunks.n_range),
          slot((int)blockIdx.y % a.chunks.n_range),
          n_head(a.n_head / a.n_list),
          first((int)blockIdx.x * COLUMNS),
          n_all(p.n_slab * n_head),
          queries(lctx_shared()),
          columns((key_column *)(queries + COLUMNS * p.query_size)) {}

    // Columns after the last repeat it, and score nothing.
    __device__ int index(int column) const { return lctx_min(first + column, n_all - 1) / n_head; }
    __device__ int head(int column) const { return list * n_head + lctx_min(first + column, n_all - 1) % n_head; }
    __device__ lctx_key_query * query(int column) const { return (lctx_key_query *)(queries + column * p.query_size); }

    // What the columns score, and the queries of those that score anything; what others have is not used. All threads.
    __device__ void take_columns() const {
        for (int column = lctx_warp(); column < COLUMNS; column += WARPS) {
            const int32_t token = p.token(a, index(column));
            const lctx_chunk_range r =
                first + column < n_all ? lctx_chunk_range(a, token, slot) : lctx_chunk_range(0, 0);
            columns[column] = {r.first, r.end, a.rows[token].seq, index(column) * a.n_head + head(column)};
            if (!r.empty()) {
                put_query(token, column);
            }
        }
        lctx_copy_end_group();
        lctx_copy_wait<0>();
        __syncthreads();
    }
    // Put the query of a column, by a warp.
    __device__ void put_query(int32_t token, int column) const {
        if constexpr (PREPARES) {
            float * q = (float *)(columns + COLUMNS) + lctx_warp() * a.head_dim;
            lctx_sync_warp();  // all have read the one before
            rotate_query(a, token, head(column), lctx_range_of(a, token, slot).angle, q);
            round_query(a, q, query(column));
        } else {
            const char * from = p.query(a, index(column), head(column), slot);
            for (int at = 16 * lctx_lane(); at < (int)p.query_size; at += 16 * LCTX_WARP) {
                lctx_copy_16((char *)query(column) + at, from + at);
            }
        }
    }

    // The next of the sequences that the columns are of.
    __device__ int32_t next_seq(int32_t last) const {
        int32_t next = INT_MAX;
        for (int column = lctx_lane(); column < COLUMNS; column += LCTX_WARP) {
            const int32_t seq = columns[column].seq;
            next = seq > last ? lctx_min(next, seq) : next;
        }
        return lctx_warp_min(next);
    }
    // Chunks of a sequence that any column scores.
    __device__ lctx_chunk_range candidates(int32_t seq) const {
        int lo = INT_MAX, hi = 0;
        for (int column = lctx_lane(); column < COLUMNS; column += LCTX_WARP) {
            const lctx_chunk_range r = columns[column].range(seq);
            lo = r.empty() ? lo : lctx_min(lo, r.first);
            hi = r.empty() ? hi : lctx_max(hi, r.end);
        }
        hi = -lctx_warp_min(-hi);
        return {lctx_min(lctx_warp_min(lo), hi), hi};
    }

    // Codes of rows g and g + 8: word t of every four. Lanes beyond the last word repeat it: their queries are 0.
    __device__ __forceinline__ void load_codes(const char * const (&group)[GROUPS], int quad,
                                               uint32_t (&codes)[GROUPS][2]) const {
        const int word = lctx_min(4 * quad + lctx_lane() % 4, n_word - 1);
        const auto at = (uint32_t)a.index.word_at(word, lctx_lane() / 4);  // in one register
        lctx_unrolled<GROUPS>([&](int n) {
            const uint32_t * codes_of = (const uint32_t *)(group[n] + at);
            lctx_unrolled<2>([&](int i) { codes[n][i] = codes_of[8 * i]; });
        });
    }

    // Products of the columns with four words of each row.
    __device__ __forceinline__ void add_products(const uint32_t (&codes)[GROUPS][2], const char * levels,
                                                 sums & sum) const {
        lctx_unrolled<order::steps(BITS)>([&](int step) {
            uint32_t key[GROUPS][2][2];
            lctx_unrolled<GROUPS>([&](int n) {
                lctx_unrolled<2>([&](int i) {
                    key[n][i][0] = lctx_index_pair<BITS>(codes[n][i], 2 * step);
                    key[n][i][1] = lctx_index_pair<BITS>(codes[n][i], 2 * step + 1);
                });
            });
            lctx_unrolled<TILES>([&](int tile) {
                uint32_t q[4];
                lctx_load_matrices(q, levels + 16 * tile * p.query_size + step * 16 * sizeof(uint16_t));
                lctx_unrolled<GROUPS>([&](int n) {
                    lctx_unrolled<2>([&](int i) { lctx_mma(sum[n][tile][i], q, key[n][i][0], key[n][i][1]); });
                });
            });
        });
    }

    // Products of the columns with the rows of groups. Codes are loaded one step ahead.
    __device__ __forceinline__ void multiply(const char * const (&group)[GROUPS], sums & sum) const {
        lctx_unrolled<GROUPS * TILES * 8>([&](int i) { (&sum[0][0][0][0])[i] = 0.0f; });
        const char * levels = (const char *)(query(lctx_lane() % 16)->levels() + lctx_lane() / 16 * 8);
        uint32_t next[GROUPS][2];
        load_codes(group, 0, next);
        for (int quad = 0; quad < n_quad; quad++, levels += order::steps(BITS) * 16 * sizeof(uint16_t)) {
            uint32_t codes[GROUPS][2];
            lctx_unrolled<GROUPS>([&](int n) { codes[n][0] = next[n][0], codes[n][1] = next[n][1]; });
            if (quad + 1 < n_quad) {
                load_codes(group, quad + 1, next);
            }
            add_products(codes, levels, sum);
        }
    }

    // f(tile, half) for N tiles from `tile0` on: 8 columns of which this lane has one. Those of one token may all be in
    // the first half.
    template <int N, typename F> __device__ __forceinline__ void each_column_of(int tile0, F && f) const {
        lctx_unrolled<N>([&](int n) {
            lctx_unrolled<2>([&](int h) {
                if (TILES > 1 || first + 8 * h < n_all) {
                    f(tile0 + n, h);
                }
            });
        });
    }
    template <typename F> __device__ __forceinline__ void each_column(F && f) const { each_column_of<TILES>(0, f); }

    // What the products of this lane with a row of a group are to be multiplied by, and what is added.
    struct row_scales {
        float scale[4], bias[4];
    };

    // Products become scores of rows: those of cells [lo, hi), which are in chunk k, are added to logs that lane k of
    // four keeps.
    __device__ __forceinline__ void add_scores(const float (&sum)[TILES][2][4], const uint32_t (&scales)[2],
                                               int32_t cell0, int32_t lo, int32_t hi, int k,
                                               log_sum (&logs)[TILES][2]) const {
        constexpr int PART = lctx_min(TILES, 2);  // tiles: scores of more leave no registers for their sums
        row_scales r;
        lctx_unrolled<4>([&](int i) {
            const int32_t cell = cell0 + i / 2 * 8 + lctx_lane() % 4 * 2 + i % 2;
            const bool is_in = cell >= lo && cell < hi;  // what the others hold may be anything
            r.scale[i] = is_in ? lctx_from_half((uint16_t)(scales[i / 2] >> i % 2 * 16)) : 0.0f;
            r.bias[i] = is_in ? 0.0f : -INFINITY;
        });
        lctx_unrolled<TILES / PART>([&](int part) { add_scores_of<PART>(part * PART, sum, r, lo >= cell0, k, logs); });
    }
    // N tiles from `tile0` on. One step for all columns after the other: none waits for another.
    template <int N> __device__ __forceinline__ void add_scores_of(int tile0, const float (&sum)[TILES][2][4],
                                                                   const row_scales & r, bool begins, int k,
                                                                   log_sum (&logs)[TILES][2]) const {
        float score[N][2][4], top[N][2], more[N][2];
        each_column_of<N>(tile0, [&](int tile, int h) {
            const float query_scale = query(16 * tile + lctx_lane() / 4 + 8 * h)->scale;
            float(&s)[4] = score[tile - tile0][h];
            lctx_unrolled<4>(
                [&](int i) { s[i] = sum[tile][i / 2][2 * h + i % 2] * r.scale[i] * query_scale + r.bias[i]; });
            top[tile - tile0][h] = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
        });
        each_column_of<N>(0, [&](int n, int h) { top[n][h] = lctx_warp_max(top[n][h], 4); });
        each_column_of<N>(0, [&](int n, int h) {
            const float base = top[n][h] == -INFINITY ? 0.0f : top[n][h];
            const float(&s)[4] = score[n][h];
            more[n][h] = (expf(s[0] - base) + expf(s[1] - base)) + (expf(s[2] - base) + expf(s[3] - base));
        });
        each_column_of<N>(0, [&](int n, int h) { more[n][h] = lctx_warp_sum(more[n][h], 4); });
        if (!begins) {
            each_column_of<N>(0, [&](int n, int h) {
                const log_sum all = logs[tile0 + n][h].with(top[n][h], more[n][h]);
                top[n][h] = all.most, more[n][h] = all.sum;
            });
        }
        each_column_of<N>(0, [&](int n, int h) {
            log_sum & mine = logs[tile0 + n][h];
            const bool is_mine = lctx_lane() % 4 == k;
            mine = {is_mine ? top[n][h] : mine.most, is_mine ? more[n][h] : mine.sum};
        });
    }

    // The lane of each chunk writes its scores.
    __device__ __forceinline__ void put_scores(int32_t seq, int chunk0, const log_sum (&logs)[TILES][2]) const {
        const int chunk = chunk0 + lctx_lane() % 4;
        each_column([&](int tile, int h) {
            const key_column & column = columns[16 * tile + lctx_lane() / 4 + 8 * h];
            if (column.range(seq).has(chunk)) {
                p.scores[(size_t)column.row * a.n_chunk_max + chunk] = logs[tile][h].value();
            }
        });
    }

    // Chunks [chunk0, chunk0 + CHUNKS), those of r among them. Lane k has the first cell of chunk k.
    __device__ __forceinline__ void score_chunks(int32_t seq, int chunk0, const lctx_chunk_range & r) const {
        const int chunk = lctx_max(r.first, lctx_min(r.end, chunk0 + lctx_min(lctx_lane(), CHUNKS)));
        const int32_t cell = lctx_cells(a.cache, list, seq).cell(chunk * a.chunks.chunk_size);
        const int32_t end = lctx_shuffle(cell, CHUNKS);
        log_sum logs[TILES][2];
        each_column([&](int tile, int h) { logs[tile][h] = {-INFINITY, 1.0f}; });
        for (int32_t group0 = lctx_shuffle(cell, 0) / GROUP; group0 * GROUP < end; group0 += GROUPS) {
            const char * group[GROUPS];
            uint32_t scales[GROUPS][2];
            lctx_unrolled<GROUPS>([&](int n) {
                group[n] = lctx_index_group(a.cache, lctx_min(group0 + n, (end - 1) / GROUP), list, seq);
                lctx_unrolled<2>([&](int i) {
                    scales[n][i] = *(const uint32_t *)(group[n] + a.index.scale_at(lctx_lane() % 4 * 2 + 8 * i));
                });
            });
            sums sum;
            multiply(group, sum);
            lctx_unrolled<GROUPS>([&](int n) {
                const int32_t cell0 = (group0 + n) * GROUP;
                const uint32_t ended = lctx_ballot(lctx_lane() > 0 && lctx_lane() <= CHUNKS && cell <= cell0);
                const uint32_t begun = lctx_ballot(lctx_lane() < CHUNKS && cell < cell0 + GROUP);
#ifdef __CUDACC__
#pragma unroll 1
#endif
                for (int k = __popc(ended); k < __popc(begun); k++) {
                    const int32_t lo = lctx_shuffle(cell, k), hi = lctx_shuffle(cell, k + 1);
                    if (lo < hi) {
                        add_scores(sum[n], scales[n], cell0, lo, hi, k, logs);
                    }
                }
            });
        }
        put_scores(seq, chunk0, logs);
    }

    // Blocks of the grid that write rows: those of the first z.
    LCTX_HD static int n_writing(const lctx_new_rows & rows) { return rows.store.n_tokens > 0; }
    // Write what the token and KV head of this list store.
    __device__ void put_rows() const {
        if (slot == 0 && blockIdx.x == 0 && lctx_warp() < rows.n_stored()) {
            put_new<BITS>(rows, lctx_warp(), 0, list, (float *)lctx_shared() + lctx_warp() * rows.n_channel());
        }
    }

    __device__ void run() const {
        const int z = (int)blockIdx.z - n_writing(rows), n_z = (int)gridDim.z - n_writing(rows);
        if (z < 0) {
            return put_rows();
        }
        take_columns();
        for (int32_t seq = next_seq(-1); seq != INT_MAX; seq = next_seq(seq)) {
            const lctx_chunk_range r = candidates(seq);
            const int mine = (z * WARPS + lctx_warp()) * CHUNKS, step = n_z * WARPS * CHUNKS;
            for (int chunk0 = r.first / CHUNKS * CHUNKS + mine; chunk0 < r.end; chunk0 += step) {
                score_chunks(seq, chunk0, r);
            }
        }
    }
};

template <int BITS, int TILES, int GROUPS>
__global__ void __launch_bounds__(key_scorer<BITS, TILES, GROUPS>::WARPS * LCTX_WARP, 2)
    score_keys(lctx_select_args a, lctx_select_plan p, lctx_new_rows rows) {
    lctx_begin();
    key_scorer<BITS, TILES, GROUPS>(a, p, rows).run();
}

template <int BITS, int TILES, int GROUPS>
void launch_key_scores(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_select_plan & p,
                       const lctx_new_rows & rows) {
    using scorer = key_scorer<BITS, TILES, GROUPS>;
    constexpr int PER_MULTIPROCESSOR =
        TILES == 1 ? 2 : 8;  // blocks: what runs at once, as each begins slowly, or a few times that
    const int n_tile = (int)lctx_div_up(p.n_slab * (a.n_head / a.n_list), scorer::COLUMNS);
    const int n_writing = scorer::n_writing(rows);
    const int n_wanted = PER_MULTIPROCESSOR * queue.device.n_multiprocessor / (n_tile * a.n_list) - n_writing;
    const int n_most = (int)lctx_div_up(lctx_max(a.n_chunk_max, 1), scorer::WARPS * scorer::CHUNKS);
    const int n_z = n_writing + lctx_min(lctx_max(n_wanted, 1), n_most);
    const dim3 grid((unsigned)n_tile, (unsigned)(a.n_list * a.chunks.n_range), (unsigned)n_z);
    const size_t n_shared = lctx_max(scorer::shared(a, p), rows.n_stored() * rows.n_channel() * sizeof(float));
    lctx_launch(score_keys<BITS, TILES, GROUPS>, grid, scorer::WARPS * LCTX_WARP, n_shared, queue.stream, a, p, rows);
}

// Return whether columns are many, and share what codes become; of few, as many rows as possible are on their way.
template <int BITS>
bool has_many_columns(const lctx_cuda_device & device, const lctx_select_args & a, const lctx_select_plan & p) {
    const bool fits = key_scorer<BITS, 4, 1>::shared(a, p) <= device.max_shared;
    return fits && p.n_all * (a.n_head / a.n_list) > key_scorer<BITS, 1, 4>::COLUMNS;
}

}  // namespace
