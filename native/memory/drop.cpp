// Rows that leave the middle of a sequence, as a new span begins after them.
#include "kv-cache.h"

#include <algorithm>

namespace {

// Rows from end on to first on. Up to a page at a time: what is overwritten was read before.
void move_rows(const lctx_cache_parts & parts, int32_t seq, int32_t first, int32_t end) {
    std::vector<uint8_t> rows;
    const int32_t n_pos = parts.seqs.n_pos(seq);
    parts.placement.each_head([&](lctx_device_store & store, int32_t head) {
        for (int32_t from = end, to = first, n; from < n_pos; from += n, to += n) {
            n = std::min({LCTX_PAGE_ROWS - from % LCTX_PAGE_ROWS, LCTX_PAGE_ROWS - to % LCTX_PAGE_ROWS, n_pos - from});
            for (const lctx_plane * plane : store.row_planes()) {
                const auto at = [&](int32_t row) {
                    const int64_t page = store.page(seq, head, row / LCTX_PAGE_ROWS);
                    return plane->offset(seq, head, page * LCTX_PAGE_ROWS + row % LCTX_PAGE_ROWS);
                };
                rows.resize(n * plane->entry_size);
                store.read(plane->tensor, at(from), rows.data(), rows.size());
                store.write(plane->tensor, at(to), rows.data(), rows.size());
            }
        }
    });
}

}  // namespace

bool lctx_kv_cache::drop(int32_t seq, int32_t first, int32_t end) {
    if (!parts_.seqs.has(seq) || first < 0 || first >= end || end > parts_.seqs.n_pos(seq)) {
        return refuse("rows " + std::to_string(first) + " .. " + std::to_string(end) + " are not in sequence " +
                      std::to_string(seq));
    }
    if (method_->n_span() == 1 || method_->retain()) {
        return refuse("rows leave the middle of a sequence with method=full,spans=N, not with " + method_->full_spec());
    }
    if (!broken_.empty()) {
        return refuse(broken_);
    }
    const std::vector<lctx_row_span> left = parts_.seqs.spans_without(seq, first, end);
    std::string why = parts_.seqs.why_no_spans(left);
    why = why.empty() ? parts_.blocks.own_all(seq) : why;
    if (!why.empty()) {
        return refuse(why);
    }
    move_rows(parts_, seq, first, end);
    truncate(seq, parts_.seqs.n_pos(seq) - (end - first));
    parts_.seqs[seq].spans = left.empty() ? lctx_sequence().spans : left;
    return true;
}
