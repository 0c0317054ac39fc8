// Choices with tiles as segments of every token.
#include "expand.h"

namespace {

constexpr int THREADS = 256;

// A thread for a segment.
__global__ void write_out(const lctx_choices choices, int32_t n_run, int32_t chunk_size, lctx_segment * to) {
    lctx_begin();
    lctx_let_next_begin();
    const int32_t n_expanded = choices.n_expanded(n_run);
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, list = i / n_expanded;
    if (list < (int64_t)choices.n_tokens * choices.n_choice) {
        const auto token = (int32_t)(list / choices.n_choice), choice = (int32_t)(list % choices.n_choice);
        to[i] = lctx_expanded(choices, n_run, chunk_size, token, choice, (int32_t)(i % n_expanded));
    }
}

}  // namespace

void lctx_cuda_write_out(const lctx_cuda_queue & queue, const lctx_choices & choices, int32_t n_run, int32_t chunk_size,
                         lctx_segment * to) {
    const int64_t n = (int64_t)choices.n_tokens * choices.n_choice * choices.n_expanded(n_run);
    lctx_launch(write_out, dim3((unsigned)lctx_div_up(n, THREADS)), THREADS, 0, queue.stream, choices, n_run,
                chunk_size, to);
}
