// The attention kernels share this: columns of rotated queries against a block of stored rows. A column is one (token,
// query head); scores and transposed queries are laid out [key or dimension][column].
#pragma once

#include "../ops/cache.h"
#include "few.h"
#include "gemm.h"
#include "hadamard.h"
#include "rotate.h"
#include "softmax.h"
#include "unpack.h"

#include <algorithm>
#include <cmath>
#include <numeric>

constexpr int LCTX_MAX_COLUMNS = 128;
constexpr size_t LCTX_CACHE_LINE = 64;

static inline int64_t lctx_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static inline int lctx_round_up(int n, int multiple) {
    return (int)lctx_ceil_div(n, multiple) * multiple;
}

static inline float lctx_dot(const float * x, const float * y, int dim) {
    lctx_vf s0 = lctx_vf{}, s1 = lctx_vf{};
    int i = 0;
    for (; i + 2 * LCTX_VL <= dim; i += 2 * LCTX_VL) {
        s0 += lctx_vload(x + i) * lctx_vload(y + i);
        s1 += lctx_vload(x + i + LCTX_VL) * lctx_vload(y + i + LCTX_VL);
    }
    float s = lctx_vsum(s0 + s1);
    for (; i < dim; i++) {
        s += x[i] * y[i];
    }
    return s;
}

// Columns in use, and their queries: as rows while they are few, else transposed.
struct lctx_columns {
    float * q;  // [n rounded up by lctx_few_step][dim], or [dim][n_pad] and LCTX_VL rows that wait to be transposed
    int n;
    int n_pad;  // multiple of LCTX_VL
    int dim;
    bool fixed;  // rows have sums in the order of transposed columns
    bool as_rows;

    // The rows that wait make room for scales and starts of integers (key-integers.h): two for 32 channels of a column.
    static size_t n_float(int max_pad, int dim) {
        return (size_t)dim * (std::max(max_pad, LCTX_FEW_COLUMNS) + std::max(LCTX_VL, max_pad / 16));
    }
    lctx_columns(float * base, int n, int dim, bool fixed = false)
        : lctx_columns(base, n, dim, fixed, n <= LCTX_FEW_COLUMNS) {}
    lctx_columns(float * base, int n, int dim, bool fixed, bool as_rows)
        : q(base), n(n), n_pad(lctx_round_up(n, LCTX_VL)), dim(dim), fixed(fixed), as_rows(as_rows) {}

    bool by_vectors() const { return dim % LCTX_VL == 0; }
    bool few() const { return as_rows && by_vectors(); }
    // Columns that are multiplied and not set; what is transposed overwrites everything.
    void clear() const {
        if (few()) {
            std::fill(q + (size_t)n * dim, q + (size_t)lctx_few_pad(n) * dim, 0.0f);
        } else if (!by_vectors()) {
            std::fill_n(q, (size_t)dim * n_pad, 0.0f);
        }
    }

    // After clear(), all of them in their order.
    void set(int column, const float * src, float scale) const {
        const bool last = column % LCTX_VL == LCTX_VL - 1 || column == n - 1;
        const int64_t row = few() ? column : n_pad + column % LCTX_VL;
        for (int d = 0; by_vectors() && d < dim; d += LCTX_VL) {
            lctx_vstore(q + row * dim + d, scale * lctx_vload(src + d));
        }
        for (int d = 0; !by_vectors() && d < dim; d++) {
            q[(size_t)d * n_pad + column] = scale * src[d];
        }
        if (last && by_vectors() && !few()) {
            transpose(column / LCTX_VL * LCTX_VL, column % LCTX_VL + 1);
        }
    }

  private:
    void transpose(int first, int n_row) const {
        float * rows = q + (size_t)n_pad * dim;
        std::fill(rows + (size_t)n_row * dim, rows + (size_t)LCTX_VL * dim, 0.0f);
        for (int d = 0; d < dim; d += LCTX_VL) {
            lctx_vf v[LCTX_VL];
            for (int i = 0; i < LCTX_VL; i++) {
                v[i] = lctx_vload(rows + (size_t)i * dim + d);
            }
            lctx_vtranspose(v);
            for (int i = 0; i < LCTX_VL; i++) {
                lctx_vstore(q + (size_t)(d + i) * n_pad + first, v[i]);
            }
        }
    }
};

// s[row][column] (+)= k_row . q_column
static LCTX_ALONE void lctx_scores(const lctx_columns & q, const float * k, int64_t k_row, int n_row, float * s,
                                   bool add) {
    if (!q.few()) {
        lctx_gemm(n_row, q.n_pad, q.dim, k, k_row, 1, q.q, q.n_pad, s, q.n_pad, add);
        return;
    }
    for (int i = 0; i < n_row; i += LCTX_BLOCK) {
        float few[LCTX_FEW_COLUMNS * LCTX_BLOCK];
        const int n = std::min(LCTX_BLOCK, n_row - i);
        const lctx_stored rows = {GGML_TYPE_F32, k_row * sizeof(float), (const char *)(k + i * k_row), nullptr};
        lctx_few_scores(rows, n, q.q, q.n, q.dim, few, q.fixed);
        for (int x = 0; x < n; x++) {
            for (int c = 0; c < q.n_pad; c++) {
                float & to = s[(size_t)(i + x) * q.n_pad + c];
                to = (add ? to : 0.0f) + (c < q.n ? few[c * LCTX_BLOCK + x] : 0.0f);
            }
        }
    }
}

// Scores squashed into (-softcap, softcap); queries were loaded with lctx_query_scale.
static inline void lctx_softcap(float * s, size_t n, float softcap) {
    for (size_t i = 0; softcap != 0.0f && i < n; i++) {
        s[i] = softcap * tanhf(s[i]);
    }
}

static inline float lctx_query_scale(float scale, float softcap) {
    return softcap != 0.0f ? scale / softcap : scale;
}

// o[0..dim_v) *= factor
static inline void lctx_rescale(float * o, float factor, int dim_v) {
    for (int d = 0; d < dim_v && factor != 1.0f; d++) {
        o[d] *= factor;
    }
}

// Return the rows in a type that vectors can read: as they are, or unpacked to tmp, [n][dim].
static inline lctx_stored lctx_readable(const lctx_stored & rows, int n, int dim, float * tmp) {
    if (lctx_with_rows(rows.type, [](auto) {})) {
        return rows;
    }
    lctx_unpack_rows(rows.type, rows.data, rows.row_size, n, dim, tmp, dim);
    return {GGML_TYPE_F32, dim * sizeof(float), (const char *)tmp, rows.next};
}

// n rows as floats, and the step from one to the next: in place when they are floats already, else in tmp, [n][pad].
static inline const float * lctx_unpack(const lctx_stored & rows, int n, int dim, float * tmp, int64_t * step,
                                        int pad) {
    if (rows.type == GGML_TYPE_F32 && pad == dim) {
        *step = (int64_t)(rows.row_size / sizeof(float));
        return (const float *)rows.data;
    }
    *step = pad;
    lctx_unpack_rows(rows.type, rows.data, rows.row_size, n, dim, tmp, pad);
    return tmp;
}

// Keys of any n <= LCTX_BLOCK cells as floats: tmp, [n][dim].
static inline void lctx_gather_keys(const lctx_cache_args & cache, const lctx_cells & cells, bool near,
                                    const int32_t * picked, int n, int32_t head, int32_t seq, int dim, float * tmp) {
    const char * rows[LCTX_BLOCK];
    for (int i = 0; i < n; i++) {
        rows[i] =
            near ? lctx_near_row(cache, cells.row(picked[i]), head, seq) : lctx_key_row(cache, picked[i], head, seq);
        lctx_prefetch(rows[i], cache.k_pool.row_size);  // they are far apart
    }
    for (int i = 0; i < n; i++) {
        lctx_unpack_rows(cache.k_pool.type, rows[i], cache.k_pool.row_size, 1, dim, tmp + (size_t)i * dim, dim);
    }
}

// Keys of n cells of one page; tmp, [n][dim], is for those that do not lie together.
static inline lctx_stored lctx_stored_keys(const lctx_cache_args & cache, const lctx_cells & cells, bool near,
                                           int32_t cell, int n, int32_t head, int32_t seq, int dim, float * tmp) {
    const lctx_pool_args & pool = cache.k_pool;
    if (!near) {
        return {pool.type, pool.row_size, lctx_key_row(cache, cell, head, seq), nullptr};
    }
    if (cells.all()) {  // the ring is made of pages too: it does not wrap around inside of one
        return {pool.type, pool.row_size, lctx_near_row(cache, cell, head, seq), nullptr};
    }
    int32_t picked[LCTX_BLOCK];
    std::iota(picked, picked + n, cell);
    lctx_gather_keys(cache, cells, near, picked, n, head, seq, dim, tmp);
    return {GGML_TYPE_F32, dim * sizeof(float), (const char *)tmp, nullptr};
}

static inline lctx_stored lctx_stored_values(const lctx_cache_args & cache, int32_t cell, int32_t head, int32_t seq) {
    return {cache.v_pool.type, cache.v_pool.row_size, lctx_value_row(cache, cell, head, seq), nullptr};
}

// Cut the tokens into runs of at most `most` that belong to one sequence: cut = [number of runs, first token and number
// of each]. cut: int32 [2 * n_tokens + 1]. Tokens for which seq_of is -1 are in none.
template <typename F> static inline void lctx_cut_tokens(int32_t n_tokens, int32_t most, int32_t * cut, F && seq_of) {
    int32_t n = 0, last = -1;
    for (int32_t i = 0; i < n_tokens; i++) {
        const int32_t seq = seq_of(i);
        int32_t * run = cut + 2 * n - 1;  // the last one
        if (seq >= 0 && seq == last && run[1] < most) {
            run[1]++;
        } else if (seq >= 0) {
            run[2] = i, run[3] = 1;
            n++;
        }
        last = seq;
    }
    cut[0] = n;
}

// Write one finished state: o / l, as values were before they were stored, and its LSE when asked for.
static inline void lctx_write_state(const lctx_attend_args & a, int token, int head, float m, float l,
                                    const float * o) {
    const size_t at = (size_t)token * a.n_head + head;
    const float inv = l == 0.0f ? 0.0f : 1.0f / l;
    float * dst = a.dst + at * a.head_dim_v;
    for (int d = 0; d < a.head_dim_v; d++) {
        dst[d] = o[d] * inv;
    }
    lctx_transform(dst, a.head_dim_v, a.params.hadamard.v);
    if (a.lse) {
        a.lse[at] = l == 0.0f ? -INFINITY : m + logf(l);
    }
}
