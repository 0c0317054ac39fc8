// The list of each tile and KV head: the chunks of the largest values, in ascending order; of equal ones the first.
#pragma once

#include "tile-products.h"

namespace {

// A block for a list. Each thread has chunks that lie side by side, and the keys of the first KEYS of them in
// registers.
template <int KEYS> struct tile_chooser {
    const lctx_select_args & a;
    const uint32_t * keys;
    const int32_t token;   // the first of the tile, whose ranges count
    int first, end;        // chunks of this thread, of all ranges together
    const uint32_t least;  // the key of the cutoff
    uint32_t mine[KEYS];   // 0: in no range, or below the cutoff

    struct memory {
        uint32_t counts[2][LCTX_WARP];  // of the warps
        int sums[LCTX_WARP];
        lctx_chunk_range ranges[1];  // [n_range]: divided once
    };
    static size_t size(const lctx_select_args & a) {
        return sizeof(memory) + a.chunks.n_range * sizeof(lctx_chunk_range);
    }
    __device__ static memory & shared() { return *(memory *)lctx_shared(); }

    __device__ tile_chooser(const lctx_select_args & a, const uint32_t * keys, int32_t token)
        : a(a), keys(keys), token(token), least(lctx_choice_key::of(-(float)a.chunks.cutoff)) {
        lctx_chunk_range all;
        for (int slot = 0; slot < a.chunks.n_range; slot++) {
            const lctx_chunk_range r(a, token, slot);
            all = all.with(r);
            if (threadIdx.x == 0) {
                shared().ranges[slot] = r;
            }
        }
        __syncthreads();
        const int n = (int)lctx_div_up(all.end - all.first, blockDim.x);
        first = lctx_min(all.first + (int)threadIdx.x * n, all.end), end = lctx_min(first + n, all.end);
        lctx_unrolled<KEYS>([&](int i) { mine[i] = first + i < end ? key(first + i) : 0; });
    }
    __device__ uint32_t key(int chunk) const {
        bool is_in = false;
        for (int slot = 0; slot < a.chunks.n_range; slot++) {
            is_in = is_in || shared().ranges[slot].has(chunk);
        }
        return is_in && keys[chunk] >= least ? keys[chunk] : 0;
    }
    // f(chunk, key), in order; key 0 for what has none.
    template <typename F> __device__ __forceinline__ void each(F && f) const {
        lctx_unrolled<KEYS>([&](int i) { f(first + i, mine[i]); });
        for (int chunk = first + KEYS; chunk < end; chunk++) {
            f(chunk, key(chunk));
        }
    }
    // Count the keys of the block that are at least `least`. Every other call has other memory, so one barrier is
    // enough.
    __device__ int count(uint32_t least, int call) const {
        uint32_t n = 0;
        each([&](int, uint32_t key) { n += key >= least; });
        n = lctx_reduce_add(n);
        if (lctx_lane() == 0) {
            shared().counts[call % 2][lctx_warp()] = n;
        }
        __syncthreads();
        return (int)lctx_reduce_add(lctx_lane() < (int)blockDim.x / LCTX_WARP ? shared().counts[call % 2][lctx_lane()]
                                                                              : 0);
    }
    // The n-th best key; less where the n best are all above it. 0: there are no more than n.
    __device__ uint32_t cut(int n) const {
        uint32_t lo = 1, hi = ~0u;  // at least n keys are at least lo, and fewer than n above hi
        int call = 0;
        if (count(lo, call++) <= n) {
            return 0;
        }
        while (lo < hi) {
            const uint32_t middle = hi - (hi - lo) / 2;
            const int n_above = count(middle, call++);
            if (n_above == n) {
                return middle - 1;
            }
            n_above > n ? lo = middle : hi = middle - 1;
        }
        return lo;
    }
    // Write what n chunks may be chosen, and -1 after them.
    __device__ void choose(int n, int32_t * to) const {
        const uint32_t least = cut(n);
        int n_above = 0, n_at = 0, all_above, all_at;
        each([&](int, uint32_t key) { n_above += key > least, n_at += key == least; });
        int before = lctx_block_scan(n_above, shared().sums, all_above),
            before_at = lctx_block_scan(n_at, shared().sums, all_at);
        const int n_rest = least == 0 ? 0 : lctx_min(n - all_above, all_at);  // of those at the cut
        each([&](int chunk, uint32_t key) {
            if (key > least) {
                to[before++ + lctx_min(before_at, n_rest)] = chunk;
            } else if (key == least) {
                if (before_at < n_rest) {
                    to[before + before_at] = chunk;
                }
                before_at++;
            }
        });
        for (int i = all_above + n_rest + (int)threadIdx.x; i < n; i += (int)blockDim.x) {
            to[i] = -1;
        }
    }
};

template <int KEYS> __global__ void __launch_bounds__(1024) choose_lists(lctx_select_args a, lctx_tile_work p) {
    lctx_begin();
    lctx_let_next_begin();
    const int tile = (int)blockIdx.x, list = (int)blockIdx.y;
    tile_chooser<KEYS>(a, p.keys_of(a, tile, list), a.tiles[tile])
        .choose(a.chunks.n_shared, a.choices().list(tile, list));
}

template <int KEYS> void launch_tile_lists(const lctx_cuda_queue & queue, const lctx_select_args & a,
                                           const lctx_tile_work & p, int n_thread) {
    const dim3 grid((unsigned)a.n_tile, (unsigned)a.n_list);
    lctx_launch(choose_lists<KEYS>, grid, n_thread, tile_chooser<KEYS>::size(a), queue.stream, a, p);
}

// Keys of more chunks than threads have registers for stay in memory.
void launch_tile_lists(const lctx_cuda_queue & queue, const lctx_select_args & a, const lctx_tile_work & p) {
    constexpr int FEW = 2, MANY = 8, MOST_THREADS = 1024;
    const int n_warp = (int)lctx_div_up(lctx_max(a.n_chunk_max, 1), FEW * LCTX_WARP);
    if (n_warp * LCTX_WARP <= MOST_THREADS) {
        launch_tile_lists<FEW>(queue, a, p, n_warp * LCTX_WARP);
    } else {
        launch_tile_lists<MANY>(queue, a, p, MOST_THREADS);
    }
}

}  // namespace
