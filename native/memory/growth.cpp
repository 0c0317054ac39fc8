// The one way in which a sequence gets pages for more rows: from a batch, a state, or a slice.
#include "blocks.h"

#include <algorithm>
#include <map>

// The cells that growth takes in each head, once n_pos and gone are those after it: f(store, head, first, end).
template <typename F> void lctx_blocks::each_new(int32_t seq, const lctx_growth & by, F && f) const {
    size_t i = 0;
    placement_.each_head([&](lctx_device_store & store, int32_t head) {
        const int32_t end = store.n_cell(seq, head, seqs_.n_pos(seq));
        f(store, head, end - by.held(i++), end);
    });
}

// Return why growth that was noted has no pages; empty when it has.
std::string lctx_blocks::why_no_pages(int32_t seq, const lctx_growth & by) const {
    std::map<const lctx_device_store *, int32_t> wanted;
    int64_t n_all = 0;
    each_new(seq, by, [&](lctx_device_store & store, int32_t head, int32_t first, int32_t end) {
        const bool writes_to_last = seqs_[seq].shares && first % LCTX_PAGE_ROWS != 0;
        const int32_t last = writes_to_last ? store.page(seq, head, first / LCTX_PAGE_ROWS) : -1;
        int32_t n = last >= 0 && store.pages().is_shared(last);
        for (int32_t block = n_block(first); block < n_block(end); block++) {
            n += !is_dead(block, by.first_live);
        }
        if (n > 0) {  // not for every token
            wanted[&store] += n, n_all += n;
        }
    });
    for (const auto & [store, n] : wanted) {
        if (n > store->pages().n_free()) {
            return "the page pool is empty";
        }
    }
    return check_limit(n_held_page() + n_all, seqs_.lengths());
}

std::string lctx_blocks::grow(int32_t seq, const lctx_growth & by) {
    lctx_sequence & s = seqs_[seq];
    size_t i = 0;
    placement_.each_head(
        [&](lctx_device_store & store, int32_t head) { store.gone(seq, head) += by.n - by.held(i++); });
    s.n_pos += by.n;
    std::string why = why_no_pages(seq, by);
    for (const auto & store : placement_.stores()) {
        why = why.empty() ? store->commit_rows(seq, s.n_pos - by.n, s.n_pos) : why;
    }
    each_new(seq, by, [&](lctx_device_store & store, int32_t head, int32_t first, int32_t end) {
        if (why.empty() && first % LCTX_PAGE_ROWS != 0) {
            why = store.own_page(seq, head, first / LCTX_PAGE_ROWS);
        }
        for (int32_t block = n_block(first); why.empty() && block < n_block(end); block++) {
            why = is_dead(block, by.first_live) ? "" : store.take_page(seq, head, block);
        }
    });
    if (!why.empty()) {
        shrink(seq, by);
        return why;
    }
    const int32_t near_rows = placement_.shape().near_rows;
    s.first_near = near_rows > 0 ? std::max(s.first_near, s.n_pos - near_rows) : 0;
    return "";
}

std::string lctx_blocks::grow_to_write(int32_t seq, const lctx_growth & by) {
    std::string why = grow(seq, by);
    placement_.prepare_writes(seq);
    note_peak();
    return why;
}

void lctx_blocks::shrink(int32_t seq, const lctx_growth & by) {
    lctx_sequence & s = seqs_[seq];
    each_new(seq, by, [&](lctx_device_store & store, int32_t head, int32_t first, int32_t end) {
        store.drop_pages(seq, head, n_block(first), n_block(end));
        store.gone(seq, head) -= by.n - (end - first);
    });
    for (const auto & store : placement_.stores()) {
        store->return_rows(seq, s.n_pos - by.n, s.n_pos);
    }
    s.n_pos -= by.n;
}
