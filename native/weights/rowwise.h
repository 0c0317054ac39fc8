// Ops on rows of floats, in addition to ggml's.
#pragma once

#include "ggml.h"

namespace ggml::cpu {
class tensor_traits;
}

// Return what computes op here: rows times a number each, or the gate of gpt-oss's experts; or NULL.
ggml::cpu::tensor_traits * lctx_cpu_rowwise(const ggml_tensor * op);
