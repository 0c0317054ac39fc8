// Measures what bounds every kernel: reading memory, and products of numbers that are at hand. For bench.
#pragma once

#include <cstddef>
#include <cstdint>

// Sum of n floats, read with the machine's widest loads; n is a multiple of 256.
float lctx_cpu_read(const float * data, size_t n);

// Products of small matrices that stay in the first-level cache; returns the operations done (a product and a sum are
// two).
double lctx_cpu_gemm_f32(int64_t n_product);

// Multiply bf16 factors and add their products as floats; returns the operations done, 0 when not compiled for such a
// CPU.
double lctx_cpu_gemm_bf16(int64_t n_product);
