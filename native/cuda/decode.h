// *attend* of few tokens, without tensor cores.
#pragma once

#include "kernels.h"

// Return whether the decode kernel (decode.cu) takes these arguments.
bool lctx_cuda_decodes(const lctx_attend_args & args);

// Return whether it takes them, and writes the row of the only token too where nothing has written it.
bool lctx_cuda_decode_writes(const lctx_attend_args & args);

// Bytes of work buffer of lctx_cuda_decode; 0: none.
size_t lctx_cuda_decode_wsize(const lctx_cuda_device & device, const lctx_attend_args & args);

// rows: those of the only token, which nothing has written yet, where heads neither evict nor have near keys.
void lctx_cuda_decode(const lctx_cuda_queue & queue, const lctx_attend_args & args, const lctx_new_rows & rows = {});
