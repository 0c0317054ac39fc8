// How *select* chooses among scored chunks.
#pragma once

#include "scores.h"

#include <cfloat>

static __device__ inline uint32_t lctx_lanes_below() {
    return (1u << lctx_lane()) - 1;
}

// What WARPS warps choose for one token and choice: all threads of the block, or each warp of it something of its own.
template <int WARPS> struct lctx_chooser {
    const lctx_select_args & a;
    int32_t token;
    lctx_segment * dst;  // [n_segment]
    float * scores;      // [n_chunk_max]
    uint32_t * keys;     // what takes their place: larger for a better candidate
    lctx_chunk_range all;

    static constexpr int STEP = WARPS * LCTX_WARP;
    static constexpr uint32_t EMPTY = 1;  // key of a chunk that has no rows any more, or is in no range

    __device__ lctx_chooser(const lctx_select_args & a, int32_t token, float * scores, int choice)
        : a(a),
          token(token),
          dst(a.dst + ((size_t)token * a.n_choice + choice) * a.chunks.n_segment()),
          scores(scores),
          keys((uint32_t *)scores),
          all(lctx_candidates(a, token)) {}

    __device__ static int thread() { return WARPS == 1 ? lctx_lane() : (int)threadIdx.x; }
    __device__ static void sync() {
        if (WARPS == 1) {
            lctx_sync_warp();
        } else {
            __syncthreads();
        }
    }
    // The sum over all threads, exact for counts; sums: [WARPS] in shared memory.
    __device__ int sum(int x) const {
        const float of_warp = lctx_warp_sum((float)x);
        if (WARPS == 1) {
            return (int)of_warp;
        }
        float * sums = (float *)lctx_shared();
        if (lctx_lane() == 0) {
            sums[lctx_warp()] = of_warp;
        }
        __syncthreads();
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            total += sums[w];
        }
        __syncthreads();
        return (int)total;
    }
    __device__ void make_keys() const {
        for (int c = all.first + thread(); c < all.end; c += STEP) {
            const float s = lctx_slot_of(a, token, c) < 0 ? NAN : scores[c];
            const uint32_t bits = s == 0.0f ? 0 : lctx_as_uint(fmaxf(s, -FLT_MAX));  // one zero
            keys[c] = s != s ? EMPTY : bits >> 31 ? ~bits : bits | 1u << 31;
        }
        sync();
    }
    // How many candidates have this key or a larger one.
    __device__ int count(uint32_t least) const {
        int n = 0;
        for (int c = all.first + thread(); c < all.end; c += STEP) {
            n += keys[c] >= least;
        }
        return sum(n);
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

    __device__ static void put(lctx_segment * to, int32_t row0, int32_t row1, int32_t angle, int32_t seq) {
        *(uint4 *)to = {(unsigned)row0, (unsigned)row1, (unsigned)angle, (unsigned)seq};
    }
    // Chunk `chunk` as segment i behind the runs; one lane.
    __device__ void put_chunk(int chunk, int slot, int i) const {
        const int size = a.chunks.chunk_size;
        const lctx_segment & r = lctx_range_of(a, token, slot);
        put(dst + a.chunks.n_run + i, chunk * size, (chunk + 1) * size, r.angle, r.seq);
    }
    // Those above `least`, and the first `rest` of those that reach it; returns how many segments were written. One warp.
    __device__ int put_chunks(uint32_t least, int rest) const {
        int n = 0;
        for (int first = all.first; first < all.end; first += LCTX_WARP) {
            const int c = first + lctx_lane();
            const uint32_t key = c < all.end ? keys[c] : 0;
            const uint32_t at = lctx_ballot(key == least), above = lctx_ballot(key > least);
            if ((at | above) == 0) {
                continue;  // as nearly everywhere
            }
            const bool is_taken = key > least || (key == least && __popc(at & lctx_lanes_below()) < rest);
            const int slot = is_taken ? lctx_slot_of(a, token, c) : -1;
            const uint32_t written = lctx_ballot(slot >= 0);
            if (slot >= 0) {
                put_chunk(c, slot, n + __popc(written & lctx_lanes_below()));
            }
            n += __popc(written);
            rest -= __popc(at);
        }
        return n;
    }
    // The runs, and behind n chunks what is not used; one warp.
    __device__ void put_rest(int n) const {
        const int n_run = a.chunks.n_run, n_given = a.chunks.n_given();
        for (int i = lctx_lane(); i < n_run; i += LCTX_WARP) {
            *(uint4 *)(dst + i) = *(const uint4 *)(a.segs + (size_t)token * n_given + i);
        }
        for (int i = n_run + n + lctx_lane(); i < a.chunks.n_segment(); i += LCTX_WARP) {
            put(dst + i, 0, 0, 0, a.rows[token].seq);
        }
    }
    __device__ void run() const {
        const int n = all.empty() ? 0 : lctx_min(a.chunks.n_free, all.end - all.first);
        uint32_t least = 0xffffffffu;
        int rest = 0;
        if (n > 0) {
            make_keys();
            least = threshold(n);
            rest = n - (least == 0xffffffffu ? 0 : count(least + 1));
        }
        if (thread() < LCTX_WARP) {
            put_rest(n > 0 ? put_chunks(least, rest) : 0);
        }
    }
};
