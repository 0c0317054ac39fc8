// From ggml nodes to the arguments of the kernels.
#pragma once

#include "args.h"

#include <cstring>

template <typename T> T lctx_params_of(const ggml_tensor * node) {
    T params;
    memcpy(&params, node->op_params, sizeof(params));
    return params;
}

inline lctx_pool_args lctx_pool_of(const ggml_tensor * pool) {
    return {(char *)pool->data, pool->type, pool->nb[1]};
}

// The file that has the rows of a pool (memory/device-tensors.cpp), or nullptr.
inline lctx_row_file * lctx_file_of(const ggml_tensor * pool) {
    return (lctx_row_file *)(pool->view_src ? pool->view_src : pool)->extra;
}

// The rows of `staging`, then those of `pool`.
inline lctx_pool_args lctx_staged_pool_of(const ggml_tensor * staging, const ggml_tensor * pool) {
    lctx_pool_args args = lctx_pool_of(staging);
    args.n_row = (size_t)staging->ne[1];
    args.far = (char *)pool->data - args.n_row * args.row_size;
    return args;
}

inline lctx_table_args lctx_table_of(const ggml_tensor * table) {
    return {(const int32_t *)table->data, table->nb[1] / sizeof(int32_t), table->nb[2] / sizeof(int32_t)};
}

inline lctx_near_args lctx_near_of(const ggml_tensor * near) {
    return near ? lctx_near_args{(char *)near->data, near->nb[2], near->nb[3], near->ne[1]} : lctx_near_args{};
}

inline lctx_held_args lctx_held_of(const ggml_tensor * held) {
    if (!held) {
        return {};
    }
    // the view of a layer says which heads are its own: what it has of each is in two tensors
    const ggml_tensor * all = held->view_src ? held->view_src : held;
    const size_t first = ((const char *)held->data - (const char *)all->data) / held->nb[1];
    return {(int32_t *)all->data, all->ne[1] * all->ne[2], (int32_t)all->ne[1], (int32_t)first,
            (int32_t)((held->ne[0] - lctx_held::HEADER) / lctx_held::PLANES)};
}

inline lctx_angles_args lctx_angles_args_of(ggml_tensor * dst) {
    const ggml_tensor * factors = dst->src[1];
    return {(const int32_t *)dst->src[0]->data, factors ? (const float *)factors->data : nullptr, (float *)dst->data,
            dst->ne[1], lctx_params_of<lctx_angles_params>(dst).rope};
}

inline lctx_store_args lctx_store_args_of(const ggml_tensor * dst) {
    const ggml_tensor * k = dst->src[0];
    const ggml_tensor * v = dst->src[1];
    lctx_store_args args;
    args.k = (const char *)k->data;
    args.v = (const char *)v->data;
    args.k_head_stride = k->nb[1];
    args.k_token_stride = k->nb[2];
    args.v_head_stride = v->nb[1];
    args.v_token_stride = v->nb[2];
    args.head_dim_k = (int32_t)k->ne[0];
    args.head_dim_v = (int32_t)v->ne[0];
    args.n_head_kv = (int32_t)k->ne[1];
    args.n_tokens = (int32_t)k->ne[2];
    args.cache.k_pool = lctx_pool_of(dst->src[2]);
    args.cache.v_pool = lctx_pool_of(dst->src[3]);
    args.cache.table = lctx_table_of(dst->src[4]);
    args.rows = (const lctx_row *)dst->src[5]->data;
    args.angles = (const float *)dst->src[6]->data;
    args.n_dims = (int32_t)dst->src[6]->ne[0];
    args.cache.near = lctx_near_of(dst->src[7]);
    args.cache.held = lctx_held_of(dst->src[8]);
    args.center = dst->src[9] ? (const float *)dst->src[9]->data : nullptr;
    args.params = lctx_params_of<lctx_store_params>(dst);
    args.file = lctx_file_of(dst->src[2]);
    args.cache.k_pool.n_row = (size_t)dst->src[2]->ne[1];
    if (args.params.staged_chunk > 0) {
        args.cache.table.shift = lctx_unit_shift(args.params.staged_chunk);
    }
    return args;
}

inline lctx_index_args lctx_index_args_of(const ggml_tensor * dst) {
    const auto params = lctx_params_of<lctx_index_params>(dst);
    lctx_index_args args = {};
    args.cache.k_pool = lctx_pool_of(dst->src[0]);
    args.cache.table = lctx_table_of(dst->src[1]);
    args.rows = (const lctx_row *)dst->src[2]->data;
    args.cache.held = lctx_held_of(dst->src[3]);
    args.cache.index = lctx_pool_of(dst->src[4]);
    args.n_rows = (int32_t)dst->src[2]->ne[1];
    args.n_head_kv = (int32_t)dst->src[1]->ne[1];
    args.hadamard_k = params.hadamard_k;
    args.index = {params.bits, (int32_t)dst->src[0]->ne[0]};
    args.file = lctx_file_of(dst->src[0]);
    return args;
}

inline lctx_attend_args lctx_attend_args_of(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    lctx_attend_args args;
    args.q = (const char *)q->data;
    args.q_head_stride = q->nb[1];
    args.q_token_stride = q->nb[2];
    args.cache.k_pool = lctx_pool_of(dst->src[1]);
    args.cache.v_pool = lctx_pool_of(dst->src[2]);
    args.cache.table = lctx_table_of(dst->src[3]);
    args.segs = (const lctx_segment *)dst->src[4]->data;
    args.n_seg = (int32_t)dst->src[4]->ne[1];
    args.angles = (const float *)dst->src[5]->data;
    args.n_dims = (int32_t)dst->src[5]->ne[0];
    args.cache.near = lctx_near_of(dst->src[6]);
    args.cache.held = lctx_held_of(dst->src[LCTX_ATTEND_HELD]);
    args.head_dim_k = (int32_t)q->ne[0];
    args.head_dim_v = (int32_t)dst->src[2]->ne[0];
    args.n_head = (int32_t)q->ne[1];
    args.n_head_kv = (int32_t)dst->src[3]->ne[1];
    args.n_tokens = (int32_t)q->ne[2];
    args.params = lctx_params_of<lctx_attend_params>(dst);
    if (dst->src[LCTX_ATTEND_HELD + 1] && args.params.op == LCTX_OP_ATTEND && !args.params.writes) {
        args.cache.k_pool = lctx_staged_pool_of(dst->src[LCTX_ATTEND_HELD + 1], dst->src[1]);
        args.cache.v_pool = lctx_staged_pool_of(dst->src[LCTX_ATTEND_HELD + 2], dst->src[2]);
        args.cache.table.shift = lctx_unit_shift(args.params.chunk_size);
    }
    args.n_angle = (int32_t)(dst->src[5]->ne[1] / q->ne[2]);
    args.n_choice = args.params.chunk_size > 0 ? (int32_t)dst->src[4]->ne[2] : 1;
    args.dst = (float *)dst->data;
    args.lse = args.params.lse ? args.dst + (size_t)args.n_tokens * args.n_head * args.head_dim_v : nullptr;
    return args;
}

inline lctx_summarize_args lctx_summarize_args_of(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * summaries = dst->src[6];
    const ggml_tensor * open = dst->src[7];
    lctx_summarize_args args = {};
    args.q = (const char *)q->data;
    args.q_head_stride = q->nb[1];
    args.q_token_stride = q->nb[2];
    args.head_dim_k = (int32_t)q->ne[0];
    args.head_dim_v = (int32_t)dst->src[2]->ne[0];
    args.n_head = (int32_t)q->ne[1];
    args.n_head_kv = (int32_t)dst->src[3]->ne[1];
    args.n_tokens = (int32_t)q->ne[2];
    args.cache.k_pool = lctx_pool_of(dst->src[1]);
    args.cache.v_pool = lctx_pool_of(dst->src[2]);
    args.cache.table = lctx_table_of(dst->src[3]);
    args.rows = (const lctx_chunk_row *)dst->src[4]->data;
    args.angles = (const float *)dst->src[5]->data;
    args.n_dims = (int32_t)dst->src[5]->ne[0];
    args.cache.near = {};
    args.cache.held = lctx_held_of(dst->src[8]);
    args.summary_type = summaries->type;
    args.summaries = (char *)summaries->data;
    args.summary_stride = summaries->nb[1];
    args.summary_head_stride = summaries->nb[2];
    args.summary_seq_stride = summaries->nb[3];
    if (open) {
        args.open = (char *)open->data;
        args.open_stride = open->nb[1];
        args.open_head_stride = open->nb[2];
        args.open_seq_stride = open->nb[3];
    }
    args.params = lctx_params_of<lctx_summarize_params>(dst);
    return args;
}

inline lctx_select_args lctx_select_args_of(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * compared = dst->src[1];
    const ggml_tensor * table = dst->src[5];
    const auto params = lctx_params_of<lctx_select_params>(dst);
    lctx_select_args args = {};
    args.chunks = params.chunks;
    args.q = (const char *)q->data;
    args.q_head_stride = q->nb[1];
    args.q_token_stride = q->nb[2];
    args.head_dim = (int32_t)q->ne[0];
    args.n_head = (int32_t)q->ne[1];
    args.n_list = (int32_t)(params.chunks.by_attention() ? q->ne[1] : table->ne[1]);
    args.n_choice = (int32_t)dst->ne[2];
    args.n_tokens = (int32_t)q->ne[2];
    args.cache.table = lctx_table_of(table);
    args.cache.held = lctx_held_of(dst->src[6]);
    if (params.chunks.by_keys()) {
        args.cache.index = lctx_pool_of(compared);
        args.n_chunk_max = (int32_t)(table->ne[0] * LCTX_PAGE_ROWS / params.chunks.chunk_size);
        args.index = {params.chunks.key_bits(), args.head_dim};
    } else {
        args.n_chunk_max = (int32_t)compared->ne[1];
        args.summary_type = compared->type;
        args.summaries = (const char *)compared->data;
        args.summary_stride = compared->nb[1];
        args.summary_head_stride = compared->nb[2];
        args.summary_seq_stride = compared->nb[3];
    }
    args.rows = (const lctx_row *)dst->src[2]->data;
    args.segs = (const lctx_segment *)dst->src[3]->data;
    args.angles = (const float *)dst->src[4]->data;
    args.n_dims = (int32_t)dst->src[4]->ne[0];
    args.rope_mode = params.rope_mode;
    args.scale = params.scale;
    args.tiles = params.n_tile > 0 ? (const int32_t *)dst->src[7]->data : nullptr;
    args.n_tile = params.n_tile;
    args.near_mask = params.near_mask;
    args.dst = (lctx_segment *)dst->data;
    return args;
}

inline lctx_vote_args lctx_vote_args_of(const ggml_tensor * dst) {
    const ggml_tensor * attended = dst->src[LCTX_ATTEND_HELD + 1];
    lctx_vote_args args;
    args.attend = lctx_attend_args_of(attended);
    args.voters = (const lctx_voter *)dst->src[LCTX_ATTEND_HELD + 2]->data;
    args.retain = lctx_params_of<lctx_vote_params>(dst).retain;
    return args;
}

inline lctx_evict_args lctx_evict_args_of(const ggml_tensor * dst) {
    const ggml_tensor * table = dst->src[2];
    const ggml_tensor * summaries = dst->src[5];
    lctx_evict_args args = {};
    args.cache = {
        lctx_pool_of(dst->src[0]), lctx_pool_of(dst->src[1]), lctx_table_of(table), {}, lctx_held_of(dst->src[3])};
    args.n_head_kv = (int32_t)table->ne[1];
    args.n_seq = (int32_t)table->ne[2];
    args.due = (const int32_t *)dst->src[4]->data;
    if (const ggml_tensor * budgets = dst->src[6]) {
        args.budgets = (const int32_t *)budgets->data;
        args.budget_stride = budgets->nb[1] / sizeof(int32_t);
    }
    if (summaries) {
        args.summaries = (char *)summaries->data;
        args.n_summary = (int32_t)(summaries->ne[2] / table->ne[1]);
        args.summary_stride = summaries->nb[1];
        args.summary_head_stride = summaries->nb[2];
        args.summary_seq_stride = summaries->nb[3];
    }
    args.params = lctx_params_of<lctx_evict_params>(dst);
    if (const ggml_tensor * index = dst->src[7]) {
        args.cache.index = lctx_pool_of(index);
        args.index = {args.params.index_bits, (int32_t)dst->src[0]->ne[0]};
    }
    return args;
}

inline lctx_fetch_args lctx_fetch_args_of(const ggml_tensor * dst) {
    const ggml_tensor * segs = dst->src[0];
    const ggml_tensor * table = dst->src[3];
    lctx_fetch_args args = {};
    args.all = {lctx_pool_of(dst->src[1]), lctx_pool_of(dst->src[2]), lctx_table_of(table), {}, {}};
    args.k_staged = lctx_pool_of(dst->src[4]);
    args.v_staged = lctx_pool_of(dst->src[5]);
    args.staging = (int32_t *)dst->src[6]->data;
    args.staging_stride = dst->src[6]->nb[1] / sizeof(int32_t);
    args.table = (int32_t *)dst->data;
    args.head_stride = dst->nb[1] / sizeof(int32_t);
    args.seq_stride = dst->nb[2] / sizeof(int32_t);
    args.params = lctx_params_of<lctx_fetch_params>(dst);
    args.n_page_max = (int32_t)table->ne[0];
    args.n_head_kv = (int32_t)table->ne[1];
    args.n_seq = (int32_t)table->ne[2];
    args.segs = (const lctx_segment *)segs->data;
    args.n_seg = (int32_t)segs->ne[1];
    args.n_choice = (int32_t)segs->ne[2];
    args.n_tokens = args.params.n_tokens;
    args.file = lctx_file_of(dst->src[1]);
    if (dst->src[8]) {
        args.k_transit = lctx_pool_of(dst->src[8]);
        args.v_transit = lctx_pool_of(dst->src[9]);
        args.n_transit = (int32_t)((dst->src[8]->ne[1] >> args.shift()) / args.n_head_kv);
    }
    return args;
}
