// *store*: rotate the keys of the batch to their storage positions, transform, convert, write rows of K and V.
#include "columns.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "half.h"

#include <algorithm>
#include <cstdint>

namespace {

void store_row(const lctx_store_args & args, int32_t token, int32_t head, float * tmp) {
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
        ggml_get_type_traits_cpu(type)->from_float(tmp, to, dim);
    };
    const float * center = args.center ? args.center + (size_t)head * args.head_dim_k : nullptr;
    const auto put_key = [&](const float * cs, char * to) {
        lctx_rotate_row(k, tmp, args.head_dim_k, cs, args.n_dims, args.params.rope_mode);
        for (int32_t d = 0; center && d < args.head_dim_k; d++) {
            tmp[d] -= center[d];
        }
        put(args.cache.k_pool.type, false, args.head_dim_k, args.params.hadamard.k, to);
    };
    put_key(args.angles + (size_t)at.angle * args.n_dims, lctx_key_row(args.cache, cell, head, at.seq));
    if (args.cache.near.data) {
        put_key(args.angles + (size_t)at.near_angle * args.n_dims, lctx_near_row(args.cache, at.row, head, at.seq));
    }
    memcpy(tmp, v, args.head_dim_v * sizeof(float));
    put(args.cache.v_pool.type, !lctx_values_in_keys(args.cache), args.head_dim_v, args.params.hadamard.v,
        lctx_value_row(args.cache, cell, head, at.seq));
    if (!cells.all()) {
        cells.held.rows()[cell] = at.row;
        cells.held.scores()[cell] = cells.held.undo()[cell] = lctx_held::first_score(args.params.score);
    }
}

size_t tmp_size(const lctx_store_args & args) {
    return GGML_PAD(std::max(args.head_dim_k, args.head_dim_v) * sizeof(float), 64);
}

}  // namespace

size_t lctx_cpu_store_wsize(const lctx_store_args & args, int n_tasks) {
    return tmp_size(args) * n_tasks;
}

void lctx_cpu_store(const ggml_compute_params * params, const lctx_store_args & args) {
    float * tmp = (float *)((char *)params->wdata + params->ith * tmp_size(args));
    const int64_t n = (int64_t)args.n_tokens * args.n_head_kv;
    for (int64_t i = params->ith; i < n; i += params->nth) {
        store_row(args, (int32_t)(i / args.n_head_kv), (int32_t)(i % args.n_head_kv), tmp);
    }
}
