// Which kernels a device runs, in a word: for people.
#pragma once

#include "ggml-backend.h"

#include <string>

// "AVX512", "mma" (tensor cores), ...; a device that has none of ours: how it is reached.
std::string lctx_kernel_name(ggml_backend_dev_t dev);
