// Stored rows to floats.
#pragma once

#include "ggml-cpu.h"
#include "ggml.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include <cstdint>
#include <cstring>

// One q8_0 row: 32 int8 share one half-precision scale.
static inline void lctx_unpack_q8_0(const block_q8_0 * blocks, float * dst, int32_t dim) {
    for (int32_t b = 0; b < dim / QK8_0; b++) {
        const float d = ggml_fp16_to_fp32(blocks[b].d);
        for (int32_t i = 0; i < QK8_0; i++) {
            dst[b * QK8_0 + i] = d * (float)blocks[b].qs[i];
        }
    }
}

// n rows of dim elements, row_size bytes apart, to floats dst_row elements apart.
static inline void lctx_unpack_rows(ggml_type type, const char * src, size_t row_size, int32_t n, int32_t dim, float * dst,
                                    int64_t dst_row) {
    for (int32_t i = 0; i < n; i++, src += row_size, dst += dst_row) {
        switch (type) {
            case GGML_TYPE_F32:  memcpy(dst, src, (size_t)dim * sizeof(float)); break;
            case GGML_TYPE_F16:  ggml_cpu_fp16_to_fp32((const ggml_fp16_t *)src, dst, dim); break;
            case GGML_TYPE_Q8_0: lctx_unpack_q8_0((const block_q8_0 *)src, dst, dim); break;
            default:             ggml_get_type_traits(type)->to_float(src, dst, dim);
        }
    }
}
