// Spans: a sequence that is put together of rows that were read elsewhere, and out of whose middle rows left.
//
// Keys stay as they were rotated. A span says by how much that position is ahead of the row, and a query looks from as
// much further ahead. New rows go to the last span.
#include "sequences.h"
#include "state-io.h"

#include <algorithm>

namespace {

constexpr int32_t MOST_SHIFT = 1 << 24;  // positions are floats in the rotation

// A span with the same shift as the one before it is merged with that one.
void add(std::vector<lctx_row_span> & spans, lctx_row_span span) {
    if (spans.empty() || spans.back().shift != span.shift) {
        spans.push_back(span);
    }
}

}  // namespace

int32_t lctx_sequences::n_exact(int32_t seq) const {
    const lctx_sequence & s = seqs_[seq];
    return s.spans[0].shift != 0 ? 0 : s.spans.size() > 1 ? s.spans[1].first : s.n_pos;
}

std::string lctx_sequences::why_no_spans(const std::vector<lctx_row_span> & spans) const {
    const int32_t most = method_.n_span();
    if ((int32_t)spans.size() > most) {
        return "a sequence of " + method_.full_spec() + " has at most " + std::to_string(most) + " span" +
               (most == 1 ? "" : "s") + ", and this takes " + std::to_string(spans.size()) +
               ": use method=full,spans=" + std::to_string(spans.size());
    }
    const bool is_far =
        std::any_of(spans.begin(), spans.end(), [](const lctx_row_span & s) { return s.shift > MOST_SHIFT; });
    return is_far ? "more than " + std::to_string(MOST_SHIFT) + " tokens have left the sequence: evaluate it again"
                  : "";
}

std::vector<lctx_row_span> lctx_sequences::spans_without(int32_t seq, int32_t first, int32_t end) const {
    const lctx_sequence & s = seqs_[seq];
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

std::vector<lctx_row_span> lctx_sequences::spans_with(int32_t seq, int32_t p) const {
    const lctx_sequence & s = seqs_[seq];
    std::vector<lctx_row_span> spans = s.n_pos == 0 ? std::vector<lctx_row_span>() : s.spans;
    add(spans, {s.n_pos, p - s.n_pos});
    return spans;
}

void lctx_sequences::write_spans(llama_io_write_i & io, int32_t seq) const {
    if (method_.n_span() > 1) {
        const std::vector<lctx_row_span> & spans = seqs_[seq].spans;
        const auto n = (int32_t)spans.size();
        io.write(&n, sizeof(n));
        io.write(spans.data(), n * sizeof(lctx_row_span));
    }
}

std::vector<lctx_row_span> lctx_sequences::read_spans(llama_io_read_i & io, int32_t n_pos) const {
    if (method_.n_span() == 1) {
        return lctx_sequence().spans;
    }
    int32_t n;
    io.read(&n, sizeof(n));
    lctx_require_state(n >= 1 && n <= method_.n_span(), "it has " + std::to_string(n) + " spans");
    std::vector<lctx_row_span> spans(n);
    io.read(spans.data(), n * sizeof(lctx_row_span));
    for (int32_t i = 0; i < n; i++) {
        const bool follows =
            i == 0 ? spans[i].first == 0 : spans[i].first > spans[i - 1].first && spans[i].first < n_pos;
        const bool is_position = spans[i].shift <= MOST_SHIFT && (int64_t)spans[i].first + spans[i].shift >= 0;
        lctx_require_state(follows && is_position, "its spans contradict each other");
    }
    return spans;
}
