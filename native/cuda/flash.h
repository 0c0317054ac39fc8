// A warp's part of *attend*: 16 columns against rows of a tile on the tensor cores, with an online softmax (arXiv
// 2307.08691, algorithm 1). lane = 4 g + t holds columns g and g + 8; of S rows 2 t, 2 t + 1 of every 8, of O
// dimensions 2 t, 2 t + 1 of every 8. Scores are base 2.
#pragma once

#include "device.h"

#include <cmath>

// Scores are base 2.
constexpr float LCTX_LOG2_E = 1.44269504f, LCTX_LN_2 = 0.69314718f;

// Lays out rows of f16 numbers in a tile so that eight of a matrix begin in different banks: with padding, or without
// it, where units of 8 numbers change places within a row. PER_ROW: numbers that a row takes. at(row, d): of number d.
// plus(at(row, e), d) = at(row, e + d) if e and d have no bit below WIDTH in common.
template <int STRIDE_> struct lctx_cuda_padded {
    static constexpr int STRIDE = STRIDE_, PER_ROW = STRIDE;
    static __device__ __forceinline__ int at(int row, int d) { return row * STRIDE + d; }
    static __device__ __forceinline__ int plus(int at, int d) { return at + d; }
};

template <int DIM> struct lctx_cuda_swizzled {
    static constexpr int STRIDE = DIM, PER_ROW = DIM, UNIT = 8;
    static constexpr int PLACES =
        lctx_min(DIM / UNIT & -(DIM / UNIT), 8);  // the units of a row that change among each other
    static constexpr int WIDTH = PLACES * UNIT;
    static __device__ __forceinline__ int at(int row, int d) {
        constexpr int ROWS = 8 / PLACES;  // that begin in different banks as they are
        return row * DIM + (d ^ row / ROWS % PLACES * UNIT);
    }
    // Return where the number d after `at` lies: what many numbers have in common stays in one register.
    static __device__ __forceinline__ int plus(int at, int d) { return (at ^ d % WIDTH) + d / WIDTH * WIDTH; }
};

// 16 columns of a query tile as the left factor, DIM dimensions of rows that lie as LAYOUT says. KEPT: in registers,
// for all the rows that they meet; else they are loaded for every product.
template <int DIM, bool KEPT, typename LAYOUT = lctx_cuda_padded<DIM + 8>> struct lctx_cuda_queries {
    const uint16_t * tile;
    uint32_t kept[KEPT ? DIM / 16 : 1][4];

    __device__ __forceinline__ void take(const uint16_t * q) {
        tile = q;
        if constexpr (KEPT) {
            lctx_unrolled<DIM / 16>([&](int step) { lctx_load_matrices(kept[step], at(step)); });
        }
    }
    __device__ __forceinline__ const uint16_t * at(int step) const {
        return tile + LAYOUT::plus(LAYOUT::at(lctx_lane() % 16, lctx_lane() / 16 * 8), step * 16);
    }
    __device__ __forceinline__ void load(int step, uint32_t (&a)[4]) const {
        if constexpr (KEPT) {
            lctx_unrolled<4>([&](int i) { a[i] = kept[step][i]; });
        } else {
            lctx_load_matrices(a, at(step));
        }
    }
};

// DIM: dimensions of this warp, padded; ROWS: those of this warp; LAYOUT: of the tile. Weights are 2^-SHIFT at most, so
// that f16 sums of a tile do not become infinite unless values are very large.
template <int DIM, int ROWS, typename LAYOUT = lctx_cuda_padded<DIM + 8>> struct lctx_cuda_flash {
    static constexpr int GROUPS = ROWS / 16;  // of 16 rows, which a product takes
    static constexpr uint32_t ALL = (1u << GROUPS) - 1;
    static constexpr bool HALF_SUMS = LCTX_HALF_SUMS && GROUPS > 1;
    static constexpr float SHIFT = HALF_SUMS ? 3.0f : 0.0f;
    float o[DIM / 8][4];
    float m[2], l[2];  // l: this lane's part
    float s[ROWS / 8][4];

    __device__ __forceinline__ void clear() {
        lctx_unrolled<DIM / 8>([&](int n) { lctx_unrolled<4>([&](int i) { o[n][i] = 0.0f; }); });
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.0f;
    }

    // s = Q K^T. k: this warp's rows of the K tile.
    template <bool KEPT>
    __device__ __forceinline__ void scores(const lctx_cuda_queries<DIM, KEPT, LAYOUT> & q, const uint16_t * k) {
        clear_scores();
        lctx_unrolled<DIM / 16>([&](int step) {
            uint32_t a[4];
            q.load(step, a);
            lctx_unrolled<GROUPS>([&](int n) { add_product(a, k, step, n); });
        });
    }

    // Score groups of 16 rows: bit n stands for the n-th; scores of the others are 0.
    template <bool KEPT> __device__ __forceinline__ void scores(const lctx_cuda_queries<DIM, KEPT, LAYOUT> & q,
                                                                const uint16_t * k, uint32_t groups) {
        clear_scores();
        lctx_unrolled<GROUPS>([&](int n) {
            if (groups >> n & 1) {
                lctx_unrolled<DIM / 16>([&](int step) {
                    uint32_t a[4];
                    q.load(step, a);
                    add_product(a, k, step, n);
                });
            }
        });
    }

    __device__ __forceinline__ void clear_scores() {
        lctx_unrolled<ROWS / 8>([&](int n) { lctx_unrolled<4>([&](int i) { s[n][i] = 0.0f; }); });
    }

    // Dimensions [16 step, 16 step + 16) of rows [16 n, 16 n + 16).
    __device__ __forceinline__ void add_product(const uint32_t (&a)[4], const uint16_t * k, int step, int n) {
        const int lane = lctx_lane();
        uint32_t b[4];
        const int at = LAYOUT::plus(LAYOUT::at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8), step * 16);
        lctx_load_matrices(b, k + n * 16 * LAYOUT::STRIDE + at);
        lctx_mma(s[2 * n], a, b[0], b[1]);
        lctx_mma(s[2 * n + 1], a, b[2], b[3]);
    }

    // Add the scores of the other N - 1 warps, which have the other dimensions. sums: [N][ROWS / 2][LCTX_WARP] in
    // shared memory.
    template <int N> __device__ __forceinline__ void add_warps(float * sums) {
        float * mine = sums + lctx_warp() * (ROWS / 2) * LCTX_WARP + lctx_lane();
        lctx_unrolled<ROWS / 8>(
            [&](int n) { lctx_unrolled<4>([&](int i) { mine[(n * 4 + i) * LCTX_WARP] = s[n][i]; }); });
        __syncthreads();
        clear_scores();
        lctx_unrolled<N>([&](int warp) {
            const float * from = sums + warp * (ROWS / 2) * LCTX_WARP + lctx_lane();
            lctx_unrolled<ROWS / 8>(
                [&](int n) { lctx_unrolled<4>([&](int i) { s[n][i] += from[(n * 4 + i) * LCTX_WARP]; }); });
        });
    }

    // f(score, i, row of the warp's) for every score of this lane: i says which of its two columns.
    template <typename F> __device__ __forceinline__ void each_score(F && f) {
        lctx_unrolled<GROUPS>(
            [&](int n) { each_score_of(n, [&](float & s, int i, int row) { f(s, i, n * 16 + row); }); });
    }
    // Call f for rows [16 n, 16 n + 16), which are counted from 0.
    template <typename F> __device__ __forceinline__ void each_score_of(int n, F && f) {
        const int t = lctx_lane() % 4;
        lctx_unrolled<8>([&](int i) { f(s[2 * n + i / 4][i % 4], i % 4 / 2, i / 4 * 8 + 2 * t + i % 2); });
    }
    __device__ static int column(int i) { return lctx_lane() / 4 + 8 * i; }

    // Scores to weights, and the state to the new maximum.
    __device__ __forceinline__ void softmax() {
        softmax([&](int h, float factor) { rescale(h, factor); });
    }
    // The same without o: grow(h, factor) says by what it is to be multiplied, not necessarily where that is 1.
    template <typename F> __device__ __forceinline__ void softmax(F && grow) {
        lctx_unrolled<2>([&](int h) {
            float most = m[h];
            lctx_unrolled<ROWS / 8>([&](int n) { most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1])); });
            most = lctx_warp_max(most, 4);
            const float base = most == -INFINITY ? 0.0f : most + SHIFT;  // no row yet: keeps the exponents defined
            if (lctx_ballot(most != m[h]) != 0) {                        // rare after the first rows
                const float factor = lctx_exp2(m[h] + SHIFT - base);
                m[h] = most;
                l[h] *= factor;
                grow(h, factor);
            }
            lctx_unrolled<ROWS / 8>([&](int n) {
                s[n][2 * h] = lctx_exp2(s[n][2 * h] - base);
                s[n][2 * h + 1] = lctx_exp2(s[n][2 * h + 1] - base);
                l[h] += s[n][2 * h] + s[n][2 * h + 1];
            });
        });
    }

    __device__ __forceinline__ void rescale(int h, float factor) {
        lctx_unrolled<DIM / 8>([&](int n) { o[n][2 * h] *= factor, o[n][2 * h + 1] *= factor; });
    }

    // o += P V: the weights of 16 rows have the layout of the left factor already. Groups of 16 rows: bit n stands for
    // the n-th; weights of the others are 0.
    __device__ __forceinline__ void weigh(const uint16_t * v, uint32_t groups = ALL) {
        uint32_t p[GROUPS][4];
        lctx_unrolled<GROUPS>([&](int n) { put_weights(n, p[n]); });
        if constexpr (HALF_SUMS) {
            constexpr int STEPS = DIM / 16, PART = STEPS % 4 == 0 ? 4 : STEPS % 3 == 0 ? 3 : STEPS;  // few registers
            lctx_unrolled<STEPS / PART>([&](int part) { add_halves<PART>(v, groups, p, part * PART); });
        } else {
            add_floats<DIM / 16>(v, groups, p, 0);
        }
    }
    // Those of rows [16 n, 16 n + 16).
    __device__ __forceinline__ void put_weights(int n, uint32_t (&p)[4]) const {
        const float(&s0)[4] = s[2 * n], (&s1)[4] = s[2 * n + 1];
        p[0] = lctx_pack(s0[0], s0[1]), p[1] = lctx_pack(s0[2], s0[3]);
        p[2] = lctx_pack(s1[0], s1[1]), p[3] = lctx_pack(s1[2], s1[3]);
    }
    // add(i, weights, values) for the factors of every product: i counts steps of 16 dimensions from the first of N on.
    template <int N, typename F> __device__ __forceinline__ void add_products(const uint16_t * v, uint32_t groups,
                                                                              const uint32_t (&p)[GROUPS][4], int first,
                                                                              F && add) const {
        const int lane = lctx_lane(), at = LAYOUT::at(lane % 16, lane / 16 * 8);
        lctx_unrolled<GROUPS>([&](int n) {
            if (groups >> n & 1) {
                lctx_unrolled<N>([&](int i) {
                    uint32_t b[4];
                    lctx_load_transposed(b, v + n * 16 * LAYOUT::STRIDE + LAYOUT::plus(at, (first + i) * 16));
                    add(i, p[n], b);
                });
            }
        });
    }
    template <int N> __device__ __forceinline__ void add_floats(const uint16_t * v, uint32_t groups,
                                                                const uint32_t (&p)[GROUPS][4], int first) {
        add_products<N>(v, groups, p, first, [&](int i, const uint32_t(&p)[4], const uint32_t(&b)[4]) {
            lctx_mma(o[2 * (first + i)], p, b[0], b[1]);
            lctx_mma(o[2 * (first + i) + 1], p, b[2], b[3]);
        });
    }
    // With f16 sums over the rows of this tile; with f32 sums if one of them is not finite.
    template <int N> __device__ __forceinline__ void add_halves(const uint16_t * v, uint32_t groups,
                                                                const uint32_t (&p)[GROUPS][4], int first) {
        uint32_t c[2 * N][2] = {};
        add_products<N>(v, groups, p, first, [&](int i, const uint32_t(&p)[4], const uint32_t(&b)[4]) {
            lctx_mma_halves(c[2 * i], p, b[0], b[1]);
            lctx_mma_halves(c[2 * i + 1], p, b[2], b[3]);
        });
        uint32_t sums = 0;  // 0 times what is not finite is NaN
        lctx_unrolled<2 * N>([&](int i) { lctx_unrolled<2>([&](int h) { sums = lctx_fma_2(c[i][h], 0, sums); }); });
        if (lctx_ballot((sums & 0x7fff7fff) != 0) != 0) {
            return add_floats<N>(v, groups, p, first);
        }
        lctx_unrolled<2 * N>([&](int i) {
            lctx_unrolled<4>(
                [&](int j) { o[2 * first + i][j] += lctx_from_half((uint16_t)(c[i][j / 2] >> j % 2 * 16)); });
        });
    }

    // The lanes that share a column add their parts of l.
    __device__ __forceinline__ void finish() {
        l[0] = lctx_warp_sum(l[0], 4);
        l[1] = lctx_warp_sum(l[1], 4);
        m[0] += SHIFT, m[1] += SHIFT;
    }

    // f(column of 16, dimension, m, l, o of it and of the next)
    template <typename F> __device__ __forceinline__ void each_result(F && f) const {
        const int lane = lctx_lane();
        lctx_unrolled<2>([&](int h) {
            lctx_unrolled<DIM / 8>(
                [&](int n) { f(lane / 4 + 8 * h, n * 8 + 2 * (lane % 4), m[h], l[h], o[n][2 * h], o[n][2 * h + 1]); });
        });
    }
};
