// Memory that kernels of a CUDA device reach, in buffers of the device's own type: a scheduler copies what lies in
// other types.
#pragma once

#include "../base/backend.h"

extern const lctx_device_memory_kind lctx_cuda_memory;
