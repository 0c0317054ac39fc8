// Loops over the planes of a sequence: what a state or a part has of them, and copies.
#include "kv-cache.h"

#include <algorithm>

// Every run of bytes that holds cells [first, end) of a head, block by block, K before V; first begins a page.
void lctx_kv_cache::each_page_run(lctx_kv_store & store, int32_t seq, int32_t head, int32_t first, int32_t end,
                                  const run_visitor & f) const {
    for (int32_t block = first / LCTX_PAGE_ROWS; block < n_block(end); block++) {
        const int32_t page = store.page(seq, head, block), n = std::min(LCTX_PAGE_ROWS, end - block * LCTX_PAGE_ROWS);
        for (const lctx_plane & plane : store.planes()) {
            if (page >= 0 && plane.key == lctx_plane_key::page && plane.saved != lctx_plane_saved::never) {
                f(store, plane, plane.offset(seq, head, (int64_t)page * LCTX_PAGE_ROWS), n * plane.entry_size);
            }
        }
    }
}

// f(first, n) for the entries of a head that `what` has in a plane beside the pages.
template <typename F>
void lctx_kv_cache::each_entry_run(const lctx_plane & plane, int32_t seq, int32_t n_gone, const lctx_extent & what, F && f) const {
    const auto used = [&](int32_t n_row) { return plane.used(n_row, n_row - n_gone); };
    if (plane.key == lctx_plane_key::query) {
        for (int32_t half = 0; half < 2; half++) {
            if (seqs_[seq].open[half] >= 0) {
                f(half * plane.rows_each, plane.rows_each);
            }
        }
    } else if (plane.key == lctx_plane_key::ring && what.is_part()) {
        for (int32_t p = first_near(what.first, what.end), n; p < what.end; p += n) {
            n = std::min(what.end - p, plane.n_entry - p % plane.n_entry);
            f(p % plane.n_entry, n);
        }
    } else {
        const int32_t first = what.first == 0 ? 0 : used(what.first);
        f(first, used(what.end) - first);
    }
}

// Every run of bytes that `what` has of a sequence, in the order of states and parts: for every head its rows and near keys, then for every
// head the lists of rows and their scores, then summaries, then queries.
void lctx_kv_cache::each_run(int32_t seq, const lctx_extent & what, const run_visitor & f) const {
    using key = lctx_plane_key;
    for (const key group : {key::page, key::cell, key::chunk, key::query}) {
        for (const layer_place & layer : layers_) {
            if (layer.heads.n > 0) {
                each_layer_run(layer, seq, what, group, f);
            }
        }
    }
}

void lctx_kv_cache::each_layer_run(const layer_place & layer, int32_t seq, const lctx_extent & what, lctx_plane_key group,
                                   const run_visitor & f) const {
    lctx_kv_store & store = *layer.store;
    const lctx_plane_key beside = group == lctx_plane_key::page ? lctx_plane_key::ring : group;
    std::vector<const lctx_plane *> planes;
    for (const lctx_plane & plane : store.planes()) {
        if (plane.key == beside && plane.saved >= what.saved) {
            planes.push_back(&plane);
        }
    }
    const bool by_query = !planes.empty() && planes[0]->by_query;
    const int32_t first_head = by_query ? layer.heads.first_query : layer.heads.first,
                  n_head = by_query ? layer.heads.n_query : layer.heads.n;
    for (int32_t head = first_head; head < first_head + n_head; head++) {
        if (group == lctx_plane_key::page) {
            each_page_run(store, seq, head, what.first == 0 ? 0 : store.n_cell(seq, head, what.first), store.n_cell(seq, head, what.end),
                          f);
        }
        for (const lctx_plane * plane : planes) {
            each_entry_run(*plane, seq, by_query ? 0 : store.gone(seq, head), what, [&](int32_t first, int32_t n) {
                if (n > 0) {
                    f(store, *plane, plane->offset(seq, head, first), n * plane->entry_size);
                }
            });
        }
    }
}

// What dst has of its planes beside the pages, as src has it.
void lctx_kv_cache::copy_planes(int32_t src, int32_t dst) {
    for (const auto & store : stores_) {
        store->copy_headers(src, dst);
        for (const lctx_plane & plane : store->planes()) {
            for (int32_t head = 0; plane.key != lctx_plane_key::page && head < plane.n_head; head++) {
                const int32_t n_gone = plane.by_query ? 0 : store->gone(dst, head);
                each_entry_run(plane, dst, n_gone, whole(dst), [&](int32_t first, int32_t n) {
                    store->copy(plane.tensor, plane.offset(src, head, first), plane.offset(dst, head, first), n * plane.entry_size);
                });
            }
        }
    }
}
