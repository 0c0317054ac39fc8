// Stored rows to floats.
#pragma once

#include "rows.h"

// n rows of dim elements, row_size bytes apart, to floats dst_row elements apart.
static inline void lctx_unpack_rows(ggml_type type, const char * src, size_t row_size, int32_t n, int32_t dim,
                                    float * dst, int64_t dst_row) {
    const bool by_vectors = dim % LCTX_VL == 0 && lctx_with_rows(type, [&](auto rows) {
                                for (int32_t i = 0; i < n; i++) {
                                    for (int32_t d = 0; d < dim; d += LCTX_VL) {
                                        lctx_vstore(dst + i * dst_row + d, rows.load(src + i * row_size, d));
                                    }
                                }
                            });
    for (int32_t i = 0; !by_vectors && i < n; i++) {
        const char * row = src + i * row_size;
        if (type == GGML_TYPE_F32) {
            memcpy(dst + i * dst_row, row, (size_t)dim * sizeof(float));
        } else {
            ggml_get_type_traits(type)->to_float(row, dst + i * dst_row, dim);
        }
    }
}
