// Votes and evictions: what is due, who votes, what can be taken back.
//
// An eviction is due when a sequence ends at a border. It is done when its next token is placed, by a graph of its own, and needs
// pages that nobody else reads.
#include "kv-cache.h"

#include <algorithm>

bool lctx_kv_cache::is_due(int32_t seq) const {
    const sequence & s = seqs_[seq];
    return retain_ && s.n_pos > s.evicted_to && s.n_pos % retain_->evict_every == 0;
}

// Whether the sequence evicts when it grows to n_pos rows: a border lies before the last of them.
bool lctx_kv_cache::evicts_before(int32_t seq, int32_t n_pos) const {
    return retain_ && (is_due(seq) || (n_pos - 1) / retain_->evict_every > seqs_[seq].n_pos / retain_->evict_every);
}

// The sequences of a batch that evict before it.
std::vector<int32_t> lctx_kv_cache::due_in(const llama_batch & batch) const {
    std::vector<char> is_in(n_seq_, 0);
    for (int32_t i = 0; retain_ && i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (seq >= 0 && seq < n_seq_) {
            is_in[seq] = is_due(seq);
        }
    }
    std::vector<int32_t> due;
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        if (is_in[seq]) {
            due.push_back(seq);
        }
    }
    return due;
}

// Rows move inside the pages of a sequence, so nobody else may read them.
bool lctx_kv_cache::own_all(int32_t seq) {
    if (!seqs_[seq].shares) {
        return true;
    }
    const auto each_block = [&](const std::function<void(lctx_kv_store &, int32_t, int32_t)> & f) {
        each_head([&](lctx_kv_store & store, int32_t head) {
            for (int32_t block = 0; block < n_block(store.n_cell(seq, head, seqs_[seq].n_pos)); block++) {
                f(store, head, block);
            }
        });
    };
    std::map<const lctx_kv_store *, int32_t> n_shared;
    each_block([&](lctx_kv_store & store, int32_t head, int32_t block) {
        const int32_t page = store.page(seq, head, block);
        n_shared[&store] += page >= 0 && store.pages().is_shared(page);
    });
    int64_t n_all = 0;
    bool is_room = true;
    for (const auto & [store, n] : n_shared) {
        n_all += n;
        is_room = is_room && n <= store->pages().n_free();
    }
    const std::string limit = n_all > 0 ? check_limit(n_held_page() + n_all, lengths()) : "";
    if (!limit.empty()) {
        return refuse(limit);
    }
    if (!is_room) {
        return refuse("the page pool is full: an eviction needs copies of the pages that sequences share; remove a sequence");
    }
    std::string why;
    each_block([&](lctx_kv_store & store, int32_t head, int32_t block) { why = why.empty() ? store.own_page(seq, head, block) : why; });
    seqs_[seq].shares = !why.empty();
    return why.empty() || refuse(why);
}

// Do what is due for these sequences; false when there is no room to make their pages their own.
bool lctx_kv_cache::settle(const std::vector<int32_t> & seqs) {
    if (seqs.empty()) {
        return true;
    }
    std::vector<int32_t> due(n_seq_, -1);
    for (int32_t seq : seqs) {
        if (!own_all(seq)) {
            return false;
        }
        due[seq] = seqs_[seq].n_pos - 1;
        if (retain_->adaptive) {
            share_layers(seq);
        }
    }
    work_.n_evict++;
    for (const auto & store : stores_) {
        if (!store->evict(due, n_threads_)) {
            break_with("the eviction on " + store->name() + " failed");
            return false;
        }
    }
    for (int32_t seq : seqs) {
        sequence & s = seqs_[seq];
        s.evicted_to = s.voted_to = s.n_pos;
        s.undo_from = -1;
    }
    return true;
}

// Before a ubatch: whose queries vote, and from where on their votes can be taken back.
void lctx_kv_cache::note_votes(const llama_ubatch & ubatch) {
    voters_.clear();
    std::vector<int32_t> undo_from(n_seq_, -1);
    for (uint32_t i = 0; retain_ && i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0], p = ubatch.pos[i];
        if (retain_->votes(p)) {
            undo_from[seq] = seqs_[seq].undo_from = seqs_[seq].n_pos;
            seqs_[seq].voted_to = p + 1;
        }
    }
    for (uint32_t i = 0; retain_ && i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0], p = ubatch.pos[i];
        voters_.push_back({p, seq, retain_->votes(p) || p >= seqs_[seq].replay_from, undo_from[seq]});
    }
}

// The sequence is cut to n_pos rows: nobody behind them has voted. A layer that a failed ubatch did not reach has nothing to take back.
void lctx_kv_cache::take_votes_back(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    if (!retain_ || n_pos >= s.voted_to) {
        return;
    }
    if (n_pos > 0 && n_pos == s.undo_from) {
        for (const auto & store : stores_) {
            store->take_votes_back(seq, n_pos);
        }
    }
    s.voted_to = n_pos;
    s.undo_from = -1;
}

void lctx_kv_cache::forget_evictions(int32_t seq) {
    for (const auto & store : stores_) {
        for (int32_t head = 0; head < store->n_head; head++) {
            store->gone(seq, head) = 0;
        }
        store->set_headers(seq, 0, -1);
    }
}

int32_t lctx_kv_cache::held_rows(int32_t seq, int32_t il, int32_t head, int32_t * rows, int32_t * scores, int32_t n_max) const {
    if (seq < 0 || seq >= n_seq_ || il < 0 || il >= (int32_t)layers_.size() || head < 0 || head >= layers_[il].heads.n) {
        return 0;
    }
    lctx_kv_store & store = *layers_[il].store;
    const int32_t at = layers_[il].heads.first + head, n_dead_row = n_dead(seq) * LCTX_PAGE_ROWS;
    const int32_t first_dead = n_block(method_->n_sink()) * LCTX_PAGE_ROWS, n = store.n_cell(seq, at, seqs_[seq].n_pos) - n_dead_row;
    const int32_t n_told = std::min(n, n_max);
    for (int32_t plane = 0; plane < 2; plane++) {
        int32_t * out = plane == 0 ? rows : scores;
        if (out && store.held) {
            store.read(store.held, store.held_offset(seq, at, plane), out, std::max(0, n_told) * sizeof(int32_t));
        }
        for (int32_t i = 0; out && !store.held && i < n_told; i++) {
            out[i] = plane == 1 ? 0 : i < first_dead ? i : i + n_dead_row;
        }
    }
    return n;
}
