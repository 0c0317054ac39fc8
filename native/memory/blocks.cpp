// The pages of a sequence: block i of a head is its cells [64 i, 64 i + 64), and the table of its store says which page that is.
#include "kv-cache.h"

#include <algorithm>

// Blocks behind the window, whose pages are gone: the same for all heads.
int32_t lctx_kv_cache::n_dead(int32_t seq) const {
    return std::max(0, seqs_[seq].first_live / LCTX_PAGE_ROWS - n_block(method_->n_sink()));
}

int64_t lctx_kv_cache::n_held_page() const {
    int64_t n = 0;
    for (const auto & store : stores_) {
        n += store->pages().n_held();
    }
    return n;
}

// Pages that the sequences take to grow to n_pos rows each: new ones, and copies of shared ones that they would write to, of all where
// heads evict on the way. The last owner of a page needs no copy.
int32_t lctx_kv_cache::pages_needed(const lctx_kv_store & store, const std::vector<int32_t> & n_pos) const {
    int64_t n = 0;
    std::map<int32_t, int32_t> writers;
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        const sequence & s = seqs_[seq];
        for (int32_t head = 0; n_pos[seq] > s.n_pos && head < store.n_head; head++) {
            const int32_t now = store.n_cell(seq, head, s.n_pos), then = store.n_cell(seq, head, n_pos[seq]);
            const int32_t n_held = n_block(now) - n_dead(seq);
            n += std::max(0, std::min(n_held + n_block(then) - n_block(now), live_blocks()) - n_held);
            for (int32_t block = evicts_before(seq, n_pos[seq]) ? 0 : now / LCTX_PAGE_ROWS; s.shares && block < n_block(now); block++) {
                const int32_t page = store.page(seq, head, block);
                n += page >= 0 && store.pages().is_shared(page) && writers[page]++ < store.pages().n_owner(page) - 1;
            }
        }
    }
    return (int32_t)std::min<int64_t>(n, INT32_MAX);
}

// What a batch needs is committed before it changes anything, where memory has to be.
bool lctx_kv_cache::promise(const llama_batch & batch) {
    std::vector<int32_t> n_pos = lengths();
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        n_pos[batch.seq_id[i][0]]++;
    }
    std::string why;
    for (const auto & store : stores_) {
        why = why.empty() && store->commits() ? store->promise_pages(pages_needed(*store, n_pos)) : why;
        for (int32_t seq = 0; why.empty() && seq < n_seq_; seq++) {
            why = store->commit_rows(seq, seqs_[seq].n_pos, n_pos[seq]);
        }
    }
    return why.empty() || refuse(why);
}

// Return the pages that no query from p - n_batch on reads: one batch may still be taken back.
void lctx_kv_cache::drop_dead(int32_t seq, int32_t p) {
    sequence & s = seqs_[seq];
    const int32_t first = method_->first_row(std::max(0, p - n_batch_)) / LCTX_PAGE_ROWS * LCTX_PAGE_ROWS;
    const int32_t first_kept = n_block(std::max(s.first_live, method_->n_sink()));
    each_head([&](lctx_kv_store & store, int32_t head) { store.drop_pages(seq, head, first_kept, first / LCTX_PAGE_ROWS); });
    s.first_live = std::max(s.first_live, first);
}

void lctx_kv_cache::truncate(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    take_votes_back(seq, n_pos);
    each_head([&](lctx_kv_store & store, int32_t head) {
        const int32_t n = n_pos == 0 ? 0 : store.n_cell(seq, head, n_pos);
        store.drop_pages(seq, head, n_block(n), n_block(store.n_cell(seq, head, s.n_pos)));
    });
    for (const auto & store : stores_) {
        store->return_rows(seq, n_pos, s.n_pos);
    }
    s.n_pos = n_pos;
    cut_spans(seq);
    forget_open(seq);
    if (n_pos == 0) {
        s = sequence{};
        forget_evictions(seq);
    }
    for (const auto & store : stores_) {
        store->return_pages();
    }
}

// The cells that growth takes in each head, once n_pos and gone are those after it: f(store, head, first, end).
template <typename F> void lctx_kv_cache::each_new(int32_t seq, const lctx_growth & by, F && f) {
    size_t i = 0;
    each_head([&](lctx_kv_store & store, int32_t head) {
        const int32_t end = store.n_cell(seq, head, seqs_[seq].n_pos);
        f(store, head, end - by.held(i++), end);
    });
}

// Why growth that was noted has no pages; empty when it has.
std::string lctx_kv_cache::why_no_pages(int32_t seq, const lctx_growth & by) {
    std::map<const lctx_kv_store *, int32_t> wanted;
    int64_t n_all = 0;
    each_new(seq, by, [&](lctx_kv_store & store, int32_t head, int32_t first, int32_t end) {
        const int32_t last = seqs_[seq].shares && first % LCTX_PAGE_ROWS != 0 ? store.page(seq, head, first / LCTX_PAGE_ROWS) : -1;
        int32_t n = last >= 0 && store.pages().is_shared(last);
        for (int32_t block = n_block(first); block < n_block(end); block++) {
            n += !is_dead(block, by.first_live);
        }
        wanted[&store] += n, n_all += n;
    });
    for (const auto & [store, n] : wanted) {
        if (n > store->pages().n_free()) {
            return "the page pool is empty";
        }
    }
    return check_limit(n_held_page() + n_all, lengths());
}

std::string lctx_kv_cache::grow(int32_t seq, const lctx_growth & by) {
    sequence & s = seqs_[seq];
    size_t i = 0;
    each_head([&](lctx_kv_store & store, int32_t head) { store.gone(seq, head) += by.n - by.held(i++); });
    s.n_pos += by.n;
    std::string why = why_no_pages(seq, by);
    for (const auto & store : stores_) {
        why = why.empty() ? store->commit_rows(seq, s.n_pos - by.n, s.n_pos) : why;
    }
    each_new(seq, by, [&](lctx_kv_store & store, int32_t head, int32_t first, int32_t end) {
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
    s.first_near = shape_.near_rows > 0 ? std::max(s.first_near, s.n_pos - shape_.near_rows) : 0;
    return "";
}

void lctx_kv_cache::shrink(int32_t seq, const lctx_growth & by) {
    sequence & s = seqs_[seq];
    each_new(seq, by, [&](lctx_kv_store & store, int32_t head, int32_t first, int32_t end) {
        store.drop_pages(seq, head, n_block(first), n_block(end));
        store.gone(seq, head) -= by.n - (end - first);
    });
    for (const auto & store : stores_) {
        store->return_rows(seq, s.n_pos - by.n, s.n_pos);
    }
    s.n_pos -= by.n;
}

std::string lctx_kv_cache::grow_to_write(int32_t seq, const lctx_growth & by) {
    std::string why = grow(seq, by);
    for (const auto & store : stores_) {
        store->wait();  // llama.cpp writes to the tensors, in the end
        store->forget_staged(seq);
    }
    note_peak();
    return why;
}

bool lctx_kv_cache::place(const llama_ubatch & ubatch) {
    work_.n_graph++;
    std::vector<int32_t> last(n_seq_, -1);
    std::vector<int32_t> due;
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0];
        if (last[seq] < 0) {
            drop_dead(seq, seqs_[seq].n_pos);
            if (is_due(seq)) {
                due.push_back(seq);
            }
        }
        last[seq] = ubatch.pos[i];
    }
    if (!settle(due)) {
        return false;
    }
    note_votes(ubatch);
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        const std::string why = last[seq] >= 0 ? grow(seq, {last[seq] + 1 - seqs_[seq].n_pos, {}, 0}) : "";
        if (!why.empty()) {
            return refuse(why);
        }
    }
    note_peak();
    place_open(ubatch);
    return true;
}

// False when a device has no memory for it: dst is empty then.
bool lctx_kv_cache::copy_prefix(int32_t src, int32_t dst, int32_t n_pos) {
    truncate(dst, 0);
    if (n_pos == 0) {
        return true;
    }
    seqs_[src].shares = true;
    seqs_[dst] = seqs_[src];
    end_replay(dst);
    each_head([&](lctx_kv_store & store, int32_t head) {
        store.share_pages(src, dst, head, n_block(store.n_cell(src, head, n_pos)));
        store.gone(dst, head) = store.gone(src, head);
    });
    std::string why;
    for (const auto & store : stores_) {
        why = why.empty() ? store->commit_rows(dst, 0, n_pos) : why;
    }
    if (!why.empty()) {
        truncate(dst, 0);
        return refuse(why + "; the copy is empty");
    }
    for (const auto & store : stores_) {
        store->forget_staged(dst);
    }
    seqs_[dst].n_pos = n_pos;
    cut_spans(dst);
    forget_open(dst);
    copy_planes(src, dst);
    take_votes_back(dst, n_pos);
    note_peak();
    return true;
}
