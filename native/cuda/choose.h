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

// What a warp chooses for one block and choice.
struct lctx_chooser {
    const lctx_select_args & a;
    const float * scores;
    uint32_t * keys;    // what takes the place of the scores: larger for a better candidate, 0 for what cannot be chosen (any more)
    uint32_t * chosen;  // [n_word] a bit per chunk; shared memory as what follows
    int32_t * found;    // [n_chunk] with n_neighbor > 0
    int32_t * order;    // [n_chunk] with n_neighbor > 0: the best, the best first
    int32_t row;
    int choice, own, first, end;

    static constexpr uint32_t EMPTY = 1;  // key of a chunk that has no rows any more

    static int n_word(const lctx_select_args & a) { return a.n_chunk_max / 32 + 1; }  // the own chunk may be the one after the last
    static size_t shared(const lctx_select_args & a) {
        return (n_word(a) + (a.chunks.n_neighbor > 0 ? 2 * a.chunks.n_chunk : 0)) * sizeof(int32_t);
    }

    __device__ float score(int c) const {
        switch (a.chunks.ablation) {
            case LCTX_ABLATE_RANDOM:
            case LCTX_ABLATE_RANDOM_ALL: return lctx_noise(row, choice, c);
            case LCTX_ABLATE_LAST:       return -scores[c];
            default:                     return scores[c];
        }
    }
    __device__ void make_keys() const {
        for (int c = first + lctx_lane(); c < end; c += LCTX_WARP) {
            const float s = score(c);
            const uint32_t bits = s == 0.0f ? 0 : lctx_as_uint(fmaxf(s, -FLT_MAX));  // one zero
            keys[c] = s != s ? EMPTY : bits >> 31 ? ~bits : bits | 1u << 31;
        }
        lctx_sync_warp();
    }
    // How many candidates have this key or a larger one.
    __device__ int count(uint32_t least) const {
        int n = 0;
        for (int c = first + lctx_lane(); c < end; c += LCTX_WARP) {
            n += keys[c] >= least;
        }
        return (int)lctx_warp_sum((float)n);
    }
    // The largest key that at least n candidates reach.
    __device__ uint32_t threshold(int n) const {
        uint32_t low = EMPTY, high = 0xffffffffu;
        while (low < high) {
            const uint32_t middle = high - (high - low) / 2;
            const int reached = count(middle);
            if (reached == n) {
                return middle;
            }
            if (reached > n) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
    // Take the n best candidates: those above the threshold, and of those that only reach it the first.
    __device__ void take_best(int n) const {
        const uint32_t least = threshold(n);
        int rest = n - count(least + 1);
        for (int w = first / 32; 32 * w < end; w++) {
            const int c = 32 * w + lctx_lane();
            const uint32_t key = c >= first && c < end ? keys[c] : 0;
            const uint32_t at = lctx_ballot(key == least), above = lctx_ballot(key > least);
            const uint32_t taken = above | lctx_ballot(key == least && __popc(at & lctx_lanes_below()) < rest);
            rest -= __popc(taken & at);
            if (lctx_lane() == 0) {
                chosen[w] |= taken;
            }
        }
        lctx_sync_warp();
    }
    // Sort the n candidates that are chosen, and take their keys away.
    __device__ void put_in_order(int n) const {
        int n_found = 0;
        for (int w = first / 32; 32 * w < end; w++) {
            const uint32_t bits = chosen[w] & lctx_bits_of_word(w, first, end);
            if (bits >> lctx_lane() & 1) {
                found[n_found + __popc(bits & lctx_lanes_below())] = 32 * w + lctx_lane();
            }
            n_found += __popc(bits);
        }
        lctx_sync_warp();
        for (int i = lctx_lane(); i < n; i += LCTX_WARP) {
            const uint32_t mine = keys[found[i]];
            int place = 0;
            for (int j = 0; j < n; j++) {
                const uint32_t other = keys[found[j]];
                place += other > mine || (other == mine && j < i);
            }
            order[place] = found[i];
        }
        lctx_sync_warp();
        for (int i = lctx_lane(); i < n; i += LCTX_WARP) {
            keys[order[i]] = 0;
        }
        lctx_sync_warp();
    }
    // Give n_neighbor places to the neighbours of the best chunks, at most one to each in a pass; returns how many are taken. One lane.
    __device__ int take_neighbours(int n_best) const {
        const int most = a.chunks.n_neighbor;
        const auto is_open = [&](int c) { return c >= first && c < end && keys[c] > EMPTY; };
        int n = 0;
        for (int before = -1; before != n && n < most;) {
            before = n;
            for (int i = 0; i < n_best && n < most; i++) {
                const int left = order[i] - 1, right = order[i] + 1;
                const bool has_left = is_open(left), has_right = is_open(right);
                if (has_left || has_right) {
                    const int c = has_left && (!has_right || keys[left] >= keys[right]) ? left : right;
                    chosen[c / 32] |= 1u << c % 32;
                    keys[c] = 0;
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
        make_keys();
        take_best(n_best);
        if (c.n_neighbor > 0) {
            put_in_order(n_best);
            const int n = lctx_shuffle(lctx_lane() == 0 ? take_neighbours(n_best) : 0, 0);
            lctx_sync_warp();
            take_best(c.n_neighbor - n);
        }
        return c.n_chunk;
    }
};
