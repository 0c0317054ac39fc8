// Spans: a sequence that is put together of rows that were read elsewhere, and out of whose middle rows left.
//
// Keys stay as they were rotated. A span says by how much that position is ahead of the row, and a query looks from as much further ahead.
// New rows go to the last span.
#include "kv-cache.h"
#include "llama-io.h"

#include <algorithm>

namespace {

constexpr int32_t MOST_SHIFT = 1 << 24;  // positions are floats in the rotation

void require(bool ok, const std::string & reason) {
    if (!ok) {
        throw lctx_refusal(reason);
    }
}

// A span that goes on as the one before it is none of its own.
void add(std::vector<lctx_row_span> & spans, lctx_row_span span) {
    if (spans.empty() || spans.back().shift != span.shift) {
        spans.push_back(span);
    }
}

}  // namespace

// Spans that begin behind the end of the sequence are not there any more.
void lctx_kv_cache::cut_spans(int32_t seq) {
    sequence & s = seqs_[seq];
    while (s.spans.size() > 1 && s.spans.back().first >= s.n_pos) {
        s.spans.pop_back();
    }
}

// Why a sequence cannot consist of these; empty when it can.
std::string lctx_kv_cache::why_no_span(const std::vector<lctx_row_span> & spans) const {
    const int32_t most = method_->n_span();
    if ((int32_t)spans.size() > most) {
        return "a sequence of " + method_->full_spec() + " has at most " + std::to_string(most) + " span" + (most == 1 ? "" : "s") +
               ", and this takes " + std::to_string(spans.size()) + ": use method=full,spans=" + std::to_string(spans.size());
    }
    const bool is_far = std::any_of(spans.begin(), spans.end(), [](const lctx_row_span & s) { return s.shift > MOST_SHIFT; });
    return is_far ? "more than " + std::to_string(MOST_SHIFT) + " tokens have left the sequence: evaluate it again" : "";
}

std::vector<lctx_row_span> lctx_kv_cache::spans_without(int32_t seq, int32_t first, int32_t end) const {
    const sequence & s = seqs_[seq];
    std::vector<lctx_row_span> left;
    for (const lctx_row_span & span : s.spans) {
        if (span.first < first) {
            add(left, span);
        }
    }
    for (size_t i = 0; i < s.spans.size(); i++) {
        if (end < (i + 1 < s.spans.size() ? s.spans[i + 1].first : s.n_pos)) {
            add(left, {std::max(s.spans[i].first, end) - (end - first), s.spans[i].shift + end - first});
        }
    }
    return left;
}

// Rows from end on to first on. Up to a page at a time: what is overwritten was read before.
void lctx_kv_cache::move_rows(int32_t seq, int32_t first, int32_t end) {
    std::vector<uint8_t> rows;
    each_head([&](lctx_kv_store & store, int32_t head) {
        for (int32_t from = end, to = first, n; from < seqs_[seq].n_pos; from += n, to += n) {
            n = std::min({LCTX_PAGE_ROWS - from % LCTX_PAGE_ROWS, LCTX_PAGE_ROWS - to % LCTX_PAGE_ROWS, seqs_[seq].n_pos - from});
            for (const lctx_plane * plane : store.row_planes()) {
                ggml_tensor * pool = plane->tensor;
                const auto at = [&](int32_t row) {
                    return ((size_t)store.page(seq, head, row / LCTX_PAGE_ROWS) * LCTX_PAGE_ROWS + row % LCTX_PAGE_ROWS) * pool->nb[1];
                };
                rows.resize(n * pool->nb[1]);
                store.read(pool, at(from), rows.data(), rows.size());
                store.write(pool, at(to), rows.data(), rows.size());
            }
        }
    });
}

bool lctx_kv_cache::drop(int32_t seq, int32_t first, int32_t end) {
    if (seq < 0 || seq >= n_seq_ || first < 0 || first >= end || end > seqs_[seq].n_pos) {
        return refuse("rows " + std::to_string(first) + " .. " + std::to_string(end) + " are not in sequence " + std::to_string(seq));
    }
    if (method_->n_span() == 1 || retain_) {
        return refuse("rows leave the middle of a sequence with method=full,spans=N, not with " + method_->full_spec());
    }
    if (!broken_.empty()) {
        return refuse(broken_);
    }
    const std::vector<lctx_row_span> left = spans_without(seq, first, end);
    const std::string why = why_no_span(left);
    if (!why.empty() || !own_all(seq)) {
        return why.empty() ? false : refuse(why);
    }
    move_rows(seq, first, end);
    truncate(seq, seqs_[seq].n_pos - (end - first));
    seqs_[seq].spans = left.empty() ? sequence().spans : left;
    return true;
}

int32_t lctx_kv_cache::n_exact(int32_t seq) const {
    const sequence & s = seqs_[seq];
    return s.spans[0].shift != 0 ? 0 : s.spans.size() > 1 ? s.spans[1].first : s.n_pos;
}

void lctx_kv_cache::part_place(lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n) {
    const lctx_part part = part_begin(io);
    require(method_->n_span() > 1, "texts are placed with method=full,spans=N, not with " + method_->full_spec());
    require(skip >= 0 && n > 0 && (int64_t)skip + n <= part.at.end - part.at.first, "the stored part does not have these rows");
    const int32_t to = seqs_[seq].n_pos;
    require(n <= n_ctx_ - to,
            std::to_string(n) + " stored rows do not fit: " + std::to_string(to) + " of n_ctx " + std::to_string(n_ctx_) + " are used");
    std::vector<lctx_row_span> spans = to == 0 ? std::vector<lctx_row_span>() : seqs_[seq].spans;
    add(spans, {to, part.at.first + skip - to});
    const std::string why = why_no_span(spans);
    require(why.empty(), why);
    const std::vector<lctx_row_span> before = seqs_[seq].spans;
    seqs_[seq].spans = spans;
    try {
        append_rows(io, seq, part, skip, n);
    } catch (...) {
        seqs_[seq].spans = before;
        throw;
    }
}

void lctx_kv_cache::write_spans(llama_io_write_i & io, int32_t seq) const {
    if (method_->n_span() > 1) {
        const std::vector<lctx_row_span> & spans = seqs_[seq].spans;
        const auto n = (int32_t)spans.size();
        io.write(&n, sizeof(n));
        io.write(spans.data(), n * sizeof(lctx_row_span));
    }
}

// Those of a saved sequence, or the one that other methods have.
std::vector<lctx_row_span> lctx_kv_cache::read_spans(llama_io_read_i & io, int32_t n_pos) const {
    if (method_->n_span() == 1) {
        return sequence().spans;
    }
    int32_t n;
    io.read(&n, sizeof(n));
    require(n >= 1 && n <= method_->n_span(), "the saved state does not fit: it has " + std::to_string(n) + " spans");
    std::vector<lctx_row_span> spans(n);
    io.read(spans.data(), n * sizeof(lctx_row_span));
    for (int32_t i = 0; i < n; i++) {
        const bool follows = i == 0 ? spans[i].first == 0 : spans[i].first > spans[i - 1].first && spans[i].first < n_pos;
        const bool is_position = spans[i].shift <= MOST_SHIFT && (int64_t)spans[i].first + spans[i].shift >= 0;
        require(follows && is_position, "the saved state does not fit: its spans contradict each other");
    }
    return spans;
}
