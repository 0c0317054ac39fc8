// Choices with tiles (../ops/choices.h) written out as segments of every token, which is what other kernels read. A: their arguments, with
// choices().
#pragma once

#include "kernels.h"

// to: [n_tokens][n_choice][n_expanded].
void lctx_cuda_write_out(const lctx_cuda_queue & queue, const lctx_choices & choices, int32_t n_run, int32_t chunk_size, lctx_segment * to);

// Bytes for all segments; 0: there are no tiles.
template <typename A> size_t lctx_cuda_expanded_size(const A & a) {
    const size_t n = (size_t)a.n_tokens * a.n_choice * a.choices().n_expanded(a.params.n_run);
    return a.params.tiles.n_tile > 0 ? (size_t)lctx_div_up((long long)(n * sizeof(lctx_segment)), 256) * 256 : 0;
}

// The same arguments with the segments at `work`.
template <typename A> A lctx_cuda_expanded(const A & a, char * work) {
    A expanded = a;
    expanded.segs = (const lctx_segment *)work;
    expanded.n_seg = a.choices().n_expanded(a.params.n_run);
    expanded.params.tiles = {};
    return expanded;
}

// run(queue, arguments) with the segments at the beginning of the work buffer, and the rest of it left.
template <typename A, typename F> void lctx_cuda_run_expanded(const lctx_cuda_queue & queue, const A & a, F && run) {
    lctx_cuda_write_out(queue, a.choices(), a.params.n_run, a.params.chunk_size, (lctx_segment *)queue.work);
    run(lctx_cuda_queue{queue.device, queue.stream, queue.work + lctx_cuda_expanded_size(a)}, lctx_cuda_expanded(a, queue.work));
}
