// Products of quantized weights with the columns of a prompt, for weights that lie in memory as a file holds them.
#pragma once

#include "ggml.h"

namespace ggml::cpu {
class tensor_traits;
}

// Return what computes op here: a GGML_OP_MUL_MAT or GGML_OP_MUL_MAT_ID of a type and a number of columns for which
// this is the faster way, or NULL.
ggml::cpu::tensor_traits * lctx_cpu_multiply(const ggml_tensor * op);

// Return what computes any product whose columns have sums of one order (ops/fixed.h): column by column, with the dot
// products of ggml; or NULL.
ggml::cpu::tensor_traits * lctx_cpu_dots(const ggml_tensor * op);

// Return what computes products of a few columns, for types that have a faster way of their own for so few
// (multiply-few.cpp), or NULL. Blocks of 32 values have it for up to LCTX_FEW_COLUMNS_32, K-quants for up to
// LCTX_FEW_COLUMNS_256. is_fixed: only where the bits are those of panels.
#if defined(__AVX512VNNI__)
constexpr int64_t LCTX_FEW_COLUMNS_32 = 12, LCTX_FEW_COLUMNS_256 = 12;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int64_t LCTX_FEW_COLUMNS_32 = 6, LCTX_FEW_COLUMNS_256 = 16;
#elif defined(__AVX2__)
constexpr int64_t LCTX_FEW_COLUMNS_32 = 0, LCTX_FEW_COLUMNS_256 = 16;
#else
constexpr int64_t LCTX_FEW_COLUMNS_32 = 0, LCTX_FEW_COLUMNS_256 = 0;
#endif
ggml::cpu::tensor_traits * lctx_cpu_few(ggml_type type, bool is_fixed);

// Return what computes products of a GGML_OP_MUL_MAT_ID, or NULL.
ggml::cpu::tensor_traits * lctx_cpu_experts(ggml_type type, bool is_fixed);

// Return whether the weight of op must stay as the file holds it: ggml would repack it for products that are slower
// than those for plain ones.
bool lctx_cpu_keeps_plain(const ggml_tensor * op);
