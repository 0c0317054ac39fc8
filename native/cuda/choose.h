// How *select* chooses among scored chunks: the best, and neighbours of the best.
#pragma once

#include "../ops/args.h"
#include "device.h"

#include <cfloat>

static __device__ inline uint32_t lctx_lanes_below() {
    return (1u << lctx_lane()) - 1;
}

// A number that looks random, the same for the same inputs (splitmix64).
static __device__ inline float lctx_noise(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t z = (a * 0x9e3779b97f4a7c15u) ^ (b * 0xbf58476d1ce4e5b9u) ^ (c * 0x94d049bb133111ebu);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)((z ^ (z >> 31)) >> 40);
}

// Bits [from, end) as far as they lie in word w.
static __device__ inline uint32_t lctx_bits_of_word(int w, int from, int end) {
    const int lo = lctx_min(lctx_max(from - 32 * w, 0), 32), hi = lctx_min(lctx_max(end - 32 * w, 0), 32);
    return (uint32_t)((1ull << hi) - 1) & ~(uint32_t)((1ull << lo) - 1);
}

// What a warp chooses for one block and choice. Lane i looks after the candidates 32 w + i.
struct lctx_chooser {
    const lctx_select_args & a;
    const float * scores;
    uint32_t * chosen;  // a bit per chunk, in shared memory
    int32_t * order;    // [n_chunk] with n_neighbor > 0: the best, the best first; in shared memory
    int32_t row;
    int choice, own, first, end;

    static int n_word(const lctx_select_args & a) { return a.n_chunk_max / 32 + 1; }  // the own chunk may be the one after the last
    static size_t shared(const lctx_select_args & a) {
        return (n_word(a) + (a.chunks.n_neighbor > 0 ? a.chunks.n_chunk : 0)) * sizeof(int32_t);
    }

    __device__ bool is_chosen(int c) const { return chosen[c / 32] >> c % 32 & 1; }
    __device__ void choose(int c) const { chosen[c / 32] |= 1u << c % 32; }
    __device__ float score(int c) const {
        switch (a.chunks.ablation) {
            case LCTX_ABLATE_RANDOM:
            case LCTX_ABLATE_RANDOM_ALL: return lctx_noise(row, choice, c);
            case LCTX_ABLATE_LAST:       return -scores[c];
            default:                     return scores[c];
        }
    }
    // Larger for a better candidate: by score, then by lower index; 0 for none. NaN, a chunk without rows, comes last.
    __device__ uint64_t rank(int c) const {
        if (c < first || c >= end || is_chosen(c)) {
            return 0;
        }
        const float s = score(c), above = s > -FLT_MAX ? s : -FLT_MAX;
        const uint32_t bits = above == 0.0f ? 0 : lctx_as_uint(above);
        const uint32_t ascending = bits >> 31 ? ~bits : bits | 1u << 31;
        return (uint64_t)ascending << 32 | (0xffffffffu - (uint32_t)c);
    }
    // The best of the candidates from + step * lane, from + step * (lane + 32), ...
    __device__ uint64_t best_of(int from, int step) const {
        uint64_t best = 0;
        for (int c = from + step * lctx_lane(); c < end; c += 32 * step) {
            best = lctx_max(best, rank(c));
        }
        return best;
    }
    __device__ static uint64_t warp_best(uint64_t x) {
        for (int step = LCTX_WARP / 2; step > 0; step /= 2) {
            x = lctx_max(x, lctx_shuffle_xor(x, step));
        }
        return x;
    }
    // Take the n best that are not chosen; they go to `order` when asked for.
    __device__ void take_best(int n, bool in_order) const {
        uint64_t mine = best_of(0, 1);
        for (int i = 0; i < n; i++) {
            const int c = (int)(0xffffffffu - (uint32_t)warp_best(mine));
            if (lctx_lane() == 0) {
                choose(c);
                if (in_order) {
                    order[i] = c;
                }
            }
            lctx_sync_warp();
            const uint64_t next = warp_best(best_of(c % 32, 32));
            mine = lctx_lane() == c % 32 ? next : mine;
        }
    }
    // Give n_neighbor slots to the neighbours of the best chunks, at most one to each in a pass; returns how many are taken. One lane.
    __device__ int take_neighbours(int n_best) const {
        const int most = a.chunks.n_neighbor;
        const auto is_open = [&](int c) { return c >= first && c < end && !is_chosen(c) && score(c) == score(c); };
        int n = 0;
        for (int before = -1; before != n && n < most;) {
            before = n;
            for (int i = 0; i < n_best && n < most; i++) {
                const int left = order[i] - 1, right = order[i] + 1;
                const bool has_left = is_open(left), has_right = is_open(right);
                if (has_left || has_right) {
                    choose(has_left && (!has_right || score(left) >= score(right)) ? left : right);
                    n++;
                }
            }
        }
        return n;
    }
    // Returns how many are chosen.
    __device__ int run(int n_words) const {
        const lctx_chunks & c = a.chunks;
        const bool reads_all = own < c.n_chunk;
        for (int w = lctx_lane(); w < n_words; w += LCTX_WARP) {
            chosen[w] = reads_all ? lctx_bits_of_word(w, 0, own + 1) : lctx_bits_of_word(w, 0, first) | lctx_bits_of_word(w, end, own + 1);
        }
        lctx_sync_warp();
        if (reads_all) {
            return own + 1;
        }
        const int n_free = c.n_free(own), n_best = n_free - c.n_neighbor;
        take_best(n_best, c.n_neighbor > 0);
        if (c.n_neighbor > 0) {
            const int n = lctx_shuffle(lctx_lane() == 0 ? take_neighbours(n_best) : 0, 0);
            lctx_sync_warp();
            take_best(c.n_neighbor - n, false);
        }
        return c.n_chunk;
    }
};
