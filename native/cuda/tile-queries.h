// Prepares the queries that are compared for a tile: bytes at the angle of each far range, and the reference, which is
// the log of the sum over what a query reads anyway (../cpu/tile-scores.h).
#pragma once

#include "tile-products.h"

namespace {

// A block: a group of columns of a tile and list; a warp: one of them, and every WARPS-th group of the rows that they
// read anyway.
template <typename S> struct tile_queries {
    static constexpr int WARPS = lctx_tile_work::GROUP, N = S::CHANNELS / LCTX_WARP;

    // A sum of powers of two: the largest exponent, and the sum over 2^(exponent - largest).
    struct power_sum {
        float most, sum;

        __device__ __forceinline__ power_sum with(const power_sum & other) const {
            const float both = fmaxf(most, other.most), base = both == -INFINITY ? 0.0f : both;
            return {both, sum * lctx_exp2(most - base) + other.sum * lctx_exp2(other.most - base)};
        }
    };
    // Tells what the columns of this lane read of a run; all of the block's columns read cells [lo, hi).
    struct view {
        int32_t first[2], end[2], lo, hi;
    };
    struct memory {
        uint4 levels[S::STEPS][LCTX_WARP];
        float scales[lctx_tile_work::GROUP];
        power_sum sums[WARPS][lctx_tile_work::GROUP];
    };

    const lctx_select_args & a;
    const lctx_tile_work & p;
    const int tile, list, group;
    const int32_t first, seq;  // of the tile: its first token
    memory & m;
    const lctx_segment * given[2];  // of this lane's columns

    __device__ tile_queries(const lctx_select_args & a, const lctx_tile_work & p)
        : a(a),
          p(p),
          tile((int)blockIdx.x),
          list((int)blockIdx.y),
          group((int)blockIdx.z),
          first(a.tiles[tile]),
          seq(a.rows[first].seq),
          m(*(memory *)lctx_shared()) {
        lctx_unrolled<2>([&](int k) { given[k] = a.segs + (size_t)column(mine(k)).token * a.chunks.n_given(); });
    }

    struct column_of {
        int head;
        int32_t token;
    };
    __device__ bool is_column(int i) const { return group * p.GROUP + i < p.n_column; }
    // Column i of the group; those after the last repeat it. Every step-th token is compared, other ones for each head
    // of a KV head.
    __device__ column_of column(int i) const {
        const int number = lctx_min(group * p.GROUP + i, p.n_column - 1), head = number / p.n_compared,
                  step = a.chunks.step;
        return {list * (a.n_head / a.n_list) + head,
                first + (step - head % step) % step + number % p.n_compared * step};
    }
    __device__ static int mine(int k) { return lctx_lane() / 4 + 8 * k; }

    // The query of this warp's column, seen from the angle of segment s, as bytes (the CPU's lctx_index_round).
    __device__ void round(int s) const {
        const column_of c = column(lctx_warp());
        const auto * q = (const float *)(a.q + c.head * a.q_head_stride + c.token * a.q_token_stride);
        const float * cs = a.angles + (size_t)a.segs[(size_t)c.token * a.chunks.n_given() + s].angle * a.n_dims;
        float x[N], most = 0.0f;
        bool is_finite = true;
        lctx_unrolled<N>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            x[i] = d < a.head_dim ? lctx_rotated(q, d, cs, a.n_dims, a.rope_mode) : 0.0f;
        });
        lctx_transform(x, a.index.hadamard());
        lctx_unrolled<N>([&](int i) {
            most = fmaxf(most, fabsf(x[i]));
            is_finite = is_finite && fabsf(x[i]) <= FLT_MAX;
        });
        most = lctx_warp_max(most);
        is_finite = lctx_ballot(!is_finite) == 0;
        const float inverse = most > 0.0f && is_finite ? lctx_div(127.0f, most) : 0.0f;
        lctx_unrolled<N>([&](int i) {
            const int d = i * LCTX_WARP + lctx_lane();
            if (d < a.head_dim) {
                ((int8_t *)m.levels)[lctx_level_bytes<S::BITS>::at(a.index.n_code(), d, lctx_warp())] =
                    is_finite ? (int8_t)rintf(x[i] * inverse) : (int8_t)0;
            }
        });
        constexpr float LOG2_E = 1.44269504f;
        if (lctx_lane() == 0) {
            m.scales[lctx_warp()] = !is_column(lctx_warp()) ? 0.0f : is_finite ? LOG2_E * a.scale * most / 127.0f : NAN;
        }
    }

    __device__ view look(int run) const {
        const lctx_cells cells(a.cache, list, seq);
        view v = {{}, {}, INT_MAX, 0};
        lctx_unrolled<2>([&](int k) {
            const lctx_segment & s = given[k][run];
            if (is_column(mine(k)) && s.row0 < s.row1) {
                v.first[k] = cells.cell(s.row0), v.end[k] = cells.cell(s.row1);
                v.lo = lctx_min(v.lo, v.first[k]), v.hi = lctx_max(v.hi, v.end[k]);
            }
        });
        v.lo = lctx_warp_min(v.lo), v.hi = -lctx_warp_min(-v.hi);
        return v;
    }
    // The scores of a group of rows become part of the sums of this lane's columns.
    __device__ void add_rows(const view & v, int32_t index, power_sum (&sums)[2]) const {
        constexpr int FROM[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
        row_codes<S> codes;
        codes.load(a.index, lctx_index_group(a.cache, index, list, seq));
        uint32_t levels[2][S::STEPS][2];
        codes.unpack(levels);
        float scale[2][2];
        codes.unpack_scales(scale);
        int product[2][4];
        lctx_unrolled<S::STEPS>(
            [&](int step) { multiply_step<S>(m.levels[step][lctx_lane()], levels, step, FROM, product); });
        lctx_unrolled<2>([&](int k) {
            float x[4], top = -INFINITY, sum = 0.0f;
            lctx_unrolled<4>([&](int i) {
                const int32_t cell = index * S::ROWS + 4 * (lctx_lane() % 4) + i;
                const float score = (lctx_as_float((uint32_t)product[i % 2][2 * k + i / 2]) - MAGIC) *
                                    scale[i % 2][i / 2] * m.scales[mine(k)];
                x[i] = cell >= v.first[k] && cell < v.end[k] ? score : -INFINITY;
                top = fmaxf(top, x[i]);
            });
            const float base = top == -INFINITY ? 0.0f : top;
            lctx_unrolled<4>([&](int i) { sum += lctx_exp2(x[i] - base); });
            sums[k] = sums[k].with({top, sum});
        });
    }
    __device__ void add_run(const view & v, power_sum (&sums)[2]) const {
        for (int32_t index = v.lo / S::ROWS + lctx_warp(); index * S::ROWS < v.hi; index += WARPS) {
            add_rows(v, index, sums);
        }
    }

    // Bytes and scales at the angle of a slot.
    __device__ void put(int slot) const {
        const size_t at = p.view_at(a, tile, list, slot) * p.n_group + group;
        for (int i = (int)threadIdx.x; i < S::STEPS * LCTX_WARP; i += WARPS * LCTX_WARP) {
            p.queries[at * S::STEPS * LCTX_WARP + i] = m.levels[i / LCTX_WARP][i % LCTX_WARP];
        }
        if (threadIdx.x < p.GROUP) {
            p.scales[at * p.GROUP + threadIdx.x] = m.scales[threadIdx.x];
        }
    }
    __device__ void put_references(power_sum (&sums)[2]) const {
        lctx_unrolled<2>([&](int k) {
            for (int step = 1; step < 4; step *= 2) {
                sums[k] = sums[k].with({lctx_shuffle_xor(sums[k].most, step), lctx_shuffle_xor(sums[k].sum, step)});
            }
            if (lctx_lane() % 4 == 0) {
                m.sums[lctx_warp()][mine(k)] = sums[k];
            }
        });
        __syncthreads();
        const auto i = (int)threadIdx.x;
        if (i < p.GROUP) {
            power_sum all = m.sums[0][i];
            for (int warp = 1; warp < WARPS; warp++) {
                all = all.with(m.sums[warp][i]);
            }
            const float sum = all.most == -INFINITY ? 0.0f : all.most + log2f(all.sum);
            p.references[(p.list_at(a, tile, list) * p.n_group + group) * p.GROUP + i] = is_column(i) ? sum : INFINITY;
        }
    }
    // Write what readers need of the tokens of a tile next to its lists.
    __device__ void put_given() const {
        const lctx_written_choices choices = a.choices();
        const int n_given = a.chunks.n_given();
        if (threadIdx.x == 0) {
            choices.firsts()[tile] = first;
        }
        for (int i = (int)threadIdx.x; i < a.chunks.tile * n_given; i += WARPS * LCTX_WARP) {
            choices.given(tile, 0)[i] = a.segs[(size_t)first * n_given + i];
        }
    }

    __device__ void run() const {
        if (list == 0 && group == 0) {
            put_given();
        }
        for (int i = (int)threadIdx.x; i < S::STEPS * LCTX_WARP; i += WARPS * LCTX_WARP) {
            m.levels[i / LCTX_WARP][i % LCTX_WARP] = {0, 0, 0, 0};
        }
        power_sum sums[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
        int32_t angle[2] = {-1, -1};  // those of which this lane's columns are bytes now
        for (int s = 0; s < a.chunks.n_given(); s++) {
            const int slot = s - a.chunks.n_run;
            const bool is_near = slot < 0 && (a.near_mask >> s & 1);  // the index does not have these as they are seen
            view v = {};
            if (slot < 0 && !is_near) {
                v = look(s);
            }
            if (slot < 0 ? is_near || v.lo >= v.hi : lctx_chunk_range(a, first, slot).empty()) {
                continue;
            }
            const int32_t next[2] = {given[0][s].angle, given[1][s].angle};
            if (lctx_ballot(next[0] != angle[0] || next[1] != angle[1]) != 0) {  // so they do in every warp
                __syncthreads();
                round(s);
                __syncthreads();
                angle[0] = next[0], angle[1] = next[1];
            }
            slot < 0 ? add_run(v, sums) : put(slot);
        }
        put_references(sums);
    }
};

template <typename S> __global__ void __launch_bounds__(tile_queries<S>::WARPS * LCTX_WARP, 1)
    prepare_tiles(lctx_select_args a, lctx_tile_work p) {
    lctx_begin();
    lctx_let_next_begin();
    tile_queries<S>(a, p).run();
}

template <typename S>
void launch_tile_queries(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_tile_work & p) {
    using queries = tile_queries<S>;
    const dim3 grid((unsigned)a.n_tile, (unsigned)a.n_list, (unsigned)p.n_group);
    lctx_launch(prepare_tiles<S>, grid, queries::WARPS * LCTX_WARP, sizeof(typename queries::memory), queue.stream, a,
                p);
}

}  // namespace
