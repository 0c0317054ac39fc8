// Counts what is held, and what may be.
#include "blocks.h"

#include <algorithm>
#include <utility>

std::string lctx_blocks::check_limit(int64_t n_page, const std::vector<int32_t> & n_pos) const {
    const uint64_t wanted = kv_limit_ ? bytes(n_page, n_pos) : 0;
    if (wanted <= kv_limit_) {
        return "";
    }
    return "kv_limit reached: " + std::to_string(wanted) + " bytes are needed, kv_limit is " +
           std::to_string(kv_limit_) +
           "; raise it, evict more (a smaller window or budget), use a smaller type_k and type_v, or remove tokens";
}

// Bytes that are held with n_page pages and sequences of these lengths.
uint64_t lctx_blocks::bytes(int64_t n_page, const std::vector<int32_t> & n_pos) const {
    const lctx_kv_shape & shape = placement_.shape();
    uint64_t n = n_page * LCTX_PAGE_ROWS * (shape.row_bytes() + shape.index_bytes());
    for (const auto & store : placement_.stores()) {
        for (const lctx_plane & plane : store->planes()) {
            n += plane.entry_size * store->n_entry(plane, n_pos);
        }
    }
    return n;
}

// Rows that a head of a sequence holds at most; with corm, whose heads decide for themselves, at least.
int32_t lctx_blocks::most_cells() const {
    const lctx_retain * retain = placement_.retain();
    const lctx_kv_sizes & sizes = placement_.sizes();
    if (!retain) {
        return sizes.n_ctx;
    }
    // what comes before it can be judged
    const int64_t judged = retain->budget > 0 ? (int64_t)retain->budget + sizes.n_batch : retain->recent;
    return (int32_t)std::min<int64_t>(sizes.n_ctx, judged + retain->evict_every);
}

void lctx_blocks::each_size(const std::function<void(ggml_backend_dev_t, const lctx_sizes &)> & f) const {
    uint64_t total = 0;
    for (const auto & store : placement_.stores()) {
        const lctx_sizes s = store->sizes(most_cells());
        total += s.k + s.v + s.chunks + s.near;
    }
    const double fraction = kv_limit_ > 0 && total > kv_limit_ ? (double)kv_limit_ / (double)total : 1.0;
    for (const auto & store : placement_.stores()) {
        lctx_sizes near = store->sizes(most_cells()), far = {};
        near.other += placement_.centers().bytes(*store);
        if (lctx_arena_grain(store->buft) > 0) {  // where less is taken than there could be
            for (uint64_t * size : {&near.k, &near.v, &near.chunks, &near.near}) {
                *size = (uint64_t)(fraction * (double)*size);
            }
        }
        if (placement_.shape().n_staged > 0) {
            far.k = near.k, far.v = near.v;
            near.k = ggml_nbytes(store->k_staged), near.v = ggml_nbytes(store->v_staged);
            if (store->k_transit) {
                far.disk = std::exchange(far.k, 0) + std::exchange(far.v, 0);
                near.k += ggml_nbytes(store->k_transit), near.v += ggml_nbytes(store->v_transit);
            }
            near.other -= near.k + near.v;
        }
        f(store->dev, near);
        f(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), far);
    }
}

void lctx_blocks::note_peak() {
    peak_bytes_ = std::max(peak_bytes_, bytes(n_held_page(), seqs_.lengths()));
}

void lctx_blocks::usage(lctx_kv_info & info, int32_t * rows) const {
    const std::vector<lctx_stored_layer> & layers = placement_.layers();
    const std::vector<int32_t> n_pos = seqs_.lengths();
    info.bytes = bytes(n_held_page(), n_pos);
    info.peak_bytes = peak_bytes_;
    info.mapped_bytes = 0;
    for (const auto & store : placement_.stores()) {
        info.mapped_bytes += store->committed();
    }
    info.full_bytes = 0;
    for (int32_t n : n_pos) {
        info.full_bytes += (uint64_t)n * placement_.n_head() * placement_.shape().row_bytes();
    }
    info.n_layer = (int32_t)layers.size();
    info.n_head_kv = 0;
    for (const lctx_stored_layer & layer : layers) {
        info.n_head_kv = std::max(info.n_head_kv, layer.heads.n);
    }
    if (!rows) {
        return;
    }
    std::fill_n(rows, (size_t)info.n_layer * info.n_head_kv, 0);
    for (int32_t i = 0; i < info.n_layer * info.n_head_kv; i++) {
        const lctx_stored_layer & layer = layers[i / info.n_head_kv];
        const int32_t head = i % info.n_head_kv;
        for (int32_t seq = 0; head < layer.heads.n && seq < seqs_.size(); seq++) {
            rows[i] += layer.store->n_cell(seq, layer.heads.first + head, n_pos[seq]) - n_dead(seq) * LCTX_PAGE_ROWS;
        }
    }
}
