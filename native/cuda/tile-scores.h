// Values of chunks for tiles: the largest over columns of (best key of the chunk - reference). Nothing but the value
// leaves the kernel.
#pragma once

#include "tile-products.h"

#include <climits>

namespace {

// A block: a tile and list, with some of its groups of columns in shared memory. A warp: CHUNKS chunks at a time, of
// which lane k has number k, and of their rows ROW_GROUPS groups, each of another chunk.
template <typename S> struct tile_scorer {
    static constexpr int WARPS = 8, CHUNKS = 16, ROW_GROUPS = S::STEPS <= 4 ? 2 : 1;
    static constexpr int QUERIES = S::STEPS * LCTX_WARP * (int)sizeof(uint4);  // bytes of a group of columns
    static constexpr size_t SHARED = 40 * 1024;  // room for two blocks of a multiprocessor
    static constexpr int BLOCKS =
        S::STEPS <= 8 ? 2 : 1;  // of a multiprocessor: beyond 256 channels a thread needs all registers
    static constexpr int ALL_ROWS = S::ROWS << 8;  // as of piece::rows

    // Factor and offset of the scores of columns g and g + 8.
    struct column_pair {
        float4 of[8];  // scale, - reference, and those of the second
    };
    static constexpr size_t GROUP_SIZE = QUERIES + sizeof(column_pair);

    // A group of rows, of which those of one chunk count.
    struct piece {
        uint64_t group;  // address
        int rows;        // the first, and that after the last << 8
    };

    const lctx_select_args & a;
    const int n_group;  // of columns, in this pass
    const int tile, list;
    const int32_t seq;

    // Groups of columns of a pass: as many as fit, alike for all passes.
    static int groups_at_once(const lctx_tile_work & p) {
        const int most = lctx_max((int)(SHARED / GROUP_SIZE), 1), n_pass = (int)lctx_div_up(p.n_group, most);
        return (int)lctx_div_up(p.n_group, n_pass);
    }
    __device__ tile_scorer(const lctx_select_args & a, int n_group)
        : a(a), n_group(n_group), tile((int)blockIdx.x), list((int)blockIdx.y), seq(a.rows[a.tiles[tile]].seq) {}

    __device__ const uint4 * queries() const { return (const uint4 *)lctx_shared(); }
    __device__ column_pair * columns() const { return (column_pair *)(lctx_shared() + n_group * QUERIES); }

    // Columns of groups from `first` on, at the angle of a slot. All threads.
    __device__ void take_columns(const lctx_tile_work & p, int first, int slot) const {
        const size_t list_at = p.list_at(a, tile, list) * p.n_group + first,
                     view_at = p.view_at(a, tile, list, slot) * p.n_group + first;
        __syncthreads();  // all have read the columns before these
        for (int i = (int)threadIdx.x; i < n_group * S::STEPS * LCTX_WARP; i += WARPS * LCTX_WARP) {
            lctx_copy_16(lctx_shared() + i * sizeof(uint4), p.queries + view_at * S::STEPS * LCTX_WARP + i);
        }
        lctx_copy_end_group();
        for (int i = (int)threadIdx.x; i < n_group * p.GROUP; i += WARPS * LCTX_WARP) {
            float2 * to = (float2 *)&columns()[i / p.GROUP].of[i % 8] + i % p.GROUP / 8;
            *to = {p.scales[view_at * p.GROUP + i], -p.references[list_at * p.GROUP + i]};
        }
        lctx_copy_wait<0>();
        __syncthreads();
    }

    // Group `index` of the rows, cells [lo, hi) of it.
    __device__ piece piece_of(int32_t index, int32_t lo, int32_t hi) const {
        const int32_t first = index * S::ROWS;
        return {(uint64_t)(uintptr_t)lctx_index_group(a.cache, index, list, seq),
                lctx_max(lo - first, 0) | lctx_min(lctx_max(hi - first, 0), (int)S::ROWS) << 8};
    }
    // That of another lane, and its codes.
    __device__ __forceinline__ int load(const piece & mine, int lane, row_codes<S> & codes) const {
        codes.load(a.index, (const char *)(uintptr_t)lctx_shuffle(mine.group, lane));
        return lctx_shuffle(mine.rows, lane);
    }
    // Unpack what makes scores of products except the column: product * scale + offset, from MAGIC on, without those
    // that are not of the chunk.
    __device__ __forceinline__ static void unpack_scales(const row_codes<S> & codes, int rows, float (&scale)[2][2],
                                                         float (&offset)[2][2]) {
        codes.unpack_scales(scale);
        lctx_unrolled<4>([&](int i) { offset[i % 2][i / 2] = -MAGIC * scale[i % 2][i / 2]; });  // exact
        if (rows == ALL_ROWS) {
            return;
        }
        lctx_unrolled<4>([&](int i) {
            const int row = 4 * (lctx_lane() % 4) + i;
            if (row < (rows & 0xff) || row >= rows >> 8) {
                scale[i % 2][i / 2] = 0.0f, offset[i % 2][i / 2] = -INFINITY;
            }
        });
    }
    // The larger of `value` and what a group of columns gives the rows.
    __device__ __forceinline__ static float raise(const int (&sums)[2][4], const float (&scale)[2][2],
                                                  const float (&offset)[2][2], const float4 & column, float value) {
        lctx_unrolled<2>([&](int k) {
            float x[2][2];
            lctx_unrolled<4>([&](int i) {
                x[i % 2][i / 2] = fmaf(lctx_as_float((uint32_t)sums[i % 2][2 * k + i / 2]), scale[i % 2][i / 2],
                                       offset[i % 2][i / 2]);
            });
            const float best = fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[1][0], x[1][1]));
            value = fmaxf(value, k == 0 ? fmaf(best, column.x, column.y) : fmaf(best, column.z, column.w));
        });
        return value;
    }

    // Values of the pieces of lanes [first, first + ROW_GROUPS), whose codes are given.
    __device__ __forceinline__ void score_rows(const row_codes<S> (&codes)[ROW_GROUPS], const int (&rows)[ROW_GROUPS],
                                               const int (&from)[4], float (&value)[ROW_GROUPS]) const {
        uint32_t levels[ROW_GROUPS][2][S::STEPS][2];
        float scale[ROW_GROUPS][2][2], offset[ROW_GROUPS][2][2];
        lctx_unrolled<ROW_GROUPS>([&](int n) {
            codes[n].unpack(levels[n]);
            unpack_scales(codes[n], rows[n], scale[n], offset[n]);
            value[n] = -INFINITY;
        });
        const uint4 * query = queries() + lctx_lane();
        const float4 * column = &columns()->of[lctx_lane() / 4];
#ifdef __CUDACC__
#pragma unroll 1
#endif
        for (int group = 0; group < n_group; group++, query += S::STEPS * LCTX_WARP, column += 8) {
            int sums[ROW_GROUPS][2][4];
            lctx_unrolled<S::STEPS>([&](int step) {
                lctx_unrolled<ROW_GROUPS>(
                    [&](int n) { multiply_step<S>(query[step * LCTX_WARP], levels[n], step, from, sums[n]); });
            });
            lctx_unrolled<ROW_GROUPS>(
                [&](int n) { value[n] = raise(sums[n], scale[n], offset[n], *column, value[n]); });
        }
    }
    // The value of each lane's piece, for those of lanes that have one.
    __device__ __forceinline__ float score_pieces(const piece & mine, uint32_t lanes, const int (&from)[4],
                                                  float value) const {
        row_codes<S> next[ROW_GROUPS];
        int next_rows[ROW_GROUPS];
        const auto load_all = [&](int lane) {
            lctx_unrolled<ROW_GROUPS>([&](int n) { next_rows[n] = load(mine, lane + n, next[n]); });
        };
        load_all(0);
#ifdef __CUDACC__
#pragma unroll 1
#endif
        for (int lane = 0; lanes >> lane != 0; lane += ROW_GROUPS) {
            row_codes<S> codes[ROW_GROUPS];
            int rows[ROW_GROUPS];
            lctx_unrolled<ROW_GROUPS>([&](int n) { codes[n] = next[n], rows[n] = next_rows[n]; });
            load_all(lctx_min(lane + ROW_GROUPS, CHUNKS - ROW_GROUPS));
            float its_value[ROW_GROUPS];
            score_rows(codes, rows, from, its_value);
            lctx_unrolled<ROW_GROUPS>([&](int n) {
                const float most = warp_largest(its_value[n]);
                value = lctx_lane() == lane + n ? fmaxf(value, most) : value;
            });
        }
        return value;
    }
    // The value of chunk `chunk0` + lane, for the first n lanes.
    __device__ float score_chunks(int chunk0, int n, const int (&from)[4]) const {
        const int32_t lo =
            lctx_cells(a.cache, list, seq).cell((chunk0 + lctx_min(lctx_lane(), n)) * a.chunks.chunk_size);
        const int32_t hi = lctx_shuffle(lo, lctx_min(lctx_lane() + 1, n)),
                      last = lctx_max(lctx_shuffle(lo, n) - 1, 0) / S::ROWS;
        float value = -INFINITY;
        for (int32_t index = lo / S::ROWS;; index++) {
            const uint32_t lanes = lctx_ballot(lo < hi && index * S::ROWS < hi);
            if (lanes == 0) {
                return value;
            }
            value = score_pieces(piece_of(lctx_min(index, last), lo, hi), lanes, from, value);
        }
    }

    // All chunks of a range, by the columns of this pass. is_first: no other pass has given them values.
    __device__ void score_range(const lctx_chunk_range & r, bool is_first, uint32_t * keys) const {
        const int mine = ((int)blockIdx.z * WARPS + lctx_warp()) * CHUNKS, step = (int)gridDim.z * WARPS * CHUNKS;
        int from[4];
        lctx_unrolled<4>([&](int i) { from[i] = lctx_kept(MAGIC_BITS); });
        for (int chunk0 = r.first + mine; chunk0 < r.end; chunk0 += step) {
            const int n = lctx_min(CHUNKS, r.end - chunk0);
            const uint32_t key = lctx_choice_key::of(score_chunks(chunk0, n, from));
            if (lctx_lane() < n) {
                uint32_t & to = keys[chunk0 + lctx_lane()];
                to = is_first ? key : lctx_max(to, key);
            }
        }
    }
};

template <typename S> __global__ void __launch_bounds__(tile_scorer<S>::WARPS * LCTX_WARP, tile_scorer<S>::BLOCKS)
    score_tiles(lctx_select_args a, lctx_tile_work p, int at_once) {
    lctx_begin();
    for (int first = 0; first < p.n_group; first += at_once) {
        const tile_scorer<S> scorer(a, lctx_min(at_once, p.n_group - first));
        for (int slot = 0; slot < a.chunks.n_range; slot++) {
            const lctx_chunk_range r(a, a.tiles[scorer.tile], slot);
            if (!r.empty()) {
                scorer.take_columns(p, first, slot);
                scorer.score_range(r, first == 0, p.keys_of(a, scorer.tile, scorer.list));
            }
        }
    }
}

template <typename S>
void launch_tile_scores(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_tile_work & p) {
    using scorer = tile_scorer<S>;
    constexpr int PER_MULTIPROCESSOR = 8;  // blocks: a few times what runs at once, so that the last ones do not last
    const int at_once = scorer::groups_at_once(p),
              n_wanted = PER_MULTIPROCESSOR * queue.device.n_multiprocessor / (a.n_tile * a.n_list);
    const int n_most = (int)lctx_div_up(lctx_max(a.n_chunk_max, 1), scorer::WARPS * scorer::CHUNKS);
    const dim3 grid((unsigned)a.n_tile, (unsigned)a.n_list, (unsigned)lctx_min(lctx_max(n_wanted, 1), n_most));
    lctx_launch(score_tiles<S>, grid, scorer::WARPS * LCTX_WARP, at_once * scorer::GROUP_SIZE, queue.stream, a, p,
                at_once);
}

}  // namespace
