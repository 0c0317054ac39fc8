// Rows of the index of keys (../ops/index.h) on the GPU.
#pragma once

#include "../ops/cache.h"
#include "device.h"

// Where group `index` of the rows of one head of a sequence lies.
static __device__ __forceinline__ char * lctx_index_group(const lctx_cache_args & cache, int32_t index, int32_t head, int32_t seq) {
    return lctx_pool_at(cache.index, lctx_pool_row(cache.table, index * lctx_index_shape::GROUP, head, seq));
}

// level + most() of four codes.
template <int BITS> static __device__ __forceinline__ uint32_t lctx_index_levels_of(uint32_t codes) {
    return BITS == 1 ? codes + codes : codes * 7 - (codes >> 1 & 0x01010101);  // no byte carries: 0, 7, 13, 20
}
