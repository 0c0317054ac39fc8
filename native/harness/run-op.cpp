// lctx_op_run: store rows and attend once, through a ggml graph. For tests and bench.
#include "run.h"

#include "roofline.h"

namespace {

void check(const lctx_op_args & a) {
    lctx_check_shapes(a);
    lctx_require(a.k && a.v && a.q && a.k_pos && a.seg_rows && a.seg_pos && a.out, "an array is missing");
    lctx_require(a.n_seg > 0, "sizes must be positive");
    lctx_require(a.n_layer <= 1, "lctx_op_run has one layer: n_layer is for lctx_flash_run and lctx_step_run");
    lctx_require(a.near_rows % LCTX_PAGE_ROWS == 0 && (a.near_rows > 0 || a.near_mask == 0),
                 "near_rows must be a multiple of 64");
    lctx_require(a.near_rows == 0 || a.k_near_pos, "a near ring needs k_near_pos");
    for (int32_t i = 0; i < a.n_tokens * a.n_seg; i++) {
        lctx_require(
            0 <= a.seg_rows[2 * i] && a.seg_rows[2 * i] <= a.seg_rows[2 * i + 1] && a.seg_rows[2 * i + 1] <= a.n_rows,
            "a segment is outside the rows");
    }
}

void run(lctx_op_args & a) {
    check(a);
    lctx_graph_run g(lctx_backend_of(a.device, a.n_threads), 32 + 4 * (size_t)(a.n_rows / LCTX_PAGE_ROWS + 1));
    const lctx_rope rope = lctx_rope_of(a);
    const int32_t n_block = (a.n_rows + LCTX_PAGE_ROWS - 1) / LCTX_PAGE_ROWS;
    const int32_t n_near = a.near_rows > 0 ? a.n_rows : 0;
    const int32_t n_query_angle = a.n_tokens * a.n_seg;

    // inputs
    ggml_tensor * pos = g.tensor(GGML_TYPE_I32, a.n_rows + n_near + n_query_angle);
    ggml_tensor * factors = a.freq_factors ? g.tensor(GGML_TYPE_F32, a.rope_dims / 2) : nullptr;
    ggml_tensor * k = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv, a.n_rows);
    ggml_tensor * v = g.tensor(GGML_TYPE_F32, a.head_dim_v, a.n_head_kv, a.n_rows);
    ggml_tensor * q = g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head, a.n_tokens);
    ggml_tensor * k_pool = g.tensor((ggml_type)a.type_k, a.head_dim_k, (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS);
    ggml_tensor * v_pool = g.tensor((ggml_type)a.type_v, a.head_dim_v, (int64_t)n_block * a.n_head_kv * LCTX_PAGE_ROWS);
    ggml_tensor * near = n_near ? g.tensor((ggml_type)a.type_k, a.head_dim_k, a.near_rows, a.n_head_kv, 1) : nullptr;
    ggml_tensor * table = g.tensor(GGML_TYPE_I32, n_block, a.n_head_kv, 1);
    ggml_tensor * rows = g.tensor(GGML_TYPE_I32, 4, a.n_rows);
    ggml_tensor * segs = g.tensor(GGML_TYPE_I32, 4, a.n_seg, a.n_tokens);
    ggml_tensor * center = a.center ? g.tensor(GGML_TYPE_F32, a.head_dim_k, a.n_head_kv) : nullptr;

    // nodes
    ggml_context * ctx = g.ctx.get();
    lctx_attend_params params = {
        LCTX_OP_ATTEND,   a.rope_mode, a.scale, a.softcap,    (uint32_t)a.near_mask, a.lse != nullptr,
        (int16_t)a.fixed, 0,           0,       lctx_tiles{}, lctx_hadamard_of(a),   0};
    ggml_tensor * angles = lctx_angles(ctx, pos, factors, rope);
    std::vector<ggml_tensor *> stored;
    const int32_t n_step = n_near ? a.near_rows : a.n_rows;  // a store never meets a ring row twice
    for (int32_t r = 0; r < a.n_rows; r += n_step) {
        const int32_t n = std::min(n_step, a.n_rows - r);
        ggml_tensor * step_rows = ggml_view_2d(ctx, rows, 4, n, rows->nb[1], r * rows->nb[1]);
        stored.push_back(lctx_store(ctx, lctx_tokens_of(ctx, k, r, n), lctx_tokens_of(ctx, v, r, n), k_pool, v_pool,
                                    table, step_rows, angles, near, nullptr, center, a.rope_mode, LCTX_SCORE_LAST,
                                    lctx_hadamard_of(a)));
    }
    ggml_tensor * out = lctx_attend(ctx, q, stored.back(), v_pool, table, segs, angles, near, nullptr, params);
    g.allocate();

    // data
    if (center) {
        lctx_fill(center, a.center);
    }
    std::vector<int32_t> positions(a.k_pos, a.k_pos + a.n_rows);
    positions.insert(positions.end(), a.k_near_pos, a.k_near_pos + n_near);
    positions.insert(positions.end(), a.seg_pos, a.seg_pos + n_query_angle);
    std::vector<lctx_row> row(a.n_rows);
    for (int32_t i = 0; i < a.n_rows; i++) {
        row[i] = {i, 0, i, n_near ? a.n_rows + i : i};
    }
    std::vector<lctx_segment> seg(n_query_angle);
    for (int32_t i = 0; i < n_query_angle; i++) {
        seg[i] = {a.seg_rows[2 * i], a.seg_rows[2 * i + 1], a.n_rows + n_near + i, 0};
    }
    const std::vector<int32_t> pages = lctx_shuffled_pages(a, n_block);
    lctx_poison({k_pool, v_pool, near, out});
    lctx_fill(pos, positions.data()), lctx_fill(k, a.k), lctx_fill(v, a.v), lctx_fill(q, a.q);
    lctx_fill(table, pages.data()), lctx_fill(rows, row.data()), lctx_fill(segs, seg.data());
    if (factors) {
        lctx_fill(factors, a.freq_factors);
    }

    g.compute({angles});
    a.store_us = g.compute(stored);
    lctx_time_attend(a, g, {out});
    const size_t n_out = (size_t)a.n_tokens * a.n_head * a.head_dim_v;
    ggml_backend_tensor_get(out, a.out, 0, n_out * sizeof(float));
    if (a.lse) {
        ggml_backend_tensor_get(out, a.lse, n_out * sizeof(float), (size_t)a.n_tokens * a.n_head * sizeof(float));
    }
}

}  // namespace

int32_t lctx_op_run(lctx_op_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
