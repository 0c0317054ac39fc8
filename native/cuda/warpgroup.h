// *attend* of prompts where the four warps of a block multiply in a group (PTX ISA, wgmma): GPUs of compute capability
// 9.0 alone do. A group takes rows from shared memory, where they lie as a descriptor says, and multiplies while its
// threads continue: scores of a block together with values of the block before it.
#pragma once

#include "flash.h"

// Lays out 64 rows in panels of 64 channels, each of which begins at a multiple of 1024 bytes. Within a row of a panel
// units of 8 numbers change places, which descriptors call a swizzle of 128 bytes.
template <int DIM> struct lctx_cuda_panels {
    static_assert(DIM % 64 == 0, "panels are whole");
    static constexpr int ROWS = 64, WIDTH = 64, PANEL = ROWS * WIDTH, STRIDE = WIDTH, PER_ROW = DIM, UNIT = 8;
    static __device__ __forceinline__ int at(int row, int d) {
        return d / WIDTH * PANEL + row * WIDTH + (d % WIDTH ^ row % 8 * UNIT);
    }
    static __device__ __forceinline__ int plus(int at, int d) { return (at ^ d % WIDTH) + d / WIDTH * PANEL; }

    // Describe 16 channels of keys from `channel` on, which a product adds over.
    static __device__ __forceinline__ uint64_t keys(const uint16_t * tile, int channel) {
        constexpr int NO_PANEL = 16;  // a product has channels of one
        return of(tile + plus(0, channel), NO_PANEL);
    }
    // Describe 16 rows of values from `row` on, all channels.
    static __device__ __forceinline__ uint64_t values(const uint16_t * tile, int row) {
        return of(tile + row * STRIDE, PANEL * (int)sizeof(uint16_t));
    }

  private:
    // next_panel, EIGHT: bytes from a panel to the next one, and from 8 rows to the next 8.
    static __device__ __forceinline__ uint64_t of(const uint16_t * from, int next_panel) {
        constexpr uint64_t EIGHT = 8 * STRIDE * sizeof(uint16_t), SWIZZLE_128 = 1;
        const uint64_t at = lctx_shared_address(from);
        return at / 16 | (uint64_t)(next_panel / 16) << 16 | EIGHT / 16 << 32 | SWIZZLE_128 << 62;
    }
};

// A warp's part of it: 16 of the 64 columns, and what products with 64 rows leave it, as in lctx_cuda_flash. What is on
// its way is not touched before it is waited for: the scores s, and o with the weights p.
template <int DIM> struct lctx_cuda_group_flash : lctx_cuda_flash<DIM, 64, lctx_cuda_panels<DIM>> {
    using layout = lctx_cuda_panels<DIM>;
    using base = lctx_cuda_flash<DIM, layout::ROWS, layout>;
    using base::o, base::s;
    uint32_t p[base::GROUPS][4];
    float growth[2];  // what o is to be multiplied by

    // Begin s = Q K^T.
    __device__ __forceinline__ void begin_scores(const lctx_cuda_queries<DIM, true, layout> & q, const uint16_t * k) {
        lctx_unrolled<DIM / 16>(
            [&](int step) { lctx_group_mma<false>(s, q.kept[step], layout::keys(k, step * 16), step > 0); });
        lctx_group_end();
    }
    // Begin o += P V.
    __device__ __forceinline__ void begin_values(const uint16_t * v) {
        lctx_unrolled<base::GROUPS>([&](int n) { lctx_group_mma<true>(o, p[n], layout::values(v, n * 16), true); });
        lctx_group_end();
    }
    // Scores to weights while o is on its way.
    __device__ __forceinline__ void softmax() {
        growth[0] = growth[1] = 1.0f;
        base::softmax([&](int h, float factor) { growth[h] = factor; });
    }
    // Take the weights for the next product; no product is on its way.
    __device__ __forceinline__ void take_weights() {
        if (lctx_ballot(growth[0] != 1.0f || growth[1] != 1.0f) != 0) {
            lctx_unrolled<2>([&](int h) { base::rescale(h, growth[h]); });
        }
        lctx_unrolled<base::GROUPS>([&](int n) { base::put_weights(n, p[n]); });
    }
};

// Until all but N groups of this thread's copies are in shared memory, for the products of the group.
template <int N> static __device__ __forceinline__ void lctx_cuda_wait_for_tiles() {
    lctx_copy_wait<N>();
    lctx_group_sees_copies();
    __syncthreads();
}

// Read the blocks from `now` on. r: a dense_reader. Of two tiles for keys and two for values, those of the next block
// of each are on their way while products with the others run.
template <typename R, typename C> static __device__ __forceinline__ void lctx_cuda_read_in_group(R & r, C now) {
    if (!r.is_valid(now)) {
        return;
    }
    C next = r.after(now);
    r.put_sources(next, 1);
    __syncthreads();
    r.fetch_k(now, 0), r.fetch_v(now, 0), r.fetch_k(next, 1);
    lctx_cuda_wait_for_tiles<2>();
    r.enter(r.parts()[now.part], 0);
    lctx_group_begin();
    r.f.begin_scores(r.q, r.k_tile(0));
    lctx_group_wait<0>();
    lctx_group_hold(r.f.s);
    r.limit(now);
    r.f.softmax();
    r.f.take_weights();
    int i = 0;  // number of the block whose values are read
    for (; r.is_valid(next); i++) {
        const C later = r.after(next);
        r.put_sources(later, i + 2);
        lctx_cuda_wait_for_tiles<0>();  // and all have read the keys of this block, and the values before
        if (next.part != now.part) {
            r.enter(r.parts()[next.part], i);
        }
        r.fetch_v(next, i + 1), r.fetch_k(later, i + 2);
        lctx_group_hold(r.f.o);
        lctx_group_begin();
        r.f.begin_scores(r.q, r.k_tile(i + 1));
        r.f.begin_values(r.v_tile(i));
        lctx_group_wait<1>();
        lctx_group_hold(r.f.s);
        r.limit(next);
        r.f.softmax();
        lctx_group_wait<0>();
        lctx_group_keep(r.f.p), lctx_group_keep(r.q.kept);
        lctx_group_hold(r.f.o);
        r.f.take_weights();
        now = next, next = later;
    }
    lctx_cuda_wait_for_tiles<0>();
    lctx_group_hold(r.f.o);
    lctx_group_begin();
    r.f.begin_values(r.v_tile(i));
    lctx_group_wait<0>();
    lctx_group_keep(r.f.p);
    lctx_group_hold(r.f.o);
}
