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

// What WARPS warps choose for one token and choice: all threads of the block, or each warp of it something of its own.
template <int WARPS> struct lctx_chooser {
    const lctx_select_args & a;
    float * scores;
    uint32_t * keys;    // what takes the place of the scores: larger for a better candidate, 0 for what cannot be chosen (any more)
    int n_list;         // lists of scores, one per query head, that become one of shares; 1 without mass
    uint32_t * chosen;  // [n_word] a bit per chunk; shared memory as what follows
    int32_t * found;    // [n_chunk] with n_neighbor > 0
    int32_t * order;    // [n_chunk] with n_neighbor > 0: the best, the best first
    int32_t row;
    int choice, own, first, end;
    float * sums;  // [WARPS]

    static constexpr int STEP = WARPS * LCTX_WARP;
    static constexpr uint32_t EMPTY = 1;           // key of a chunk that has no rows any more
    static constexpr uint32_t ABOVE = 0xff800001;  // above the key of every number

    static int n_word(const lctx_select_args & a) { return a.n_chunk_max / 32 + 1; }  // the own chunk may be the one after the last
    static size_t shared(const lctx_select_args & a) {
        return (n_word(a) + (a.chunks.n_neighbor > 0 ? 2 * a.chunks.n_chunk : 0) + WARPS) * sizeof(int32_t);
    }

    __device__ static int thread() { return WARPS == 1 ? lctx_lane() : (int)threadIdx.x; }
    __device__ static void sync() {
        if (WARPS == 1) {
            lctx_sync_warp();
        } else {
            __syncthreads();
        }
    }
    // f over what the threads have; all get it.
    template <typename F> __device__ float reduced(float of_warp, F && f) const {
        if (WARPS == 1) {
            return of_warp;
        }
        if (lctx_lane() == 0) {
            sums[lctx_warp()] = of_warp;
        }
        __syncthreads();
        float all = sums[0];
        for (int w = 1; w < WARPS; w++) {
            all = f(all, sums[w]);
        }
        __syncthreads();
        return all;
    }
    __device__ float sum(float x) const {
        return reduced(lctx_warp_sum(x), [](float a, float b) { return a + b; });
    }
    __device__ float most(float x) const {
        return reduced(lctx_warp_max(x), [](float a, float b) { return fmaxf(a, b); });
    }

    // The mean over the heads that choose together of the share of their attention that they give a chunk, in place of the scores of the
    // first: a softmax over the chunks before the own one. NaN, a chunk without rows, has no share and stays.
    __device__ void to_shares() const {
        for (int list = 0; list < n_list; list++) {
            const float * s = scores + (size_t)list * a.n_chunk_max;
            float best = -FLT_MAX, total = 0.0f;
            for (int c = thread(); c < own; c += STEP) {
                best = fmaxf(best, s[c]);
            }
            best = most(best);
            for (int c = thread(); c < own; c += STEP) {
                total += s[c] == s[c] ? expf(s[c] - best) : 0.0f;
            }
            total = sum(total) * (float)n_list;
            for (int c = thread(); c < own; c += STEP) {
                scores[c] = (list == 0 ? 0.0f : scores[c]) + expf(s[c] - best) / total;
            }
        }
        sync();
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
        for (int c = first + thread(); c < end; c += STEP) {
            const float s = score(c);
            const uint32_t bits = s == 0.0f ? 0 : lctx_as_uint(fmaxf(s, -FLT_MAX));  // one zero
            keys[c] = s != s ? EMPTY : bits >> 31 ? ~bits : bits | 1u << 31;
        }
        sync();
    }
    // How many candidates have this key or a larger one.
    __device__ int count(uint32_t least) const {
        int n = 0;
        for (int c = first + thread(); c < end; c += STEP) {
            n += keys[c] >= least;
        }
        return (int)sum((float)n);
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
    // The attention that candidates with this key or a larger one get: a share's key is the share, with one bit more.
    __device__ static float share_of(uint32_t key) { return key >> 31 ? lctx_as_float(key & 0x7fffffff) : 0.0f; }
    __device__ float share(uint32_t least) const {
        float mine = 0.0f;
        for (int c = first + thread(); c < end; c += STEP) {
            mine += keys[c] >= least ? share_of(keys[c]) : 0.0f;
        }
        return sum(mine);
    }
    // And what chunks get that are always read.
    __device__ float share_of_others() const {
        float mine = 0.0f;
        for (int c = thread(); c < own; c += STEP) {
            const bool is_other = c < first || c >= end;
            mine += is_other && score(c) == score(c) ? score(c) : 0.0f;
        }
        return sum(mine);
    }
    // How many of the best candidates it takes to read the wanted share of the attention: those above `least`, and some of those that
    // reach it. `unread` is the estimate of the rest.
    __device__ int n_wanted(uint32_t & least, float & unread) const {
        const int n_free = a.chunks.n_free(own);
        const float mass = a.chunks.mass, others = share_of_others();
        uint32_t high = ABOVE;
        for (least = EMPTY; least < high;) {
            const uint32_t middle = high - (high - least) / 2;
            if (others + share(middle) >= mass || count(middle) >= n_free) {
                least = middle;
            } else {
                high = middle - 1;
            }
        }
        int n = count(least + 1);
        float read = others + share(least + 1);
        for (; n < n_free && read < mass; n++) {
            read += share_of(least);
        }
        unread = fmaxf(0.0f, 1.0f - read);
        return n;
    }
    // Take the n best candidates: those above `least`, and of those that only reach it the first.
    __device__ void take_best(int n, uint32_t least) const {
        const int rest = n - count(least + 1);
        if (thread() < LCTX_WARP) {
            take(least, rest);
        }
        sync();
    }
    // Those above `least`, and the first `rest` of those that reach it; one warp.
    __device__ void take(uint32_t least, int rest) const {
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
    }
    // Sort the n candidates that are chosen, and take their keys away; one warp.
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
    // Returns how many are chosen; `unread`: the estimated share of the attention that is not read, left as it is without mass.
    __device__ int run(int n_words, float & unread) const {
        const lctx_chunks & c = a.chunks;
        const bool reads_all = c.reads_all(own);
        for (int w = thread(); w < n_words; w += STEP) {
            chosen[w] = reads_all ? lctx_bits_of_word(w, 0, own + 1) : lctx_bits_of_word(w, 0, first) | lctx_bits_of_word(w, end, own + 1);
        }
        sync();
        if (reads_all) {
            return own + 1;
        }
        if (c.mass > 0.0f) {
            to_shares();
            make_keys();
            uint32_t least;
            const int n = n_wanted(least, unread);
            take_best(n, least);
            return first + n + own + 1 - end;
        }
        const int n_best = c.n_free(own) - c.n_neighbor;
        make_keys();
        take_best(n_best, threshold(n_best));
        if (c.n_neighbor > 0) {
            if (thread() < LCTX_WARP) {
                put_in_order(n_best);
            }
            const int n_rest = c.n_neighbor - (int)sum(thread() == 0 ? (float)take_neighbours(n_best) : 0.0f);
            sync();
            take_best(n_rest, threshold(n_rest));
        }
        return first + c.n_free(own) + own + 1 - end;
    }
};
