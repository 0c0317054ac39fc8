// Chooses among scored chunks, for *select*.
#pragma once

#include "chosen.h"

static __device__ inline uint32_t lctx_lanes_below() {
    return (1u << lctx_lane()) - 1;
}

// Chooses for one token and choice, with WARPS warps: all threads of the block, or each warp of it something of its
// own.
template <int WARPS> struct lctx_chooser {
    const lctx_select_args & a;
    lctx_chosen_segments result;
    float * scores;   // [n_head / n_choice][n_chunk_max]
    uint32_t * keys;  // what takes the place of the first of them: larger for a better candidate
    lctx_chunk_range all;

    static constexpr int STEP = WARPS * LCTX_WARP;
    static constexpr uint32_t EMPTY = lctx_choice_key::EMPTY;
    static constexpr int DIGIT = 8, N_BIN = 1 << DIGIT;  // bits of a key that a pass sorts by

    // Tells what is chosen: keys above `least`, and the first `rest` of those that are `least`.
    struct cut {
        uint32_t least;
        int rest;
    };
    // Of chunks [first, end), how many are above the cut and how many at it.
    struct tally {
        int first, end, n_above, n_at;
    };

    __device__ lctx_chooser(const lctx_select_args & a, const lctx_chosen_segments & result, float * scores)
        : a(a), result(result), scores(scores), keys((uint32_t *)scores), all(take_ranges()) {}

    // Bytes of shared memory: the bins of a pass, what the warps of a block count, and the ranges of the token.
    static size_t shared(const lctx_select_args & a) { return FIXED + a.chunks.n_range * sizeof(lctx_chunk_range); }
    static constexpr size_t FIXED = N_BIN * sizeof(int) + (WARPS == 1 ? 0 : WARPS * sizeof(tally));
    __device__ int * bins() const {
        return (int *)(lctx_shared() +
                       (WARPS == 1 ? lctx_warp() * (FIXED + a.chunks.n_range * sizeof(lctx_chunk_range)) : 0));
    }
    __device__ tally * tallies() const { return (tally *)(bins() + N_BIN); }
    __device__ lctx_chunk_range * ranges() const { return (lctx_chunk_range *)((char *)bins() + FIXED); }

    // Divide once: every chunk is looked up among the ranges. Returns from the first chunk of all to the last.
    __device__ lctx_chunk_range take_ranges() const {
        for (int slot = thread(); slot < a.chunks.n_range; slot += STEP) {
            ranges()[slot] = lctx_chunk_range(a, result.token, slot);
        }
        sync();
        lctx_chunk_range all;
        for (int slot = 0; slot < a.chunks.n_range; slot++) {
            all = all.with(ranges()[slot]);
        }
        return all;
    }
    // The range that has a chunk, or -1.
    __device__ int slot_of(int chunk) const {
        for (int slot = 0; slot < a.chunks.n_range; slot++) {
            if (ranges()[slot].has(chunk)) {
                return slot;
            }
        }
        return -1;
    }

    __device__ static int thread() { return WARPS == 1 ? lctx_lane() : (int)threadIdx.x; }
    __device__ static void sync() {
        if (WARPS == 1) {
            lctx_sync_warp();
        } else {
            __syncthreads();
        }
    }
    // f(chunk, its key or score) for every `step`-th of chunks [first, end); four are on their way together.
    template <typename T, typename F>
    __device__ static __forceinline__ void each_of(const T * from, int first, int end, int step, F && f) {
        constexpr int AT_ONCE = 4;
        for (; first < end; first += AT_ONCE * step) {
            T x[AT_ONCE];
            lctx_unrolled<AT_ONCE>([&](int i) { x[i] = first + i * step < end ? from[first + i * step] : T(0); });
            lctx_unrolled<AT_ONCE>([&](int i) {
                if (first + i * step < end) {
                    f(first + i * step, x[i]);
                }
            });
        }
    }
    // The sum over the heads that choose together.
    __device__ float score(int chunk, float sum) const {
        for (int h = 1; h < a.n_head / a.n_choice; h++) {
            sum += scores[(size_t)h * a.n_chunk_max + chunk];
        }
        return sum;
    }
    __device__ void make_keys() const {
        each_of(scores, all.first + thread(), all.end, STEP, [&](int c, float of_first) {
            keys[c] = lctx_choice_key::of(slot_of(c) < 0 ? NAN : score(c, of_first));
        });
        sync();
    }
    // Count how many keys have each value of the digit at `shift`, of those that begin with `prefix`.
    __device__ void fill_bins(uint32_t prefix, int shift) const {
        for (int bin = thread(); bin < N_BIN; bin += STEP) {
            bins()[bin] = 0;
        }
        sync();
        each_of(keys, all.first + thread(), all.end, STEP, [&](int, uint32_t key) {
            const uint32_t digit = (key ^ prefix) >> shift;
            if (digit < N_BIN) {
                atomicAdd(bins() + digit, 1);
            }
        });
        sync();
    }
    // The bin with the n-th best key; n becomes its rank in that bin. Every warp by itself.
    __device__ int find_bin(int & n) const {
        constexpr int MINE = N_BIN / LCTX_WARP;
        int mine = 0;
        lctx_unrolled<MINE>([&](int i) { mine += bins()[lctx_lane() * MINE + i]; });
        int reached = mine;  // in this lane's bins and better ones
        for (int step = 1; step < LCTX_WARP; step *= 2) {
            const int better = lctx_shuffle(reached, (lctx_lane() + step) % LCTX_WARP);
            reached += lctx_lane() + step < LCTX_WARP ? better : 0;
        }
        const int lane = __popc(lctx_ballot(reached >= n)) - 1;
        int bin = lane * MINE + MINE - 1;
        n -= lctx_shuffle(reached - mine, lane);
        for (; bins()[bin] < n; bin--) {
            n -= bins()[bin];
        }
        return bin;
    }
    // The cut that leaves the n best candidates: digit by digit, from the highest.
    __device__ cut find_cut(int n) const {
        uint32_t prefix = 0;
        for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
            fill_bins(prefix, shift);
            const int bin = find_bin(n);
            const bool is_whole = bins()[bin] == n;
            prefix |= (uint32_t)bin << shift;
            sync();  // all have read the bins
            if (is_whole) {
                return {prefix == 0 ? 0 : prefix - 1, 0};
            }
        }
        return {prefix, n};
    }

    // Write those of chunks [first, end) that the cut leaves as the result from number n on; returns the number after
    // the last. One warp.
    __device__ int put_chunks(cut c, int first, int end, int n) const {
        constexpr int AT_ONCE = 4;
        for (; first < end; first += AT_ONCE * LCTX_WARP) {
            uint32_t key[AT_ONCE];
            lctx_unrolled<AT_ONCE>([&](int i) {
                const int chunk = first + i * LCTX_WARP + lctx_lane();
                key[i] = chunk < end ? keys[chunk] : 0;
            });
            lctx_unrolled<AT_ONCE>([&](int i) { put_of_warp(c, first + i * LCTX_WARP + lctx_lane(), end, key[i], n); });
        }
        return n;
    }
    // Put the chunk of each lane if the cut leaves it: n grows, and fewer of those at the cut are left.
    __device__ __forceinline__ void put_of_warp(cut & c, int chunk, int end, uint32_t key, int & n) const {
        const bool is_at = chunk < end && key == c.least, is_above = key > c.least;
        const uint32_t at = lctx_ballot(is_at);
        if ((at | lctx_ballot(is_above)) == 0) {
            return;  // as nearly everywhere
        }
        const bool is_taken = is_above || (is_at && __popc(at & lctx_lanes_below()) < c.rest);
        const int slot = is_taken ? slot_of(chunk) : -1;
        const uint32_t written = lctx_ballot(slot >= 0);
        if (slot >= 0) {
            result.put_chunk(chunk, slot, n + __popc(written & lctx_lanes_below()));
        }
        n += __popc(written);
        c.rest -= __popc(at);
    }
    // Count what this warp takes of its chunks, which are split among the warps.
    __device__ tally count_mine(cut c) const {
        const int size = (int)lctx_div_up(all.end - all.first, STEP) * LCTX_WARP;
        const int first = lctx_min(all.first + lctx_warp() * size, all.end), end = lctx_min(first + size, all.end);
        int n_above = 0, n_at = 0;
        each_of(keys, first + lctx_lane(), end, LCTX_WARP,
                [&](int, uint32_t key) { n_above += key > c.least, n_at += key == c.least; });
        return {first, end, lctx_warp_sum(n_above), lctx_warp_sum(n_at)};
    }
    // Put what the cut leaves of all chunks, by all warps of a block.
    __device__ void put_tallies(cut c) const {
        const tally mine = count_mine(c);
        if (lctx_lane() == 0) {
            tallies()[lctx_warp()] = mine;
        }
        __syncthreads();
        int n = 0;
        for (int warp = 0; warp < lctx_warp(); warp++) {
            const int n_at = lctx_min(tallies()[warp].n_at, c.rest);
            n += tallies()[warp].n_above + n_at;
            c.rest -= n_at;
        }
        put_chunks(c, mine.first, mine.end, n);
    }
    __device__ void run() const {
        int n = all.empty() ? 0 : lctx_min(result.n_most(), all.end - all.first);
        if (n > 0) {
            make_keys();
            const cut c = find_cut(n);
            if (WARPS > 1 && c.least > EMPTY) {  // each of the n is in a range
                put_tallies(c);
            } else if (thread() < LCTX_WARP) {
                n = put_chunks(c, all.first, all.end, 0);
            }
        }
        if (thread() < LCTX_WARP) {
            result.put_rest(n);
        }
    }
};
