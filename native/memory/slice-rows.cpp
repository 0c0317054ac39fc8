// Rows of a slice that come to the end of a sequence: all of them, or those that the heads kept when the text was
// compressed.
#include "slice-rows.h"

#include <algorithm>

namespace {

// Says what of a slice goes to a head: rows [first, first + n) of the n_row that it has there, after the cells [0, to).
struct slice_of_head {
    int32_t n_row, first, n, to;
};

std::vector<slice_of_head> divide(const lctx_cache_parts & parts, int32_t seq, const lctx_slice & slice, int32_t skip,
                                  int32_t n) {
    std::vector<slice_of_head> heads;
    parts.placement.each_head([&](lctx_device_store & store, int32_t head) {
        slice_of_head h = {slice.n_row(), skip, n, store.n_cell(seq, head, parts.seqs.n_pos(seq))};
        if (lctx_has_lists(parts)) {
            const std::vector<int32_t> & rows = slice.rows[heads.size()];
            h.n_row = (int32_t)rows.size();
            h.first = (int32_t)(std::lower_bound(rows.begin(), rows.end(), skip) - rows.begin());
            h.n = (int32_t)(std::lower_bound(rows.begin(), rows.end(), skip + n) - rows.begin()) - h.first;
        }
        heads.push_back(h);
    });
    return heads;
}

// n rows of a head that lie one after the other in memory of the host, from cell on.
void land(lctx_device_store & store, const lctx_plane & plane, int32_t seq, int32_t head, int32_t cell, int32_t n,
          const uint8_t * bytes) {
    for (int32_t i = 0, n_run; i < n; i += n_run) {
        const int32_t at = (cell + i) % LCTX_PAGE_ROWS;
        n_run = std::min(n - i, LCTX_PAGE_ROWS - at);
        const int64_t page = store.page(seq, head, (cell + i) / LCTX_PAGE_ROWS);
        store.land(plane.tensor, plane.offset(seq, head, page * LCTX_PAGE_ROWS + at), bytes + i * plane.entry_size,
                   n_run * plane.entry_size);
    }
}

void read_rows(lctx_state_reader & io, lctx_device_store & store, int32_t seq, int32_t head, const slice_of_head & h) {
    for (int32_t row = 0, n_block; row < h.n_row; row += n_block) {
        n_block = std::min(LCTX_PAGE_ROWS, h.n_row - row);
        const int32_t first = std::max(0, h.first - row), end = std::min(n_block, h.first + h.n - row);
        for (const lctx_plane * plane : store.row_planes()) {
            const uint8_t * bytes = lctx_slice_rows(io, *plane, n_block);
            land(store, *plane, seq, head, h.to + row + first - h.first, end - first,
                 bytes + first * plane->entry_size);
        }
    }
}

// Note which rows the heads hold now; the sequence cannot be cut before the end of those that were compressed.
void note_rows(lctx_cache_parts & parts, int32_t seq, int32_t n, const lctx_slice & slice, int32_t skip,
               const std::vector<slice_of_head> & heads) {
    lctx_sequence & s = parts.seqs[seq];
    size_t i = 0;
    parts.placement.each_head([&](lctx_device_store & store, int32_t head) {
        const slice_of_head & h = heads[i];
        const auto first = slice.rows[i++].begin() + h.first;
        std::vector<int32_t> rows(first, first + h.n);
        std::for_each(rows.begin(), rows.end(), [&](int32_t & row) { row += s.n_pos - n - skip; });
        const std::vector<int32_t> scores(h.n, lctx_held::first_score(parts.placement.retain()->score));
        for (const lctx_plane & plane : store.planes()) {
            if (plane.key == lctx_plane_key::cell) {
                const std::vector<int32_t> & values = plane.values == lctx_plane_values::rows ? rows : scores;
                store.land(plane.tensor, plane.offset(seq, head, h.to), values.data(), h.n * plane.entry_size);
            }
        }
    });
    if (std::any_of(heads.begin(), heads.end(), [&](const slice_of_head & h) { return h.n < n; })) {
        parts.seqs.note_eviction(seq);
    }
    for (const auto & store : parts.placement.stores()) {
        store->set_headers(seq, s.evicted_to, -1);
    }
}

}  // namespace

bool lctx_has_lists(const lctx_cache_parts & parts) {
    const lctx_retain * retain = parts.placement.retain();
    return retain && retain->waits() && parts.placement.method().n_span() > 1;
}

void lctx_require_slice(bool ok, const std::string & reason) {
    if (!ok) {
        throw lctx_refusal("the stored slice does not fit: " + reason);
    }
}

const uint8_t * lctx_slice_rows(lctx_state_reader & io, const lctx_plane & plane, int64_t n) {
    const uint8_t * bytes = io.take(n * plane.entry_size);
    lctx_require_slice(ggml_validate_row_data(plane.tensor->type, bytes, n * plane.entry_size),
                       "it holds numbers that are not finite");
    return bytes;
}

void lctx_append_rows(lctx_cache_parts & parts, lctx_state_reader & io, int32_t seq, const lctx_slice & slice,
                      int32_t skip, int32_t n) {
    const std::vector<slice_of_head> heads = divide(parts, seq, slice, skip, n);
    lctx_growth growth = {n, {}, 0};
    for (const slice_of_head & h : heads) {
        growth.n_each.push_back(h.n);
    }
    const std::string why = parts.blocks.grow_to_write(seq, growth);
    lctx_require_slice(why.empty(), why);
    try {
        size_t i = 0;
        parts.placement.each_head(
            [&](lctx_device_store & store, int32_t head) { read_rows(io, store, seq, head, heads[i++]); });
        lctx_require_slice(io.at_end(), "it is longer than its rows");
    } catch (...) {
        parts.blocks.shrink(seq, growth);
        throw;
    }
    if (lctx_has_lists(parts)) {
        note_rows(parts, seq, n, slice, skip, heads);
    }
}
