#include "sequences.h"

#include <algorithm>

namespace {

constexpr const char * WRONG = "its counters contradict each other";

}  // namespace

lctx_sequences::lctx_sequences(const lctx_placement & placement)
    : method_(placement.method()),
      chunks_(method_.chunks()),
      retain_(method_.retain()),
      sizes_(placement.sizes()),
      near_rows_(placement.shape().near_rows),
      seqs_(sizes_.n_seq) {}

std::vector<int32_t> lctx_sequences::lengths() const {
    std::vector<int32_t> n_pos;
    for (const lctx_sequence & s : seqs_) {
        n_pos.push_back(s.n_pos);
    }
    return n_pos;
}

std::string lctx_sequences::why_unsound(const lctx_sequence & s) const {
    const int32_t n = s.n_pos;
    if (n < 0 || n > sizes_.n_ctx) {
        return "it holds " + std::to_string(n) + " tokens, n_ctx is " + std::to_string(sizes_.n_ctx);
    }
    // first_live(), and what why_not_back_to allows
    if (s.first_live < 0 || s.first_live % LCTX_PAGE_ROWS != 0 ||
        s.first_live > std::max(method_.first_row(n), method_.n_sink())) {
        return WRONG;
    }
    const int32_t most_near = near_rows_ > 0 ? std::max(0, n - method_.near_window() + 1) : 0;
    if (s.first_near < std::max(0, near_rows_ > 0 ? n - near_rows_ : 0) || s.first_near > most_near) {
        return WRONG;
    }
    for (int32_t chunk : s.open) {
        if (chunk != -1 && (!has_open() || chunk < 0 || (int64_t)chunk * chunks_->chunk_size >= n)) {
            return WRONG;
        }
    }
    const bool has_queries = !has_open() || n % chunks_->chunk_size == 0 || s.half(n / chunks_->chunk_size) >= 0;
    if (!has_queries || (s.open[0] >= 0 && s.open[0] == s.open[1])) {
        return WRONG;
    }
    for (size_t i = 0; i < s.spans.size(); i++) {
        const int32_t first = s.spans[i].first;
        if (i == 0 ? first != 0 : first <= s.spans[i - 1].first || first >= n) {
            return WRONG;
        }
    }
    return why_unsound_evictions(s);
}

std::string lctx_sequences::why_unsound_evictions(const lctx_sequence & s) const {
    const int32_t n = s.n_pos;
    if (!retain_) {
        return s.evicted_to == 0 && s.voted_to == 0 && s.undo_from == -1 ? "" : WRONG;
    }
    if (retain_->waits()) {  // one eviction, anywhere
        return s.evicted_to >= 0 && s.evicted_to <= n && s.voted_to == s.evicted_to && s.undo_from == -1 ? "" : WRONG;
    }
    // evictions come at borders, and none is left out
    const int32_t every = retain_->evict_every, last_border = n == 0 ? 0 : (n - 1) / every * every;
    if (s.evicted_to != last_border && (s.evicted_to != n || n % every != 0)) {
        return WRONG;
    }
    const bool has_voted = n > s.evicted_to && retain_->votes(n - 1);
    const bool votes = s.voted_to <= n && s.voted_to >= (has_voted ? n : s.evicted_to);
    return votes && (s.undo_from == -1 || (s.undo_from >= s.evicted_to && s.undo_from < s.voted_to)) ? "" : WRONG;
}

std::string lctx_sequences::why_not_back_to(int32_t seq, int32_t p) const {
    const lctx_sequence & s = seqs_[seq];
    const int32_t first_row = std::max(method_.first_row(p), method_.n_sink());
    const int32_t first_near = std::max(0, p - method_.near_window() + 1);
    const bool rows = first_row >= s.first_live && (near_rows_ == 0 || first_near >= s.first_near);
    const bool votes = !retain_ || p == s.n_pos || (p >= s.evicted_to && (p >= s.voted_to || p == s.undo_from));
    const bool queries = !has_open() || p % chunks_->chunk_size == 0 || s.half(p / chunks_->chunk_size) >= 0;
    if (p == 0 || (rows && queries && votes)) {
        return "";
    }
    return "position " + std::to_string(p) + " is too far back for " + method_.full_spec() + ": " +
           (!rows              ? "rows that it reads are gone; evaluate the prefix again"
            : p < s.evicted_to ? "rows were evicted after it; evaluate the prefix again, or restore a checkpoint"
            : !votes ? "later queries have voted on what is kept; evaluate the prefix again, or restore a checkpoint"
                     : "queries of its chunk are gone; go back to the chunk's beginning");
}

int32_t lctx_sequences::restorable(int32_t seq, int32_t n) const {
    n = std::max(0, std::min(n, seqs_[seq].n_pos));
    if (n == seqs_[seq].n_pos || why_not_back_to(seq, n).empty()) {
        return n;
    }
    for (int32_t p : {has_open() ? cut_before(n) : 0, seqs_[seq].undo_from, seqs_[seq].evicted_to}) {
        if (0 < p && p <= n && why_not_back_to(seq, p).empty()) {
            return p;
        }
    }
    return 0;
}

void lctx_sequences::forget_beyond(int32_t seq) {
    lctx_sequence & s = seqs_[seq];
    while (s.spans.size() > 1 && s.spans.back().first >= s.n_pos) {
        s.spans.pop_back();
    }
    for (int32_t & chunk : s.open) {
        if (chunk >= 0 && chunk * chunks_->chunk_size >= s.n_pos) {
            chunk = -1;
        }
    }
}

int32_t lctx_sequences::first_live(int32_t p) const {
    return method_.first_row(std::max(0, p - sizes_.n_batch)) / LCTX_PAGE_ROWS * LCTX_PAGE_ROWS;
}

int32_t lctx_sequences::first_near(int32_t first, int32_t end) const {
    return near_rows_ > 0 ? std::max(first, end - method_.near_window() + 1) : end;
}
