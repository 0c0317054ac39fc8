// The CUDA kernels in place of those of the CPU, for tests, which say so in the environment (LCTX_EMULATE_CUDA).
#include "../base/backend.h"
#include "dispatch.h"

#include <cstdlib>

namespace {

constexpr size_t ALIGN = 256;

// Few multiprocessors, yet enough to split the work, and scratch for some heads of a test.
lctx_cuda_device device() {
    return {4, lctx_emulated_shared(), 1 << 20, lctx_cuda_wants_warpgroups()};
}

bool takes(const ggml_tensor * node) {
    return getenv("LCTX_EMULATE_CUDA") && !lctx_cuda_refusal(device(), node);
}

size_t wsize(const ggml_tensor * node) {
    return lctx_cuda_wsize(device(), node) + ALIGN;
}

void run(ggml_tensor * node, void * work) {
    lctx_cuda_run({device(), nullptr, (char *)GGML_PAD((uintptr_t)work, ALIGN)}, node);
}

constexpr lctx_kernels KERNELS = {takes, wsize, run};

[[maybe_unused]] const bool is_registered = (lctx_cpu_use(&KERNELS), true);

}  // namespace
