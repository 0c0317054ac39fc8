#include "plane-runs.h"

#include <algorithm>

namespace {

using key = lctx_plane_key;

// Cells [first, end) of a head; first begins a page.
void each_page_run(lctx_device_store & store, int32_t seq, int32_t head, int32_t first, int32_t end,
                   const lctx_run_visitor & f) {
    for (int32_t block = first / LCTX_PAGE_ROWS; block < lctx_kv_shape::n_block(end); block++) {
        const int32_t page = store.page(seq, head, block), n = std::min(LCTX_PAGE_ROWS, end - block * LCTX_PAGE_ROWS);
        for (const lctx_plane & plane : store.planes()) {
            if (page >= 0 && plane.key == key::page && plane.saved != lctx_plane_saved::never) {
                f(store, plane, plane.offset(seq, head, (int64_t)page * LCTX_PAGE_ROWS), n * plane.entry_size);
            }
        }
    }
}

// f(first, n) for the entries of a head that `what` has in a plane outside the pages.
template <typename F> void each_entry_run(const lctx_sequences & seqs, const lctx_plane & plane, int32_t seq,
                                          int32_t n_gone, const lctx_extent & what, F && f) {
    const auto used = [&](int32_t n_row) { return plane.used(n_row, n_row - n_gone); };
    if (plane.key == key::query) {
        for (int32_t half = 0; half < 2; half++) {
            if (seqs[seq].open[half] >= 0) {
                f(half * plane.rows_each, plane.rows_each);
            }
        }
    } else if (plane.key == key::ring && what.saved == lctx_plane_saved::in_slices) {
        for (int32_t p = seqs.first_near(what.first, what.end), n; p < what.end; p += n) {
            n = std::min(what.end - p, plane.n_entry - p % plane.n_entry);
            f(p % plane.n_entry, n);
        }
    } else {
        const int32_t first = what.first == 0 ? 0 : used(what.first);
        f(first, used(what.end) - first);
    }
}

// The runs of a layer in the planes of a group: those of one key, or the pages with the rings.
void each_layer_run(const lctx_sequences & seqs, const lctx_stored_layer & layer, int32_t seq, const lctx_extent & what,
                    key group, const lctx_run_visitor & f) {
    lctx_device_store & store = *layer.store;
    std::vector<const lctx_plane *> planes;
    for (const lctx_plane & plane : store.planes()) {
        if (plane.key == (group == key::page ? key::ring : group) && plane.saved >= what.saved) {
            planes.push_back(&plane);
        }
    }
    const bool by_query = !planes.empty() && planes[0]->by_query;
    const int32_t first = by_query ? layer.heads.first_query : layer.heads.first,
                  n = by_query ? layer.heads.n_query : layer.heads.n;
    for (int32_t head = first; head < first + n; head++) {
        if (group == key::page) {
            const int32_t first_cell = what.first == 0 ? 0 : store.n_cell(seq, head, what.first);
            each_page_run(store, seq, head, first_cell, store.n_cell(seq, head, what.end), f);
        }
        for (const lctx_plane * plane : planes) {
            each_entry_run(seqs, *plane, seq, by_query ? 0 : store.gone(seq, head), what,
                           [&](int32_t entry, int32_t n_entry) {
                               if (n_entry > 0) {
                                   f(store, *plane, plane->offset(seq, head, entry), n_entry * plane->entry_size);
                               }
                           });
        }
    }
}

}  // namespace

void lctx_each_run(const lctx_placement & placement, const lctx_sequences & seqs, int32_t seq, const lctx_extent & what,
                   const lctx_run_visitor & f) {
    for (const key group : {key::page, key::cell, key::chunk, key::query}) {
        for (const lctx_stored_layer & layer : placement.layers()) {
            if (layer.heads.n > 0) {
                each_layer_run(seqs, layer, seq, what, group, f);
            }
        }
    }
}

void lctx_copy_planes(const lctx_placement & placement, const lctx_sequences & seqs, int32_t src, int32_t dst) {
    for (const auto & store : placement.stores()) {
        store->copy_headers(src, dst);
        for (const lctx_plane & plane : store->planes()) {
            for (int32_t head = 0; plane.key != key::page && head < plane.n_head; head++) {
                const int32_t n_gone = plane.by_query ? 0 : store->gone(dst, head);
                each_entry_run(seqs, plane, dst, n_gone, lctx_whole(seqs, dst), [&](int32_t first, int32_t n) {
                    store->copy(plane.tensor, plane.offset(src, head, first), plane.offset(dst, head, first),
                                n * plane.entry_size);
                });
            }
        }
    }
}
