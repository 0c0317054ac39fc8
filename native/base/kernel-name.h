// Tells people what a device is and which kernels it runs.
#pragma once

#include "ggml-backend.h"

#include <string>

// "AVX512", "mma" (tensor cores), ...; a device that has none of ours: how it is reached.
std::string lctx_kernel_name(ggml_backend_dev_t dev);

// In builds with Vulkan, of a device of that backend: its name, driver and limits, and what methods need that it lacks.
// Throws vk::SystemError when the driver fails.
std::string lctx_vk_describe(ggml_backend_dev_t dev);
