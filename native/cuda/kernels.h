// The CUDA kernels (../ops/args.h says what they take): launches in a stream, without waiting for anything, of a size
// that depends on shapes only, so that a graph of them can be captured and run again.
#pragma once

#include "../ops/args.h"
#include "device.h"

#include <cstdlib>
#include <cstring>

// head_dim of *attend* and *vote*: rows, queries and results of a tile are to fit into shared memory and registers.
constexpr int LCTX_CUDA_MOST_DIM = 576;

// f(width) with the least width of a tile, as a constant, that has room for heads of `dim` channels.
template <int DIM_> struct lctx_cuda_width {
    static constexpr int DIM = DIM_;
};

template <typename F> auto lctx_cuda_with_width(int dim, F && f) {
    return dim <= 64    ? f(lctx_cuda_width<64>())
           : dim <= 80  ? f(lctx_cuda_width<80>())
           : dim <= 96  ? f(lctx_cuda_width<96>())
           : dim <= 128 ? f(lctx_cuda_width<128>())
           : dim <= 256 ? f(lctx_cuda_width<256>())
           : dim <= 512 ? f(lctx_cuda_width<512>())
                        : f(lctx_cuda_width<LCTX_CUDA_MOST_DIM>());
}

// Tells what a launch needs to know of the device.
struct lctx_cuda_device {
    int n_multiprocessor;
    size_t max_shared;    // bytes that a block may ask for
    size_t most_scratch;  // bytes that rows of a prompt may take that are converted for all tiles
    bool has_warpgroups;  // whether prompts are multiplied by groups of warps (warpgroup.h)
};

// Return whether the environment asks for products of groups of warps: LCTX_CUDA_WGMMA=1. No GPU has run them yet.
inline bool lctx_cuda_wants_warpgroups() {
    const char * text = getenv("LCTX_CUDA_WGMMA");
    return text && strcmp(text, "1") == 0;
}

// Says where a node runs; work: lctx_cuda_NAME_wsize bytes, 256-byte aligned.
struct lctx_cuda_queue {
    lctx_cuda_device device;
    cudaStream_t stream;
    char * work;
};

// The rows of a ubatch that are not written yet.
struct lctx_new_rows {
    lctx_store_args store = {};   // cache.index: of their keys, where there is one
    lctx_index_shape index = {};  // bits 0: there is none

    // What is stored of a token and KV head: K, V, and a near key.
    LCTX_HD int n_stored() const { return store.cache.near.data ? 3 : 2; }
    // Of the longest row, up to where four numbers end: floats of shared memory that a warp needs.
    LCTX_HD int n_channel() const { return (int)lctx_div_up(lctx_max(store.head_dim_k, store.head_dim_v), 4) * 4; }
};

void lctx_cuda_angles(const lctx_cuda_queue & queue, const lctx_angles_args & args);
void lctx_cuda_store(const lctx_cuda_queue & queue, const lctx_new_rows & rows);
void lctx_cuda_attend(const lctx_cuda_queue & queue, const lctx_attend_args & args);  // chunks too
void lctx_cuda_summarize(const lctx_cuda_queue & queue, const lctx_summarize_args & args);
// rows: those of the token, where n_tokens is 1 and nothing has written them yet; else none.
void lctx_cuda_select(const lctx_cuda_queue & queue, const lctx_select_args & args, const lctx_new_rows & rows);
void lctx_cuda_vote(const lctx_cuda_queue & queue, const lctx_vote_args & args);  // chunks too
void lctx_cuda_evict(const lctx_cuda_queue & queue, const lctx_evict_args & args);
void lctx_cuda_fetch(const lctx_cuda_queue & queue, const lctx_fetch_args & args);
void lctx_cuda_index(const lctx_cuda_queue & queue, const lctx_index_args & args);  // of rows that are stored

// Bytes of shared memory that *fetch* takes: they grow with the number of pages.
size_t lctx_cuda_fetch_shared(const lctx_fetch_args & args);

// Bytes of work buffer; 0: none.
size_t lctx_cuda_attend_wsize(const lctx_cuda_device & device, const lctx_attend_args & args);
size_t lctx_cuda_select_wsize(const lctx_cuda_device & device, const lctx_select_args & args);
size_t lctx_cuda_vote_wsize(const lctx_cuda_device & device, const lctx_vote_args & args);
size_t lctx_cuda_evict_wsize(const lctx_cuda_device & device, const lctx_evict_args & args);
size_t lctx_cuda_fetch_wsize(const lctx_cuda_device & device, const lctx_fetch_args & args);
