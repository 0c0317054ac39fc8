#include "device-store.h"

#include "../base/refusal.h"

#include <algorithm>

namespace {

// Pages of all heads, whose numbers are int32, as are those of staged units and those of the pool together.
int32_t n_page(const lctx_kv_shape & shape, int32_t n_head) {
    const int64_t n = (int64_t)shape.n_page_head * n_head,
                  n_unit = shape.n_staged > 0 ? n * shape.of_page() + shape.n_staged * n_head : n;
    if (std::max(n, n_unit) > INT32_MAX) {
        throw lctx_refusal("n_ctx and n_seq_max make " + std::to_string(n) + " pages of K and V, at most " +
                           std::to_string(INT32_MAX) + " have numbers; lower them");
    }
    return (int32_t)n;
}

}  // namespace

lctx_device_store::lctx_device_store(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft,
                                     const lctx_kv_shape & shape, const std::vector<lctx_layer_heads> & layers,
                                     lctx_work & work)
    : lctx_paged_tensors(dev, buft, work, layers.back().first + layers.back().n,
                         n_page(shape, layers.back().first + layers.back().n)),
      n_query_head(layers.back().first_query + layers.back().n_query),
      shape_(shape),
      layers_(layers),
      gone_((size_t)shape.n_seq * n_head) {
    k_pool = add_pool("lctx_k_pool", shape.type_k, shape.head_dim_k);
    if (shape.v_offset < 0) {
        v_pool = add_pool("lctx_v_pool", shape.type_v, shape.head_dim_v);
    } else {
        v_pool = ggml_view_2d(ctx_.get(), k_pool, shape.head_dim_v, k_pool->ne[1], k_pool->nb[1],
                              ggml_row_size(shape.type_k, shape.v_offset));
    }
    table = add("lctx_table", GGML_TYPE_I32, lctx_kv_shape::n_block(shape.n_ctx), n_head, shape.n_seq);
    if (shape.n_staged > 0) {
        const int64_t n_staged = (int64_t)n_head * shape.n_staged << shape.unit_shift();
        k_staged = add("lctx_k_staged", shape.type_k, shape.head_dim_k, n_staged);
        v_staged = add("lctx_v_staged", shape.type_v, shape.head_dim_v, n_staged);
        staging = add("lctx_staging", GGML_TYPE_I32,
                      lctx_staging::size(shape.n_staged, table->ne[0] * shape.of_page() * shape.n_seq), n_head);
        staging_table = add("lctx_staging_table", GGML_TYPE_I32, table->ne[0] * shape.of_page(), n_head, shape.n_seq);
        if (!shape.folder.empty()) {
            const auto by_heads = [](const auto & a, const auto & b) { return a.n < b.n; };
            const int64_t n_row = std::max_element(layers.begin(), layers.end(), by_heads)->n * shape.n_row_head();
            k_transit = add("lctx_k_transit", shape.type_k, shape.head_dim_k, n_row);
            v_transit = add("lctx_v_transit", shape.type_v, shape.head_dim_v, n_row);
        }
    }
    if (shape.near_rows > 0) {
        near = add("lctx_near", shape.type_k, shape.head_dim_k, shape.near_rows, n_head, shape.n_seq);
    }
    const lctx_chunks * c = shape.chunks;
    if (c && c->by_keys()) {
        index = add_pool("lctx_index", GGML_TYPE_I8, (int64_t)shape.index_bytes());
    } else if (c) {
        summaries = add("lctx_summaries", lctx_summary_type(c->representation, shape.head_dim_k, shape.type_k),
                        c->summary_dim(shape.head_dim_k), std::max(1, shape.n_complete(shape.n_ctx)),
                        c->by_attention() ? n_query_head : n_head, shape.n_seq);
        if (c->by_attention()) {
            open = add("lctx_open", GGML_TYPE_F32, shape.head_dim_k, 2 * c->chunk_size, n_query_head, shape.n_seq);
        }
    }
    if (shape.retain) {
        held = add("lctx_held", GGML_TYPE_I32, lctx_held::size(shape.n_ctx), n_head, shape.n_seq);
        due_ = add("lctx_due", GGML_TYPE_I32, shape.n_seq, 1);
        counts_ = add("lctx_counts", GGML_TYPE_I32, 1, n_head, shape.n_seq);
        budgets_ = shape.retain->own_budgets() ? add("lctx_budgets", GGML_TYPE_I32, n_head, shape.n_seq) : nullptr;
        budget_.assign(budgets_ ? gone_.size() : 0, shape.retain->budget);
    }
    list_planes();
}

bool lctx_device_store::allocate(bool dry) {
    far_tensors far;
    if (k_staged) {
        far = {{k_pool, v_pool}, shape_.folder, 1 << shape_.unit_shift()};
    }
    if (!lctx_device_tensors::allocate(far, shape_.shrinks, dry)) {
        return false;
    }
    if (dry) {
        v_pool->buffer = k_pool->buffer;
        return true;
    }
    if (v_pool->view_src) {
        ggml_backend_view_init(v_pool);
    }
    bool ok = true;
    for (const ggml_tensor * t : {table, due_, budgets_, counts_, k_staged, v_staged, staging, staging_table}) {
        ok = ok && (!t || commit(t, 0, ggml_nbytes(t)));
    }
    ok = ok && (!held || commit(held, 0, held_offset(0, 0, 0)));  // the headers
    if (ok) {
        clear_table();
        init_staging();
    }
    return ok;
}

lctx_layer lctx_device_store::layer(ggml_context * ctx, const lctx_layer_heads & heads) const {
    // heads of the layer in a tensor [*, *, heads, n_seq]
    const auto rows = [&](ggml_tensor * t, int64_t first, int64_t n) {
        return t ? ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n, t->ne[3], t->nb[1], t->nb[2], t->nb[3], first * t->nb[2])
                 : nullptr;
    };
    // the same in a tensor [*, heads, n_seq]
    const auto lists = [&](ggml_tensor * t) {
        return t ? ggml_view_3d(ctx, t, t->ne[0], heads.n, t->ne[2], t->nb[1], t->nb[2], heads.first * t->nb[1])
                 : nullptr;
    };
    // the second dimension [first, first + n) of a tensor with two
    const auto each = [&](ggml_tensor * t, int64_t first, int64_t n) {
        return t ? ggml_view_2d(ctx, t, t->ne[0], n, t->nb[1], first * t->nb[1]) : nullptr;
    };
    // the staged units of the heads
    const auto units = [&](ggml_tensor * t) {
        const int64_t n_row = t ? (int64_t)shape_.n_staged << shape_.unit_shift() : 0;
        return each(t, heads.first * n_row, heads.n * n_row);
    };
    const bool by_query = shape_.chunks && shape_.chunks->by_attention();
    return {k_pool,
            v_pool,
            lists(table),
            index,
            rows(near, heads.first, heads.n),
            rows(summaries, by_query ? heads.first_query : heads.first, by_query ? heads.n_query : heads.n),
            rows(open, heads.first_query, heads.n_query),
            lists(held),
            units(k_staged),
            units(v_staged),
            each(staging, heads.first, heads.n),
            lists(staging_table),
            each(k_transit, 0, heads.n * shape_.n_row_head()),
            each(v_transit, 0, heads.n * shape_.n_row_head()),
            shape_.hadamard};
}
