#include "ops.h"

#include "fixed.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <set>

namespace {

template <typename T> void set_params(ggml_tensor * node, const T & params) {
    static_assert(sizeof(T) <= GGML_MAX_OP_PARAMS, "op_params is full");
    memcpy(node->op_params, &params, sizeof(params));
}

void set_sources(ggml_tensor * node, std::initializer_list<ggml_tensor *> src) {
    node->op = GGML_OP_LCTX;
    int i = 0;
    for (ggml_tensor * s : src) {
        node->src[i++] = s;
    }
}

bool fits(const lctx_hadamard & hadamard, int64_t head_dim_k, int64_t head_dim_v) {
    return lctx_hadamard::fits(hadamard.k, head_dim_k) && lctx_hadamard::fits(hadamard.v, head_dim_v);
}

bool is_index(const ggml_tensor * index, int32_t bits, int64_t head_dim) {
    return index->type == GGML_TYPE_I8 && index->ne[0] == lctx_index_shape{bits, (int32_t)head_dim}.row_size();
}

lctx_tiles tiles_of(const lctx_select_params & p) {
    return {p.n_tile, p.chunks.tile, p.chunks.n_given(), p.chunks.n_shared};
}

lctx_op op_of(const ggml_tensor * node) {
    GGML_ASSERT(node->op == GGML_OP_LCTX);
    return (lctx_op)node->op_params[0];
}

// Change the parameters of a node: f(T &).
template <typename T, typename F> void change_params(ggml_tensor * node, F && f) {
    T params;
    memcpy(&params, node->op_params, sizeof(params));
    f(params);
    set_params(node, params);
}

bool is_held(const ggml_tensor * held, const ggml_tensor * table) {
    return !held || (held->type == GGML_TYPE_I32 && held->nb[0] == sizeof(int32_t) && held->ne[1] == table->ne[1]);
}

}  // namespace

bool lctx_is_kv_type(int32_t type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_IQ4_NL: return true;
        default:               return false;
    }
}

std::vector<int32_t> lctx_chunks_read(const ggml_tensor * selected, const int32_t * data, int32_t token, int32_t head) {
    lctx_select_params params;
    memcpy(&params, selected->op_params, sizeof(params));
    const int64_t n_head = selected->src[0]->ne[1], n_choice = selected->ne[2];
    const lctx_choices choices = {data,
                                  (int32_t)selected->src[0]->ne[2],
                                  (int32_t)n_choice,
                                  (int32_t)selected->ne[1],
                                  (int32_t)selected->src[5]->ne[1],
                                  tiles_of(params)};
    const int32_t n_run = params.chunks.n_whole(), size = params.chunks.chunk_size;
    std::set<int32_t> chunks;
    for (int32_t i = 0; i < choices.n_expanded(n_run); i++) {
        const lctx_segment s = lctx_expanded(choices, n_run, size, token, (int32_t)(head * n_choice / n_head), i);
        for (int32_t row = s.row0 / size * size; row < s.row1 && s.row0 < s.row1; row += size) {
            chunks.insert(row / size);
        }
    }
    return {chunks.begin(), chunks.end()};
}

// K in the largest blocks that there are; V in blocks of 64, which are enough and leave sums of values more exact.
lctx_hadamard lctx_hadamard_of(ggml_type type_k, int32_t head_dim_k, ggml_type type_v, int32_t head_dim_v,
                               int32_t v_offset) {
    constexpr int32_t MOST_V = 64;
    const char * disable = getenv("LLAMA_ATTN_ROT_DISABLE");
    const auto block = [&](ggml_type type, int32_t n) {
        const int32_t most = n & -n;  // the largest power of two that divides n
        return (uint16_t)(ggml_is_quantized(type) && most >= lctx_hadamard::LEAST ? most : 0);
    };
    if (disable && atoi(disable)) {
        return {0, 0};
    }
    if (v_offset >= 0) {  // V is channels of K: their blocks have to end where V does
        const uint16_t both = block(type_k, head_dim_k | head_dim_v | v_offset);
        return {both, both};
    }
    return {block(type_k, head_dim_k), (uint16_t)std::min<int32_t>(MOST_V, block(type_v, head_dim_v))};
}

ggml_tensor * lctx_angles(ggml_context * ctx, ggml_tensor * pos, ggml_tensor * freq_factors, const lctx_rope & rope) {
    GGML_ASSERT(pos->type == GGML_TYPE_I32 && ggml_is_vector(pos));
    GGML_ASSERT(rope.n_dims > 0 && rope.n_dims % 2 == 0);
    GGML_ASSERT(!freq_factors || (freq_factors->type == GGML_TYPE_F32 && freq_factors->ne[0] >= rope.n_dims / 2));

    ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, rope.n_dims, pos->ne[0]);
    set_params(result, lctx_angles_params{LCTX_OP_ANGLES, rope});
    set_sources(result, {pos, freq_factors});
    return result;
}

ggml_tensor * lctx_store(ggml_context * ctx, ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_pool,
                         ggml_tensor * v_pool, ggml_tensor * table, ggml_tensor * rows, ggml_tensor * angles,
                         ggml_tensor * near, ggml_tensor * held, ggml_tensor * center, int32_t rope_mode,
                         lctx_score score, lctx_hadamard hadamard, int32_t staged_chunk) {
    GGML_ASSERT(k->type == GGML_TYPE_F32 && k->nb[0] == sizeof(float) && k->ne[0] == k_pool->ne[0]);
    GGML_ASSERT(v->type == GGML_TYPE_F32 && v->nb[0] == sizeof(float) && v->ne[0] == v_pool->ne[0]);
    GGML_ASSERT(k->ne[1] == v->ne[1] && k->ne[2] == v->ne[2] && k->ne[1] == table->ne[1]);
    GGML_ASSERT(rows->type == GGML_TYPE_I32 && rows->ne[0] == 4 && rows->ne[1] == k->ne[2] && ggml_is_contiguous(rows));
    GGML_ASSERT(angles->ne[0] <= k->ne[0] && table->type == GGML_TYPE_I32);
    GGML_ASSERT(!near || (near->type == k_pool->type && near->ne[0] == k->ne[0] && near->ne[1] % LCTX_PAGE_ROWS == 0));
    GGML_ASSERT(is_held(held, table) && fits(hadamard, k->ne[0], v->ne[0]));
    GGML_ASSERT(!center ||
                (!near && center->type == GGML_TYPE_F32 && center->ne[0] == k->ne[0] && center->ne[1] == k->ne[1]));

    ggml_tensor * result = ggml_view_tensor(ctx, k_pool);
    set_params(result, lctx_store_params{LCTX_OP_STORE, rope_mode, score, staged_chunk, hadamard, 0});
    set_sources(result, {k, v, k_pool, v_pool, table, rows, angles, near, held, center});
    return result;
}

ggml_tensor * lctx_index(ggml_context * ctx, ggml_tensor * k, ggml_tensor * table, ggml_tensor * rows,
                         ggml_tensor * held, ggml_tensor * index, int32_t bits, int32_t hadamard_k) {
    GGML_ASSERT(is_index(index, bits, k->ne[0]) && index->ne[1] == k->ne[1] && table->type == GGML_TYPE_I32);
    GGML_ASSERT(rows->type == GGML_TYPE_I32 && rows->ne[0] == 4 && ggml_is_contiguous(rows));
    GGML_ASSERT(is_held(held, table) && lctx_hadamard::fits(hadamard_k, k->ne[0]));

    ggml_tensor * result = ggml_view_tensor(ctx, index);
    set_params(result, lctx_index_params{LCTX_OP_INDEX, bits, hadamard_k, 0});
    set_sources(result, {k, table, rows, held, index});
    return result;
}

void lctx_leave_rows(ggml_tensor * from, ggml_tensor * to) {
    const lctx_op op = op_of(to);
    ggml_tensor * store = op == LCTX_OP_SELECT ? from->src[0] : from;
    GGML_ASSERT(op_of(store) == LCTX_OP_STORE && (op == LCTX_OP_INDEX || store->src[0]->ne[2] == 1));
    if (op == LCTX_OP_SELECT) {
        change_params<lctx_index_params>(from, [](lctx_index_params & p) { p.left = 1; });
    } else {
        change_params<lctx_store_params>(store, [](lctx_store_params & p) { p.left = 1; });
    }
    if (op == LCTX_OP_ATTEND) {
        change_params<lctx_attend_params>(to, [](lctx_attend_params & p) { p.writes = 1; });
    }
    const int at = op == LCTX_OP_INDEX ? 5 : LCTX_ATTEND_HELD + 1;  // after its own sources
    GGML_ASSERT(!to->src[at] && !to->src[at + 1]);
    std::copy_n(store->src, 2, to->src + at);  // so that K and V are not overwritten before
}

ggml_tensor * lctx_attend(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v_pool,
                          ggml_tensor * table, ggml_tensor * segs, ggml_tensor * angles, ggml_tensor * near,
                          ggml_tensor * held, const lctx_attend_params & params, ggml_tensor * k_staged,
                          ggml_tensor * v_staged) {
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[0] == k->ne[0]);
    GGML_ASSERT(q->ne[1] % table->ne[1] == 0 && q->ne[3] == 1);
    GGML_ASSERT(segs->type == GGML_TYPE_I32 && segs->ne[0] == 4 && ggml_is_contiguous(segs));
    GGML_ASSERT(params.chunk_size == 0
                    ? segs->ne[2] == q->ne[2]
                    : q->ne[1] % segs->ne[2] == 0 && segs->ne[3] >= params.tiles.n_alone((int32_t)q->ne[2]));
    GGML_ASSERT(params.near_mask == 0 || near);
    GGML_ASSERT(is_held(held, table));
    GGML_ASSERT(!k_staged || (v_staged && !held && params.chunk_size > 0));
    GGML_ASSERT(fits(params.hadamard, q->ne[0], v_pool->ne[0]));

    const int64_t n_query = q->ne[1] * q->ne[2];
    ggml_tensor * result = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_query * (v_pool->ne[0] + (params.lse ? 1 : 0)));
    lctx_attend_params with_op = params;
    with_op.op = LCTX_OP_ATTEND;
    set_params(result, with_op);
    set_sources(result, {q, k, v_pool, table, segs, angles, near, held, k_staged, v_staged});
    return result;
}

ggml_tensor * lctx_summarize(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v_pool,
                             ggml_tensor * table, ggml_tensor * rows, ggml_tensor * angles, ggml_tensor * held,
                             ggml_tensor * summaries, ggml_tensor * open, const lctx_summarize_params & params) {
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[0] == k->ne[0]);
    GGML_ASSERT(rows->type == GGML_TYPE_I32 && rows->ne[0] == 4 && rows->ne[1] == q->ne[2] && ggml_is_contiguous(rows));
    const bool by_attention = params.representation == LCTX_REPRESENT_ATTENTION;
    GGML_ASSERT(summaries->type == lctx_summary_type(params.representation, (int32_t)q->ne[0], k->type) &&
                summaries->nb[1] == ggml_row_size(summaries->type, summaries->ne[0]));
    GGML_ASSERT(summaries->ne[0] == lctx_summary_kind_of(params.representation).n_vector * q->ne[0] &&
                summaries->ne[2] == (by_attention ? q->ne[1] : table->ne[1]));
    GGML_ASSERT(!by_attention || v_pool->ne[0] == q->ne[0]);
    GGML_ASSERT(!by_attention ||
                (open && open->type == GGML_TYPE_F32 && open->ne[0] == q->ne[0] && open->ne[2] == q->ne[1]));
    GGML_ASSERT(is_held(held, table) && fits(params.hadamard, q->ne[0], v_pool->ne[0]));

    ggml_tensor * result = ggml_view_tensor(ctx, summaries);
    lctx_summarize_params with_op = params;
    with_op.op = LCTX_OP_SUMMARIZE;
    set_params(result, with_op);
    set_sources(result, {q, k, v_pool, table, rows, angles, summaries, open, held});
    return result;
}

ggml_tensor * lctx_select(ggml_context * ctx, ggml_tensor * q, ggml_tensor * compared, ggml_tensor * rows,
                          ggml_tensor * segs, ggml_tensor * angles, ggml_tensor * table, ggml_tensor * held,
                          ggml_tensor * tiles, const lctx_chunks & chunks, float scale, int32_t rope_mode,
                          uint32_t near_mask) {
    const auto head_dim = (int32_t)q->ne[0];
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[1] % table->ne[1] == 0);
    GGML_ASSERT(chunks.by_keys() ? is_index(compared, chunks.key_bits(), head_dim)
                                 : compared->ne[0] == chunks.summary_dim(head_dim) &&
                                       compared->ne[2] == (chunks.by_attention() ? q->ne[1] : table->ne[1]));
    GGML_ASSERT(rows->type == GGML_TYPE_I32 && rows->ne[0] == 4 && rows->ne[1] == q->ne[2] && ggml_is_contiguous(rows));
    GGML_ASSERT(segs->type == GGML_TYPE_I32 && segs->ne[0] == 4 && segs->ne[1] == chunks.n_given() &&
                segs->ne[2] == q->ne[2] && ggml_is_contiguous(segs));
    GGML_ASSERT(angles->ne[0] <= q->ne[0] && is_held(held, table) && !(chunks.by_group && chunks.by_attention()));

    GGML_ASSERT(!tiles || (tiles->type == GGML_TYPE_I32 && chunks.by_keys() && chunks.has_tiles()));

    const int64_t n_choice = chunks.by_group ? table->ne[1] : q->ne[1], unit = 4 * chunks.n_segment() * n_choice;
    const lctx_select_params params = {LCTX_OP_SELECT, scale, rope_mode, chunks, tiles ? (int32_t)tiles->ne[0] : 0,
                                       near_mask};
    const lctx_tiles shared = tiles_of(params);
    const int64_t n_unit = shared.n_alone((int32_t)q->ne[2]) + (shared.n_int((int32_t)table->ne[1]) + unit - 1) / unit;
    ggml_tensor * result = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 4, chunks.n_segment(), n_choice, n_unit);
    set_params(result, params);
    set_sources(result, {q, compared, rows, segs, angles, table, held, tiles});
    return result;
}

lctx_tiles lctx_tiles_of(const ggml_tensor * selected) {
    lctx_select_params params;
    memcpy(&params, selected->op_params, sizeof(params));
    return tiles_of(params);
}

ggml_tensor * lctx_vote(ggml_context * ctx, ggml_tensor * attended, ggml_tensor * voters, const lctx_retain & retain) {
    lctx_attend_params attend;
    memcpy(&attend, attended->op_params, sizeof(attend));
    const ggml_tensor * q = attended->src[0];
    ggml_tensor * held = attended->src[LCTX_ATTEND_HELD];
    GGML_ASSERT(attended->op == GGML_OP_LCTX && attend.op == LCTX_OP_ATTEND && attend.lse && held);
    GGML_ASSERT(voters->type == GGML_TYPE_I32 && voters->ne[0] == 4 && voters->ne[1] == q->ne[2] &&
                ggml_is_contiguous(voters));

    ggml_tensor * result = ggml_view_tensor(ctx, held);
    set_params(result, lctx_vote_params{LCTX_OP_VOTE, retain});
    set_sources(result, {});
    std::copy_n(attended->src, LCTX_ATTEND_HELD + 1, result->src);
    result->src[LCTX_ATTEND_HELD + 1] = attended;
    result->src[LCTX_ATTEND_HELD + 2] = voters;
    return result;
}

ggml_tensor * lctx_evict(ggml_context * ctx, ggml_tensor * k_pool, ggml_tensor * v_pool, ggml_tensor * table,
                         ggml_tensor * held, ggml_tensor * due, ggml_tensor * budgets, ggml_tensor * summaries,
                         ggml_tensor * index, const lctx_retain & retain, int32_t chunk_size, int32_t index_bits) {
    GGML_ASSERT(held && is_held(held, table) && table->type == GGML_TYPE_I32);
    GGML_ASSERT(due->type == GGML_TYPE_I32 && due->ne[0] == table->ne[2]);
    GGML_ASSERT(!budgets ||
                (budgets->type == GGML_TYPE_I32 && budgets->ne[0] == table->ne[1] && budgets->ne[1] == table->ne[2]));
    GGML_ASSERT(!summaries || (chunk_size > 0 && summaries->ne[2] % table->ne[1] == 0));

    ggml_tensor * result = ggml_view_tensor(ctx, held);
    set_params(result, lctx_evict_params{LCTX_OP_EVICT, retain, chunk_size, index ? index_bits : 0});
    set_sources(result, {k_pool, v_pool, table, held, due, summaries, budgets, index});
    return result;
}

ggml_tensor * lctx_fetch(ggml_context * ctx, ggml_tensor * segs, ggml_tensor * k, ggml_tensor * v_pool,
                         ggml_tensor * table, ggml_tensor * k_staged, ggml_tensor * v_staged, ggml_tensor * staging,
                         ggml_tensor * staging_table, ggml_tensor * k_transit, ggml_tensor * v_transit,
                         int32_t chunk_size, int32_t n_run, const lctx_tiles & tiles, int32_t n_tokens) {
    const int32_t shift = lctx_unit_shift(chunk_size), of_page = LCTX_PAGE_ROWS >> shift;
    const int64_t n_staged = (k_staged->ne[1] >> shift) / table->ne[1];
    GGML_ASSERT(segs->type == GGML_TYPE_I32 && segs->ne[0] == 4 && segs->ne[2] % table->ne[1] == 0 &&
                ggml_is_contiguous(segs));
    GGML_ASSERT(k_staged->type == k->type && k_staged->ne[0] == k->ne[0] && n_staged > 0 && n_staged % of_page == 0);
    GGML_ASSERT(v_staged->type == v_pool->type && v_staged->ne[0] == v_pool->ne[0] &&
                v_staged->ne[1] == k_staged->ne[1]);
    GGML_ASSERT(staging->type == GGML_TYPE_I32 &&
                staging->ne[0] == lctx_staging::size((int32_t)n_staged, of_page * table->ne[0] * table->ne[2]) &&
                staging->ne[1] == table->ne[1]);
    GGML_ASSERT(staging_table->type == GGML_TYPE_I32 && staging_table->ne[0] == of_page * table->ne[0] &&
                staging_table->ne[1] == table->ne[1] && staging_table->ne[2] == table->ne[2]);
    GGML_ASSERT(chunk_size % 16 == 0);  // units are copied 16 bytes at a time

    ggml_tensor * result = ggml_view_tensor(ctx, staging_table);
    set_params(result, lctx_fetch_params{LCTX_OP_FETCH, (int32_t)n_staged, chunk_size, n_run, tiles, n_tokens});
    set_sources(result, {segs, k, v_pool, table, k_staged, v_staged, staging, staging_table, k_transit, v_transit});
    return result;
}

void lctx_fix_products(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) {
            node->op_params[LCTX_FIXED_AT] = LCTX_FIXED_MARK;
        }
    }
}
