// *attend* of the tokens of a prompt whose heads read the same runs.
#pragma once

#include "partial-states.h"

// Return whether tokens that read runs only are read by the dense loop.
bool lctx_cuda_reads_runs(const lctx_cuda_device & device, const lctx_attend_args & args);

// Bytes of work buffer of lctx_cuda_attend_runs; 0: none.
size_t lctx_cuda_runs_wsize(const lctx_cuda_device & device, const lctx_attend_args & args);

// All tokens, into the output. Only where lctx_cuda_reads_runs.
void lctx_cuda_attend_runs(const lctx_cuda_queue & queue, const lctx_attend_args & args);
