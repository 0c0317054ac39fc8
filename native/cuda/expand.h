// Choices with tiles (../ops/choices.h) written out as segments of every token, which is what other kernels read. A:
// their arguments, with choices().
#pragma once

#include "kernels.h"

// to: [n_tokens][n_choice][n_expanded].
void lctx_cuda_write_out(const lctx_cuda_queue & queue, const lctx_choices & choices, int32_t n_run, int32_t chunk_size,
                         lctx_segment * to);

// run(queue, arguments) with the segments at the beginning of the work buffer, and the rest of it left.
template <typename A, typename F> void lctx_cuda_run_expanded(const lctx_cuda_queue & queue, const A & a, F && run) {
    lctx_cuda_write_out(queue, a.choices(), a.params.n_run, a.params.chunk_size, (lctx_segment *)queue.work);
    run(lctx_cuda_queue{queue.device, queue.stream, queue.work + lctx_expanded_size(a)},
        lctx_expanded_args(a, (const lctx_segment *)queue.work));
}
