// One node on the GPU: what the backend, or the emulation in its place, calls.
#pragma once

#include "kernels.h"

struct ggml_tensor;

// nullptr when the kernels can run the node on the device, else why not.
const char * lctx_cuda_refusal(const lctx_cuda_device & device, const ggml_tensor * node);
// Bytes of work buffer for lctx_cuda_run.
size_t lctx_cuda_wsize(const lctx_cuda_device & device, const ggml_tensor * node);
void lctx_cuda_run(const lctx_cuda_queue & queue, ggml_tensor * node);
