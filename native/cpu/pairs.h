// Stored rows, queries and weights as pairs of bf16 (gemm.h): what *attend* multiplies for prompts where the CPU has
// such products.
//
// Sums are floats, but factors have 8 bits. So they are for rows that are stored with no more.
#pragma once

#include "columns.h"

static inline bool lctx_has_8_bits(ggml_type type) {
    return type != GGML_TYPE_F32 && type != GGML_TYPE_F16;
}

// For the columns of a prompt.
static inline bool lctx_in_pairs(const lctx_attend_args & a, const lctx_columns & columns) {
    return LCTX_HAS_PAIRS && !a.params.fixed && columns.by_vectors() && a.head_dim_v % LCTX_VL == 0 && !columns.few() &&
           lctx_has_8_bits(a.cache.k_pool.type) && lctx_has_8_bits(a.cache.v_pool.type);
}

#if LCTX_HAS_PAIRS
// Rows 2i and 2i + 1 as row i of pairs, an odd last one with zeros: [(n + 1) / 2][dim]. load(row, d) may read what
// pairs takes the place of, from the row of the pair on.
template <typename F> static inline void lctx_pair_up(int n, int dim, lctx_pair * pairs, F && load) {
    for (int i = 0; i < n; i += 2) {
        for (int d = 0; d < dim; d += LCTX_VL) {
            const lctx_vf first = load(i, d);
            lctx_vstore(pairs + i / 2 * dim + d, lctx_vpair(first, i + 1 < n ? load(i + 1, d) : lctx_vf{}));
        }
    }
}

// Floats, [n][dim], in place.
static inline const lctx_pair * lctx_pair_rows(float * rows, int n, int dim) {
    lctx_pair_up(n, dim, (lctx_pair *)rows, [&](int i, int d) { return lctx_vload(rows + i * dim + d); });
    return (const lctx_pair *)rows;
}

// f(row, d): the floats [d, d + LCTX_VL) of a stored row. tmp, [n][dim], is for types that vectors cannot read.
template <typename F>
static inline void lctx_each_vector(const lctx_stored & stored, int n, int dim, float * tmp, F && f) {
    const lctx_stored readable = lctx_readable(stored, n, dim, tmp);
    lctx_with_rows(readable.type, [&](auto rows) {
        f([&](int row, int d) { return rows.load(readable.data + row * readable.row_size, d); });
    });
}

// Keys as pairs of neighboring dimensions: [n][step]. In place when they are stored as bf16, else in tmp, [n][dim]
// floats.
static inline const lctx_pair * lctx_pair_keys(const lctx_stored & k, int n, int dim, float * tmp, int64_t * step) {
    if (k.type == GGML_TYPE_BF16) {
        *step = (int64_t)(k.row_size / sizeof(lctx_pair));
        return (const lctx_pair *)k.data;
    }
    *step = dim / 2;
    lctx_each_vector(k, n, dim, tmp, [&](auto && load) {
        for (int i = 0; i < n; i++) {
            for (int d = 0; d < dim; d += LCTX_VL) {
                lctx_vstore((lctx_pair *)tmp + (i * dim + d) / 2, load(i, d));
            }
        }
    });
    return (const lctx_pair *)tmp;
}

// Values as pairs of neighboring keys: tmp, [(n + 1) / 2][dim].
static inline const lctx_pair * lctx_pair_values(const lctx_stored & v, int n, int dim, float * tmp) {
    lctx_each_vector(v, n, dim, tmp, [&](auto && load) { lctx_pair_up(n, dim, (lctx_pair *)tmp, load); });
    return (const lctx_pair *)tmp;
}
#endif
