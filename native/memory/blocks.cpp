#include "blocks.h"

#include <algorithm>
#include <map>

int32_t lctx_blocks::n_dead(int32_t seq) const {
    return std::max(0, seqs_[seq].first_live / LCTX_PAGE_ROWS - first_dead());
}

int64_t lctx_blocks::n_held_page() const {
    int64_t n = 0;
    for (const auto & store : placement_.stores()) {
        n += store->pages().n_held();
    }
    return n;
}

// f(store, head, block) for the blocks of a sequence.
template <typename F> void lctx_blocks::each_block(int32_t seq, F && f) const {
    placement_.each_head([&](lctx_device_store & store, int32_t head) {
        for (int32_t block = 0; block < n_block(store.n_cell(seq, head, seqs_.n_pos(seq))); block++) {
            f(store, head, block);
        }
    });
}

// Pages that the sequences take to grow to n_pos rows each: new ones, and copies of shared ones that they would write
// to, of all where heads evict on the way. The last owner of a page needs no copy.
int32_t lctx_blocks::pages_needed(const lctx_device_store & store, const std::vector<int32_t> & n_pos) const {
    int64_t n = 0;
    std::map<int32_t, int32_t> writers;
    const int32_t most = placement_.live_blocks();
    for (int32_t seq = 0; seq < seqs_.size(); seq++) {
        const lctx_sequence & s = seqs_[seq];
        for (int32_t head = 0; n_pos[seq] > s.n_pos && head < store.n_head; head++) {
            const int32_t now = store.n_cell(seq, head, s.n_pos), then = store.n_cell(seq, head, n_pos[seq]);
            const int32_t n_held = n_block(now) - n_dead(seq);
            n += std::max(0, std::min(n_held + n_block(then) - n_block(now), most) - n_held);
            for (int32_t block = seqs_.evicts_before(seq, n_pos[seq]) ? 0 : now / LCTX_PAGE_ROWS;
                 s.shares && block < n_block(now); block++) {
                const int32_t page = store.page(seq, head, block);
                n += page >= 0 && store.pages().is_shared(page) && writers[page]++ < store.pages().n_owner(page) - 1;
            }
        }
    }
    return (int32_t)std::min<int64_t>(n, INT32_MAX);
}

std::string lctx_blocks::why_no_room(const std::vector<int32_t> & n_pos) const {
    const int32_t n_ctx = placement_.sizes().n_ctx;
    for (int32_t seq = 0; seq < seqs_.size(); seq++) {
        const int32_t n_used = seqs_.n_pos(seq);
        if (n_pos[seq] > n_ctx) {
            return std::to_string(n_pos[seq] - n_used) + " more tokens do not fit: " + std::to_string(n_used) +
                   " of n_ctx " + std::to_string(n_ctx) + " are used";
        }
    }
    int64_t n_need = 0;
    for (const auto & store : placement_.stores()) {
        const int32_t n = pages_needed(*store, n_pos);
        if (n > store->pages().n_free()) {
            return "the page pool is full: remove a sequence or raise n_ctx";
        }
        n_need += n;
    }
    return check_limit(n_held_page() + n_need, n_pos);
}

std::string lctx_blocks::promise(const std::vector<int32_t> & n_pos) const {
    std::string why;
    for (const auto & store : placement_.stores()) {
        why = why.empty() && store->commits() ? store->promise_pages(pages_needed(*store, n_pos)) : why;
        for (int32_t seq = 0; why.empty() && seq < seqs_.size(); seq++) {
            why = store->commit_rows(seq, seqs_.n_pos(seq), n_pos[seq]);
        }
    }
    return why;
}

void lctx_blocks::drop_dead(int32_t seq) {
    lctx_sequence & s = seqs_[seq];
    const int32_t first = seqs_.first_live(s.n_pos), first_kept = std::max(n_block(s.first_live), first_dead());
    placement_.each_head([&](lctx_device_store & store, int32_t head) {
        store.drop_pages(seq, head, first_kept, first / LCTX_PAGE_ROWS);
    });
    s.first_live = std::max(s.first_live, first);
}

void lctx_blocks::cut(int32_t seq, int32_t n_pos) {
    lctx_sequence & s = seqs_[seq];
    placement_.each_head([&](lctx_device_store & store, int32_t head) {
        const int32_t n = n_pos == 0 ? 0 : store.n_cell(seq, head, n_pos);
        store.drop_pages(seq, head, n_block(n), n_block(store.n_cell(seq, head, s.n_pos)));
    });
    for (const auto & store : placement_.stores()) {
        store->return_rows(seq, n_pos, s.n_pos);
    }
    s.n_pos = n_pos;
}

std::string lctx_blocks::share(int32_t src, int32_t dst, int32_t n_pos) {
    seqs_[src].shares = true;
    seqs_[dst] = seqs_[src];
    seqs_[dst].replay_from = INT32_MAX;
    placement_.each_head([&](lctx_device_store & store, int32_t head) {
        store.share_pages(src, dst, head, n_block(store.n_cell(src, head, n_pos)));
        store.gone(dst, head) = store.gone(src, head);
    });
    std::string why;
    for (const auto & store : placement_.stores()) {
        why = why.empty() ? store->commit_rows(dst, 0, n_pos) : why;
    }
    return why;
}

std::string lctx_blocks::own_all(int32_t seq) {
    if (!seqs_[seq].shares) {
        return "";
    }
    std::map<const lctx_device_store *, int32_t> n_shared;
    each_block(seq, [&](lctx_device_store & store, int32_t head, int32_t block) {
        const int32_t page = store.page(seq, head, block);
        n_shared[&store] += page >= 0 && store.pages().is_shared(page);
    });
    int64_t n_all = 0;
    bool is_room = true;
    for (const auto & [store, n] : n_shared) {
        n_all += n;
        is_room = is_room && n <= store->pages().n_free();
    }
    std::string why = n_all > 0 ? check_limit(n_held_page() + n_all, seqs_.lengths()) : "";
    if (why.empty() && !is_room) {
        return "the page pool is full: an eviction needs copies of the pages that sequences share; remove a sequence";
    }
    if (!why.empty()) {
        return why;
    }
    each_block(seq, [&](lctx_device_store & store, int32_t head, int32_t block) {
        why = why.empty() ? store.own_page(seq, head, block) : why;
    });
    seqs_[seq].shares = !why.empty();
    return why;
}

std::string lctx_blocks::why_unsound() const {
    std::string why;
    std::map<const lctx_device_store *, std::map<int32_t, int32_t>> n_owner;
    for (int32_t seq = 0; seq < seqs_.size(); seq++) {
        const lctx_sequence & s = seqs_[seq];
        each_block(seq, [&](lctx_device_store & store, int32_t head, int32_t block) {
            const int32_t page = store.page(seq, head, block);
            why = (page < 0) == is_dead(block, s.first_live) ? why : "a block has no page, or one that is dead has";
            why = page < 0 || s.shares || !store.pages().is_shared(page)
                      ? why
                      : "a page has owners that the sequence does not know";
            n_owner[&store][page]++;
        });
        placement_.each_head([&](const lctx_device_store & store, int32_t head) {
            const bool ends = n_block(store.n_cell(seq, head, s.n_pos)) == n_block(placement_.sizes().n_ctx) ||
                              store.page(seq, head, n_block(store.n_cell(seq, head, s.n_pos))) < 0;
            const bool evicted = store.gone(seq, head) >= 0 && store.gone(seq, head) <= s.evicted_to;
            why = ends && evicted ? why : "a head has pages after its end, or more rows are gone than were judged";
        });
    }
    for (auto & [store, pages] : n_owner) {
        pages.erase(-1);
        why = (int32_t)pages.size() == store->pages().n_held() ? why : "pages are held that no sequence has";
        for (const auto & [page, n] : pages) {
            why = n == store->pages().n_owner(page) ? why : "a page has another number of owners than of blocks";
        }
    }
    return why;
}
