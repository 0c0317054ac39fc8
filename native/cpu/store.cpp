// *store*: rotate the keys of the batch to their storage positions, transform, convert, write rows of K and V.
#include "../ops/nonlinear.h"
#include "columns.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "half.h"

#include <algorithm>
#include <cstdint>

namespace {

// Collects rows that follow each other in a pool, and writes them to its file together.
class run_of_rows {
  public:
    run_of_rows(lctx_row_file * file, size_t row_size, char * rows) : file_(file), row_size_(row_size), rows_(rows) {}
    run_of_rows(const run_of_rows &) = delete;
    run_of_rows & operator=(const run_of_rows &) = delete;
    ~run_of_rows() { end(); }

    // Return where to put the row of this address: there, unless it is in a file.
    char * row(char * at) {
        if (!file_) {
            return at;
        }
        if (n_ == LCTX_PAGE_ROWS || at != first_ + n_ * row_size_) {
            end();
            first_ = at;
        }
        return rows_ + n_++ * row_size_;
    }

  private:
    void end() {
        if (n_ > 0) {
            file_->write(first_, rows_, n_ * row_size_);
        }
        n_ = 0;
    }

    lctx_row_file * file_;
    size_t row_size_;
    char * rows_;  // [LCTX_PAGE_ROWS][row_size]
    char * first_ = nullptr;
    size_t n_ = 0;
};

struct scratch {
    float * row;
    char *keys, *values;  // of a run

    static size_t row_size(const lctx_store_args & args) {
        return GGML_PAD(std::max(args.head_dim_k, args.head_dim_v) * sizeof(float), LCTX_CACHE_LINE);
    }
    static size_t run_size(const lctx_store_args & args, const lctx_pool_args & pool) {
        return args.file ? GGML_PAD(LCTX_PAGE_ROWS * pool.row_size, LCTX_CACHE_LINE) : 0;
    }
    static size_t size(const lctx_store_args & args) {
        return row_size(args) + run_size(args, args.cache.k_pool) + run_size(args, args.cache.v_pool);
    }
    scratch(char * base, const lctx_store_args & args)
        : row((float *)base), keys(base + row_size(args)), values(keys + run_size(args, args.cache.k_pool)) {}
};

// A row of IQ4_NL. llama.cpp's conversion turns NaN into 0, and leaves levels of a block of zeros undefined.
void put_iq4_nl(const float * x, block_iq4_nl * blocks, int32_t dim) {
    for (int32_t first = 0; first < dim; first += QK4_NL, x += QK4_NL, blocks++) {
        const float top = *std::max_element(x, x + QK4_NL, [](float a, float b) { return fabsf(a) < fabsf(b); });
        const float inverse = top != 0.0f ? 1.0f / (top / (float)lctx_iq4_value(0)) : 0.0f;
        float products = 0.0f, squares = 0.0f;
        int levels[QK4_NL];
        for (int i = 0; i < QK4_NL; i++) {
            levels[i] = lctx_iq4_level(x[i] * inverse);
            const float value = (float)lctx_iq4_value(levels[i]), weight = x[i] * x[i];
            products += weight * value * x[i];
            squares += weight * value * value;
        }
        blocks->d = ggml_fp32_to_fp16(lctx_iq4_scale(products, squares));
        for (int i = 0; i < QK4_NL / 2; i++) {
            blocks->qs[i] = (uint8_t)(levels[i] | levels[i + QK4_NL / 2] << 4);
        }
    }
}

void store_row(const lctx_store_args & args, int32_t token, int32_t head, float * tmp, run_of_rows & keys,
               run_of_rows & values) {
    const lctx_row & at = args.rows[token];
    const float * k = (const float *)(args.k + head * args.k_head_stride + token * args.k_token_stride);
    const float * v = (const float *)(args.v + head * args.v_head_stride + token * args.v_token_stride);

    const lctx_cells cells(args.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (args.params.staged_chunk > 0 && !lctx_is_staged(args.cache, cell, head, at.seq)) {
        return;
    }
    const auto put = [&](ggml_type type, bool is_value, int32_t dim, int32_t block, char * to) {
        const float most = lctx_most_stored(type, is_value);
        lctx_transform(tmp, dim, block);
        std::transform(tmp, tmp + dim, tmp, [&](float x) { return lctx_limited(x, most); });
        if (type == GGML_TYPE_IQ4_NL) {
            put_iq4_nl(tmp, (block_iq4_nl *)to, dim);
        } else {
            ggml_get_type_traits_cpu(type)->from_float(tmp, to, dim);
        }
    };
    const float * center = args.center ? args.center + (size_t)head * args.head_dim_k : nullptr;
    const auto put_key = [&](const float * cs, char * to) {
        lctx_rotate_row(k, tmp, args.head_dim_k, cs, args.n_dims, args.params.rope_mode);
        for (int32_t d = 0; center && d < args.head_dim_k; d++) {
            tmp[d] -= center[d];
        }
        put(args.cache.k_pool.type, false, args.head_dim_k, args.params.hadamard.k, to);
    };
    put_key(args.angles + (size_t)at.angle * args.n_dims, keys.row(lctx_key_row(args.cache, cell, head, at.seq)));
    if (args.cache.near.data) {
        put_key(args.angles + (size_t)at.near_angle * args.n_dims, lctx_near_row(args.cache, at.row, head, at.seq));
    }
    memcpy(tmp, v, args.head_dim_v * sizeof(float));
    put(args.cache.v_pool.type, !lctx_values_in_keys(args.cache), args.head_dim_v, args.params.hadamard.v,
        values.row(lctx_value_row(args.cache, cell, head, at.seq)));
    if (!cells.all()) {
        cells.held.rows()[cell] = at.row;
        cells.held.scores()[cell] = cells.held.undo()[cell] = lctx_held::first_score(args.params.score);
    }
}

// Tokens [first, end) of a head.
void store_rows(const lctx_store_args & args, int32_t head, int32_t first, int32_t end, const scratch & w) {
    run_of_rows keys(args.file, args.cache.k_pool.row_size, w.keys),
        values(args.file, args.cache.v_pool.row_size, w.values);
    for (int32_t token = first; token < end; token++) {
        store_row(args, token, head, w.row, keys, values);
    }
}

}  // namespace

size_t lctx_cpu_store_wsize(const lctx_store_args & args, int n_tasks) {
    return scratch::size(args) * n_tasks;
}

void lctx_cpu_store(const ggml_compute_params * params, const lctx_store_args & args) {
    const scratch w((char *)params->wdata + params->ith * scratch::size(args), args);
    const int32_t step = args.file ? LCTX_PAGE_ROWS : 1;  // tokens of which a thread may write rows together
    const int64_t n = lctx_div_up(args.n_tokens, step) * args.n_head_kv;
    for (int64_t i = params->ith; i < n; i += params->nth) {
        const auto first = (int32_t)(i / args.n_head_kv) * step;
        store_rows(args, (int32_t)(i % args.n_head_kv), first, std::min(first + step, args.n_tokens), w);
    }
}
