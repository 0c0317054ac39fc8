// The planes of a store, and the memory that rows have in them.
#include "device-store.h"

#include <algorithm>

// A plane is a line here.
void lctx_device_store::list_planes() {
    using key = lctx_plane_key;
    using saved = lctx_plane_saved;
    using values = lctx_plane_values;
    const auto pages = [&](ggml_tensor * t, saved when, uint64_t lctx_sizes::*counted_as) {
        planes_.push_back(
            {t, t->nb[1], 0, 0, 0, key::page, false, n_head, 0, 1, false, when, values::finite, counted_as});
    };
    // a tensor [*, entries, heads, n_seq]
    const auto heads = [&](ggml_tensor * t, key of, bool by_query, int32_t rows_each, saved when, values are) {
        const auto n = (int32_t)t->ne[2], n_entry = (int32_t)t->ne[1];
        planes_.push_back({t, t->nb[1], 0, t->nb[2], t->nb[3], of, by_query, n, n_entry, rows_each, of == key::query,
                           when, are, of == key::ring ? &lctx_sizes::near : &lctx_sizes::chunks});
    };
    // one of the lists of cells
    const auto cells = [&](int32_t i, values are) {
        const size_t of_head = lctx_held::PLANES * shape_.n_ctx * sizeof(int32_t);
        planes_.push_back({held, sizeof(int32_t), held_offset(0, 0, i), of_head, n_head * of_head, key::cell, false,
                           n_head, shape_.n_ctx, 1, false, saved::in_states, are, &lctx_sizes::other});
    };
    const int32_t chunk_size = shape_.chunks ? shape_.chunks->chunk_size : 1;
    const bool by_query = shape_.chunks && shape_.chunks->by_attention();
    pages(k_pool, saved::in_slices, &lctx_sizes::k);
    if (shape_.v_offset < 0) {
        pages(v_pool, saved::in_slices, &lctx_sizes::v);
    }
    if (index) {
        pages(index, saved::never, &lctx_sizes::chunks);  // it is made again from K
    }
    if (near) {
        heads(near, key::ring, false, 1, saved::in_slices, values::finite);
    }
    if (held) {
        cells(0, values::rows), cells(1, values::scores), cells(2, values::undo);
    }
    if (summaries) {
        heads(summaries, key::chunk, by_query, chunk_size, saved::in_slices, values::any);
    }
    if (open) {
        heads(open, key::query, by_query, chunk_size, saved::in_states, values::any);
    }
}

std::vector<const lctx_plane *> lctx_device_store::row_planes() const {
    std::vector<const lctx_plane *> found;
    for (const lctx_plane & plane : planes_) {
        if (plane.key == lctx_plane_key::page && plane.saved != lctx_plane_saved::never) {
            found.push_back(&plane);
        }
    }
    return found;
}

uint64_t lctx_device_store::n_entry(const lctx_plane & plane, const std::vector<int32_t> & n_pos) const {
    uint64_t n = 0;
    for (int32_t seq = 0; seq < shape_.n_seq; seq++) {
        if (plane.key == lctx_plane_key::cell) {
            for (int32_t head = 0; head < n_head; head++) {
                n += plane.used(n_pos[seq], n_cell(seq, head, n_pos[seq]));
            }
        } else {
            n += (uint64_t)plane.n_head * plane.used(n_pos[seq], 0);
        }
    }
    return n;
}

lctx_sizes lctx_device_store::sizes(int32_t n_cell) const {
    const uint64_t n_row = (uint64_t)shape_.n_seq * n_head * lctx_kv_shape::n_block(n_cell) * LCTX_PAGE_ROWS;
    lctx_sizes s = {};
    s.other = bytes() + far_bytes();
    for (const lctx_plane & plane : planes_) {
        const uint64_t all = ggml_nbytes(plane.tensor);
        if (plane.key == lctx_plane_key::cell) {  // counted with its tensor; only cells that are held have memory
            s.other -= grain_ == 0 ? 0 : (uint64_t)shape_.n_seq * n_head * (shape_.n_ctx - n_cell) * plane.entry_size;
        } else {
            s.other -= all;
            s.*plane.counted_as += plane.key == lctx_plane_key::page && grain_ > 0
                                       ? std::min<uint64_t>(all, n_row * plane.entry_size)
                                       : all;
        }
    }
    return s;
}

// f(tensor, from, end) for the bytes that rows [n_from, n_to) of a sequence take outside the pages, in whole pages of
// rows; false as soon as f is.
template <typename F> bool lctx_device_store::each_row_range(int32_t seq, int32_t n_from, int32_t n_to, F && f) const {
    const auto whole = [&](int32_t n) { return std::min(lctx_kv_shape::n_block(n) * LCTX_PAGE_ROWS, shape_.n_ctx); };
    const auto committed = [&](const lctx_plane & plane, int32_t head, int32_t n) {
        const int32_t n_cell =
            n == 0 || plane.key != lctx_plane_key::cell ? 0 : std::max(0, this->n_cell(seq, head, n));
        return plane.committed(whole(n), whole(n_cell));
    };
    for (const lctx_plane & plane : planes_) {
        for (int32_t head = 0; plane.key != lctx_plane_key::page && head < plane.n_head; head++) {
            const int32_t from = committed(plane, head, n_from), to = committed(plane, head, n_to);
            if (from < to && !f(plane.tensor, plane.offset(seq, head, from), plane.offset(seq, head, to))) {
                return false;
            }
        }
    }
    return true;
}

std::string lctx_device_store::commit_rows(int32_t seq, int32_t n_now, int32_t n_then) {
    if (!commits()) {
        return "";
    }
    const bool ok = each_row_range(
        seq, n_now, n_then, [&](const ggml_tensor * t, size_t from, size_t end) { return commit(t, from, end); });
    return ok ? "" : no_memory();
}

void lctx_device_store::return_rows(int32_t seq, int32_t n_then, int32_t n_now) {
    if (grain_ == 0) {
        return;
    }
    wait();
    each_row_range(seq, n_then, n_now, [&](const ggml_tensor * t, size_t from, size_t end) {
        give_back(t, from, end);
        return true;
    });
}
