// *attend* of tiles whose tokens share a list of chunks (../ops/choices.h).
#pragma once

#include "partial-states.h"

// Return whether lists are read as they are; else they are written out as segments of every token (expand.h).
bool lctx_cuda_reads_lists(const lctx_cuda_device & device, const lctx_attend_args & args);

// Parts of what a tile reads, whose states are merged; 1 without tiles.
int lctx_cuda_list_splits(const lctx_cuda_device & device, const lctx_attend_args & args);

// The tokens of tiles: into the output, or where there are several parts into states at the beginning of the work
// buffer.
void lctx_cuda_attend_lists(const lctx_cuda_queue & queue, const lctx_attend_args & args);
