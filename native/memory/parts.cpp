// Parts of a sequence: its rows of some positions, and what goes with them, as a text is stored piece by piece. Parts that follow each
// other make the sequence again, in any context of the same model, method and types.
//
// Layout: header and method as in a state (state.cpp), the positions, where heads may forget rows the list of those that each has, zeros,
// then for every layer and KV head the bytes of its rows, block by block, K before V, and of its near keys; then summaries of the chunks
// that end in the part. A part has no open queries: it ends where a chunk ends.
#include "kv-cache.h"

#include <algorithm>

namespace {

constexpr size_t ALIGNMENT = 16;  // of the rows

}  // namespace

void lctx_kv_cache::part_require(bool ok, const std::string & reason) {
    if (!ok) {
        throw lctx_refusal("the stored part does not fit: " + reason);
    }
}

std::string lctx_kv_cache::why_no_parts() const {
    if (retain_ && !has_lists()) {
        return "heads evict, so that rows of earlier positions change";
    }
    return method_->first_row(INT32_MAX) > 0 ? "rows of earlier positions are dropped" : "";
}

// The first near key that a part holds.
int32_t lctx_kv_cache::first_near(int32_t first, int32_t end) const {
    return shape_.near_rows > 0 ? std::max(first, end - method_->near_window() + 1) : end;
}

void lctx_kv_cache::part_write(llama_io_write_i & io, int32_t seq, int32_t first, int32_t end) const {
    const sequence & s = seqs_[seq];
    const std::string why = why_no_parts();
    if (!why.empty()) {
        throw lctx_refusal("this method has no parts: " + why);
    }
    if (first < 0 || first >= end || end > s.n_pos || first % LCTX_PAGE_ROWS != 0 || place(end) != end) {
        throw lctx_refusal("a part begins with a page of the sequence and ends where it can be cut");
    }
    if (n_exact(seq) < s.n_pos) {
        throw lctx_refusal("rows of the sequence were read elsewhere, or before others left");
    }
    if (end < s.evicted_to || (first > 0 && s.evicted_to > 0)) {
        throw lctx_refusal("a text that was compressed is one part");
    }
    if (first_near(first, end) < s.first_near) {
        throw lctx_refusal("near keys of the part were overwritten");
    }
    for (const auto & store : stores_) {
        store->wait();
    }
    write_header(io, 0);
    const lctx_part_range positions = {first, end};
    io.write(&positions, sizeof(positions));
    write_lists(io, seq, positions);
    static constexpr uint8_t ZEROS[ALIGNMENT] = {};
    io.write(ZEROS, GGML_PAD(io.n_bytes(), ALIGNMENT) - io.n_bytes());
    each_run(seq, {lctx_plane_saved::in_parts, first, end},
             [&](lctx_kv_store &, const lctx_plane & plane, size_t offset, size_t size) { io.write_tensor(plane.tensor, offset, size); });
}

// The header of a part is this memory's.
lctx_part lctx_kv_cache::part_begin(lctx_state_reader & io) const {
    check_header(io, 0);
    lctx_part part;
    io.read(&part.at, sizeof(part.at));
    part_require(why_no_parts().empty(), "this method has no parts");
    const lctx_part_range & at = part.at;
    part_require(at.first >= 0 && at.first < at.end && at.end <= n_ctx_ && at.first % LCTX_PAGE_ROWS == 0,
                 "its rows are none that a part holds");
    read_lists(io, part);
    io.take(GGML_PAD(io.n_bytes(), ALIGNMENT) - io.n_bytes());
    return part;
}

// The rows of a part that each head has, from its first on.
void lctx_kv_cache::write_lists(llama_io_write_i & io, int32_t seq, const lctx_part_range & at) const {
    each_head([&](lctx_kv_store & store, int32_t head) {
        if (!has_lists()) {
            return;
        }
        std::vector<int32_t> rows(store.n_cell(seq, head, at.end) - (at.first == 0 ? 0 : store.n_cell(seq, head, at.first)));
        store.read(store.held, store.held_offset(seq, head, 0) + at.first * sizeof(int32_t), rows.data(), rows.size() * sizeof(int32_t));
        std::for_each(rows.begin(), rows.end(), [&](int32_t & row) { row -= at.first; });
        const auto n = (int32_t)rows.size();
        io.write(&n, sizeof(n));
        io.write(rows.data(), n * sizeof(int32_t));
    });
}

void lctx_kv_cache::read_lists(lctx_state_reader & io, lctx_part & part) const {
    const int32_t n_all = part.at.end - part.at.first;
    for (int32_t head = 0; has_lists() && head < n_head_total_; head++) {
        int32_t n;
        io.read(&n, sizeof(n));
        part_require(n >= 0 && n <= n_all, "its lists of rows are too long");
        std::vector<int32_t> rows(n);
        io.read(rows.data(), n * sizeof(int32_t));
        for (int32_t i = 0; i < n; i++) {
            part_require(rows[i] > (i > 0 ? rows[i - 1] : -1) && rows[i] < n_all, "its lists of rows contradict its positions");
        }
        part.rows.push_back(std::move(rows));
    }
}

// The next n rows of a part, as a tensor has them.
const uint8_t * lctx_kv_cache::part_rows(lctx_state_reader & io, const ggml_tensor * t, int64_t n) {
    const uint8_t * bytes = io.take(n * t->nb[1]);
    part_require(ggml_validate_row_data(t->type, bytes, n * t->nb[1]), "it holds numbers that are not finite");
    return bytes;
}

void lctx_kv_cache::part_finish(const lctx_state_reader & io) {
    part_require(io.at_end(), "it is longer than its rows");
}

void lctx_kv_cache::part_read(lctx_state_reader & io, int32_t seq) {
    const lctx_part part = part_begin(io);
    const lctx_part_range & at = part.at;
    sequence & s = seqs_[seq];
    part_require(at.first == s.n_pos && at.end <= n_ctx_ && place(at.end) == at.end && n_exact(seq) == s.n_pos,
                 "it does not follow the rows that are there");
    if (has_lists()) {
        append_rows(io, seq, part, 0, at.end - at.first);
        return;
    }
    const std::string why = grow_to_write(seq, {at.end - at.first, {}, 0});
    part_require(why.empty(), why);
    const int32_t near = first_near(at.first, at.end);
    s.first_near = near > at.first && near < at.end ? near : s.first_near;
    s.open[0] = s.open[1] = -1;
    const lctx_extent all = {lctx_plane_saved::in_parts, at.first, at.end};
    each_run(seq, all, [&](lctx_kv_store & store, const lctx_plane & plane, size_t offset, size_t size) {
        store.land(plane.tensor, offset, part_rows(io, plane.tensor, (int64_t)(size / plane.entry_size)), size);
    });
    part_finish(io);
    index_rows(seq, at.first, at.end);
}
