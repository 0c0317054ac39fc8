// Finds what *summarize* reads: the chunks that a batch completes, and their stored keys.
#pragma once

#include "../ops/cache.h"
#include "hadamard.h"
#include "half.h"

// The chunk whose last row is stored by token `last`: all its rows are held.
struct lctx_completed {
    int32_t seq, first_row, last, index, head_kv;
    int32_t cell;  // of the first row

    __device__ lctx_completed(const lctx_summarize_args & a, int32_t last, int head_kv) : last(last), head_kv(head_kv) {
        seq = a.rows[last].seq;
        first_row = a.rows[last].row + 1 - a.params.chunk_size;
        index = first_row / a.params.chunk_size;
        cell = lctx_cells(a.cache, head_kv, seq).cell(first_row);
    }
};

// Elements [d, d + 8) of key i of the chunk.
static __device__ inline void lctx_key_8(const lctx_summarize_args & a, const lctx_completed & c, int i, int d,
                                         float (&x)[8]) {
    lctx_load_8(a.cache.k_pool.type, lctx_key_row(a.cache, c.cell + i, c.head_kv, c.seq), d, a.params.hadamard.k, x);
}

static __device__ inline char * lctx_summary_row(const lctx_summarize_args & a, const lctx_completed & c, int head) {
    return a.summaries + c.index * a.summary_stride + head * a.summary_head_stride + c.seq * a.summary_seq_stride;
}

// Divides rows among the threads of a block: 8 elements each, as many rows at a time as there are threads.
struct lctx_sharing {
    int dim, n_row, row, d;

    __device__ explicit lctx_sharing(int dim)
        : dim(dim),
          n_row((int)blockDim.x * 8 / dim),
          row((int)threadIdx.x / (dim / 8)),
          d((int)threadIdx.x % (dim / 8) * 8) {}
    __device__ bool works() const { return row < n_row; }
    // Reduce what the threads have of every element: write(element, result), by the same thread each time. partials: 8
    // floats per thread, free afterwards.
    template <typename F, typename W>
    __device__ void reduce(const float (&x)[8], float * partials, F && f, W && write) const {
        for (int i = 0; i < 8; i++) {
            partials[threadIdx.x * 8 + i] = x[i];
        }
        __syncthreads();
        for (int e = (int)threadIdx.x; e < dim; e += (int)blockDim.x) {
            float all = partials[e];
            for (int r = 1; r < n_row; r++) {
                all = f(all, partials[r * dim + e]);
            }
            write(e, all);
        }
        __syncthreads();
    }
};
