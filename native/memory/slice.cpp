// Layout: header and method as in a state (state.cpp), the positions, where heads may forget rows the list of those
// that each has, zeros, then for every layer and KV head the bytes of its rows, block by block, K before V, and of its
// near keys; then summaries of the chunks that end in the slice. A slice has no open queries: it ends where a chunk
// ends.
#include "slice.h"

#include "plane-runs.h"
#include "slice-rows.h"
#include "state.h"

#include <algorithm>

namespace {

constexpr size_t ALIGNMENT = 16;  // of the rows

std::string why_not_slice(const lctx_cache_parts & parts, int32_t seq, int32_t first, int32_t end) {
    const lctx_sequence & s = parts.seqs[seq];
    const std::string why = lctx_why_no_slices(parts);
    if (!why.empty()) {
        return "this method has no slices: " + why;
    }
    if (first < 0 || first >= end || end > s.n_pos || first % LCTX_PAGE_ROWS != 0 ||
        parts.seqs.cut_before(end) != end) {
        return "a slice begins with a page of the sequence and ends where it can be cut";
    }
    if (parts.seqs.n_exact(seq) < s.n_pos) {
        return "rows of the sequence were read elsewhere, or before others left";
    }
    if (end < s.evicted_to || (first > 0 && s.evicted_to > 0)) {
        return "a text that was compressed is one slice";
    }
    return parts.seqs.first_near(first, end) < s.first_near ? "near keys of the slice were overwritten" : "";
}

// The rows of a slice that each head has, from its first on.
void write_lists(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t seq, int32_t first, int32_t end) {
    parts.placement.each_head([&](lctx_device_store & store, int32_t head) {
        if (!lctx_has_lists(parts)) {
            return;
        }
        std::vector<int32_t> rows(store.n_cell(seq, head, end) - (first == 0 ? 0 : store.n_cell(seq, head, first)));
        store.read(store.held, store.held_offset(seq, head, 0) + first * sizeof(int32_t), rows.data(),
                   rows.size() * sizeof(int32_t));
        std::for_each(rows.begin(), rows.end(), [&](int32_t & row) { row -= first; });
        const auto n = (int32_t)rows.size();
        io.write(&n, sizeof(n));
        io.write(rows.data(), n * sizeof(int32_t));
    });
}

void read_lists(const lctx_cache_parts & parts, lctx_state_reader & io, lctx_slice & slice) {
    const int32_t n_all = slice.n_row();
    for (int32_t head = 0; lctx_has_lists(parts) && head < parts.placement.n_head(); head++) {
        int32_t n;
        io.read(&n, sizeof(n));
        lctx_require_slice(n >= 0 && n <= n_all, "its lists of rows are too long");
        std::vector<int32_t> rows(n);
        io.read(rows.data(), n * sizeof(int32_t));
        for (int32_t i = 0; i < n; i++) {
            lctx_require_slice(rows[i] > (i > 0 ? rows[i - 1] : -1) && rows[i] < n_all,
                               "its lists of rows contradict its positions");
        }
        slice.rows.push_back(std::move(rows));
    }
}

// The header of a slice is this memory's.
lctx_slice begin(const lctx_cache_parts & parts, lctx_state_reader & io) {
    lctx_check_header(parts, io, 0);
    int32_t at[2];
    io.read(at, sizeof(at));
    lctx_slice slice = {at[0], at[1], {}};
    lctx_require_slice(lctx_why_no_slices(parts).empty(), "this method has no slices");
    lctx_require_slice(slice.first >= 0 && slice.first < slice.end && slice.end <= parts.placement.sizes().n_ctx &&
                           slice.first % LCTX_PAGE_ROWS == 0,
                       "its rows are none that a slice holds");
    read_lists(parts, io, slice);
    io.take(GGML_PAD(io.n_bytes(), ALIGNMENT) - io.n_bytes());
    return slice;
}

}  // namespace

std::string lctx_why_no_slices(const lctx_cache_parts & parts) {
    if (parts.placement.retain() && !lctx_has_lists(parts)) {
        return "heads evict, so that rows of earlier positions change";
    }
    return parts.placement.method().first_row(INT32_MAX) > 0 ? "rows of earlier positions are dropped" : "";
}

void lctx_write_slice(const lctx_cache_parts & parts, llama_io_write_i & io, int32_t seq, int32_t first, int32_t end) {
    const std::string why = why_not_slice(parts, seq, first, end);
    lctx_require(why.empty(), why);
    parts.placement.wait();
    lctx_write_header(parts, io, 0);
    const int32_t at[2] = {first, end};
    io.write(at, sizeof(at));
    write_lists(parts, io, seq, first, end);
    static constexpr uint8_t ZEROS[ALIGNMENT] = {};
    io.write(ZEROS, GGML_PAD(io.n_bytes(), ALIGNMENT) - io.n_bytes());
    const lctx_extent what = {lctx_plane_saved::in_slices, first, end};
    lctx_each_run(parts.placement, parts.seqs, seq, what,
                  [&](lctx_device_store &, const lctx_plane & plane, size_t offset, size_t size) {
                      io.write_tensor(plane.tensor, offset, size);
                  });
}

void lctx_read_slice(lctx_cache_parts & parts, lctx_state_reader & io, int32_t seq) {
    const lctx_slice slice = begin(parts, io);
    lctx_sequence & s = parts.seqs[seq];
    lctx_require_slice(
        slice.first == s.n_pos && parts.seqs.cut_before(slice.end) == slice.end && parts.seqs.n_exact(seq) == s.n_pos,
        "it does not follow the rows that are there");
    if (lctx_has_lists(parts)) {
        lctx_append_rows(parts, io, seq, slice, 0, slice.n_row());
        return;
    }
    const std::string why = parts.blocks.grow_to_write(seq, {slice.n_row(), {}, 0});
    lctx_require_slice(why.empty(), why);
    const int32_t near = parts.seqs.first_near(slice.first, slice.end);
    s.first_near = near > slice.first && near < slice.end ? near : s.first_near;
    s.open[0] = s.open[1] = -1;
    const lctx_extent what = {lctx_plane_saved::in_slices, slice.first, slice.end};
    lctx_each_run(parts.placement, parts.seqs, seq, what,
                  [&](lctx_device_store & store, const lctx_plane & plane, size_t offset, size_t size) {
                      store.land(plane.tensor, offset, lctx_slice_rows(io, plane, (int64_t)(size / plane.entry_size)),
                                 size);
                  });
    lctx_require_slice(io.at_end(), "it is longer than its rows");
    parts.index_rows(seq, slice.first, slice.end);
}

void lctx_insert_slice(lctx_cache_parts & parts, lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n) {
    const lctx_slice slice = begin(parts, io);
    const lctx_method & method = parts.placement.method();
    const int32_t to = parts.seqs.n_pos(seq), n_ctx = parts.placement.sizes().n_ctx;
    lctx_require(method.n_span() > 1, "texts are placed with method=full,spans=N, not with " + method.full_spec());
    lctx_require(skip >= 0 && n > 0 && (int64_t)skip + n <= slice.n_row(), "the stored slice does not have these rows");
    lctx_require(n <= n_ctx - to, std::to_string(n) + " stored rows do not fit: " + std::to_string(to) + " of n_ctx " +
                                      std::to_string(n_ctx) + " are used");
    std::vector<lctx_row_span> spans = parts.seqs.spans_with(seq, slice.first + skip);
    const std::string why = parts.seqs.why_no_spans(spans);
    lctx_require(why.empty(), why);
    std::swap(parts.seqs[seq].spans, spans);
    try {
        lctx_append_rows(parts, io, seq, slice, skip, n);
    } catch (...) {
        std::swap(parts.seqs[seq].spans, spans);
        throw;
    }
}
