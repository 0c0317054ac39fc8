// Keeps what the heads of a store hold, and evicts: one graph on the device, whose only answer is how many rows are
// gone.
#include "device-store.h"

#include "ggml-cpu.h"

#include <algorithm>

size_t lctx_device_store::held_offset(int32_t seq, int32_t head, int32_t plane) const {
    const size_t index = (size_t)seq * n_head + head, n_header = (size_t)shape_.n_seq * n_head * lctx_held::HEADER;
    const size_t i =
        plane < 0 ? index * lctx_held::HEADER : n_header + (index * lctx_held::PLANES + plane) * shape_.n_ctx;
    return i * sizeof(int32_t);
}

std::vector<int32_t> lctx_device_store::headers(int32_t seq) {
    std::vector<int32_t> values((size_t)n_head * lctx_held::HEADER);
    read(held, held_offset(seq, 0, -1), values.data(), values.size() * sizeof(int32_t));
    return values;
}

void lctx_device_store::set_headers(int32_t seq, int32_t dense_from, int32_t undo_from) {
    if (!held) {
        return;
    }
    std::vector<int32_t> values((size_t)n_head * lctx_held::HEADER);
    for (int32_t head = 0; head < n_head; head++) {
        const lctx_held h = {&values[(size_t)head * lctx_held::HEADER], nullptr, 0};
        h.n_gone() = gone(seq, head);
        h.dense_from() = dense_from;
        h.undo_from() = undo_from;
    }
    write(held, held_offset(seq, 0, -1), values.data(), values.size() * sizeof(int32_t));
}

void lctx_device_store::forget_evictions(int32_t seq) {
    for (int32_t head = 0; head < n_head; head++) {
        gone(seq, head) = 0;
    }
    set_headers(seq, 0, -1);
}

void lctx_device_store::copy_headers(int32_t src, int32_t dst) {
    if (held) {
        copy(held, held_offset(src, 0, -1), held_offset(dst, 0, -1),
             (size_t)n_head * lctx_held::HEADER * sizeof(int32_t));
    }
}

void lctx_device_store::take_votes_back(int32_t seq, int32_t n_pos) {
    const std::vector<int32_t> values = headers(seq);
    for (int32_t head = 0; head < n_head; head++) {
        const lctx_held h = {const_cast<int32_t *>(&values[(size_t)head * lctx_held::HEADER]), nullptr, 0};
        if (h.undo_from() == n_pos) {
            copy(held, held_offset(seq, head, 2), held_offset(seq, head, 1),
                 n_cell(seq, head, n_pos) * sizeof(int32_t));
        }
    }
}

ggml_tensor * lctx_evict_layer(ggml_context * ctx, const lctx_layer & layer, ggml_tensor * due, ggml_tensor * budgets,
                               const lctx_retain & retain, const lctx_chunks * chunks) {
    return lctx_evict(ctx, layer.k_pool, layer.v_pool, layer.table, layer.held, due, budgets, layer.summaries,
                      layer.index, retain, chunks ? chunks->chunk_size : 0, layer.index ? chunks->key_bits() : 0);
}

// One node per layer, on tensors of this store only: it can run whenever nothing else does. The last one gathers the
// counts.
void lctx_device_store::prepare_eviction(int32_t n_threads) {
    const size_t n_node = layers_.size() + 1;
    evict_ctx_.reset(
        ggml_init({n_node * 8 * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_node, false), nullptr, true}));
    evict_graph_ = ggml_new_graph_custom(evict_ctx_.get(), n_node, false);
    for (const lctx_layer_heads & heads : layers_) {
        const lctx_layer l = layer(evict_ctx_.get(), heads);
        ggml_tensor * budgets = budgets_ ? ggml_view_2d(evict_ctx_.get(), budgets_, heads.n, shape_.n_seq,
                                                        budgets_->nb[1], heads.first * sizeof(int32_t))
                                         : nullptr;
        lctx_add_node(evict_graph_,
                      lctx_evict_layer(evict_ctx_.get(), l, due_, budgets, *shape_.retain, shape_.chunks));
    }
    constexpr size_t HEADER = lctx_held::HEADER * sizeof(int32_t);
    ggml_tensor * counted = ggml_view_3d(evict_ctx_.get(), held, 1, n_head, shape_.n_seq, HEADER, n_head * HEADER, 0);
    lctx_add_node(evict_graph_, ggml_cpy(evict_ctx_.get(), counted, counts_));
    if (is_host) {
        evictor_.reset(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(evictor_.get(), n_threads);
    }
}

bool lctx_device_store::evict(const std::vector<int32_t> & due, int32_t n_threads) {
    if (!evict_graph_) {
        prepare_eviction(n_threads);
    }
    wait();
    upload_table();
    ggml_backend_tensor_set(due_, due.data(), 0, ggml_nbytes(due_));
    if (budgets_) {
        ggml_backend_tensor_set(budgets_, budget_.data(), 0, ggml_nbytes(budgets_));
    }
    if (ggml_backend_graph_compute(is_host ? evictor_.get() : backend_, evict_graph_) != GGML_STATUS_SUCCESS) {
        return false;
    }
    std::vector<int32_t> counts((size_t)shape_.n_seq * n_head);
    ggml_backend_tensor_get(counts_, counts.data(), 0, ggml_nbytes(counts_));
    for (int32_t seq = 0; seq < shape_.n_seq; seq++) {
        for (int32_t head = 0; due[seq] >= 0 && head < n_head; head++) {
            const int32_t n_pos = due[seq] + 1, n_before = n_cell(seq, head, n_pos);
            gone(seq, head) = counts[(size_t)seq * n_head + head];
            shrink(seq, head, n_before, n_cell(seq, head, n_pos));
        }
    }
    return_pages();
    return true;
}

// Pages and cells after the rows that stayed are free.
void lctx_device_store::shrink(int32_t seq, int32_t head, int32_t n_before, int32_t n_left) {
    const auto whole = [&](int32_t n) { return std::min(lctx_kv_shape::n_block(n) * LCTX_PAGE_ROWS, shape_.n_ctx); };
    drop_pages(seq, head, lctx_kv_shape::n_block(n_left), lctx_kv_shape::n_block(n_before));
    for (const lctx_plane & plane : planes_) {
        if (plane.key == lctx_plane_key::cell && whole(n_left) < whole(n_before)) {
            give_back(held, plane.offset(seq, head, whole(n_left)), plane.offset(seq, head, whole(n_before)));
        }
    }
}
