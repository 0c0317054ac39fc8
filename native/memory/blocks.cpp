// The pages of a sequence: block i of a head is its slots [64 i, 64 i + 64), and table_ says which page that is.
#include "memory.h"

#include <algorithm>
#include <cstring>

int32_t & lctx_memory::page(int32_t seq, int32_t head, int32_t block) const {
    work_.n_table++;
    return ((int32_t *)table_->data)[((int64_t)seq * n_head_total_ + head) * table_->ne[0] + block];
}

// Blocks behind the window, whose pages are gone: the same for all heads.
int32_t lctx_memory::n_dead(int32_t seq) const {
    return std::max(0, seqs_[seq].first_live / LCTX_PAGE_ROWS - n_block(method_->n_sink()));
}

// Pages that the sequences take to grow to n_pos rows each: new ones, and copies of shared ones that they would write to. The last
// owner of a page needs no copy.
int64_t lctx_memory::pages_needed(const std::vector<int32_t> & n_pos) const {
    int64_t n = 0;
    std::map<int32_t, int32_t> writers;
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        const sequence & s = seqs_[seq];
        for (int32_t head = 0; n_pos[seq] > s.n_pos && head < n_head_total_; head++) {
            const int32_t now = n_slot(seq, head, s.n_pos), then = n_slot(seq, head, n_pos[seq]), n_held = n_block(now) - n_dead(seq);
            n += std::max(0, std::min(n_held + n_block(then) - n_block(now), live_blocks()) - n_held);
            const int32_t last = now % LCTX_PAGE_ROWS != 0 ? page(seq, head, now / LCTX_PAGE_ROWS) : -1;
            n += last >= 0 && pages_.is_shared(last) && writers[last]++ < pages_.n_owner(last) - 1;
        }
    }
    return n;
}

// Copy a page that other sequences read too, before this one writes to it; false when there is none left.
bool lctx_memory::own_page(int32_t seq, int32_t head, int32_t block) {
    const int32_t old = page(seq, head, block);
    if (old < 0 || !pages_.is_shared(old)) {
        return true;
    }
    const int32_t fresh = pages_.take();
    if (fresh < 0) {
        return refuse("the page pool is empty");
    }
    for (ggml_tensor * pool : {k_pool_, v_pool_}) {
        const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
        memcpy((char *)pool->data + fresh * size, (const char *)pool->data + old * size, size);
    }
    pages_.give_back(old);
    page(seq, head, block) = fresh;
    return true;
}

void lctx_memory::drop_pages(int32_t seq, int32_t head, int32_t first, int32_t end) {
    for (int32_t block = first; block < end; block++) {
        int32_t & p = page(seq, head, block);
        if (p >= 0) {
            pages_.give_back(p);
            p = -1;
        }
    }
}

// What is kept of rows [n_pos, n_before) beside their pages is not needed.
void lctx_memory::return_rows(int32_t seq, int32_t n_pos, int32_t n_before) {
    const auto give_back = [&](ggml_tensor * t, int64_t head, size_t from, size_t end) {
        char * base = (char *)t->data + seq * t->nb[3] + head * t->nb[2];
        lctx_arena::give_back(base + from, base + end);
    };
    for (int64_t head = 0; reps_ && head < reps_->ne[2]; head++) {
        give_back(reps_, head, n_complete(n_pos) * reps_->nb[1], n_complete(n_before) * reps_->nb[1]);
    }
    for (ggml_tensor * ring : {near_, open_}) {
        for (int64_t head = 0; ring && n_pos == 0 && head < ring->ne[2]; head++) {
            give_back(ring, head, 0, ring->nb[2]);
        }
    }
    for (int32_t head = 0; held_ && head < n_head_total_; head++) {
        const lctx_held h = held(seq, head);
        for (int32_t * plane : {h.rows(), h.scores(), h.undo()}) {
            const int32_t n_left = n_pos == 0 ? 0 : n_slot(seq, head, n_pos);
            lctx_arena::give_back((char *)(plane + n_left), (char *)(plane + n_slot(seq, head, n_before)));
        }
    }
}

// Free pages belong to the system again, but for what the next rows need.
void lctx_memory::return_memory() {
    pages_.cool(n_head_total_, [&](int32_t first, int32_t end) {
        for (ggml_tensor * pool : {k_pool_, v_pool_}) {
            const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
            lctx_arena::give_back((char *)pool->data + first * size, (char *)pool->data + end * size);
        }
    });
}

// Return the pages that no query from p - n_batch on reads: one batch may still be taken back.
void lctx_memory::drop_dead(int32_t seq, int32_t p) {
    sequence & s = seqs_[seq];
    const int32_t first = method_->first_row(std::max(0, p - n_batch_)) / LCTX_PAGE_ROWS * LCTX_PAGE_ROWS;
    const int32_t first_kept = n_block(std::max(s.first_live, method_->n_sink()));
    for (int32_t head = 0; head < n_head_total_; head++) {
        drop_pages(seq, head, first_kept, first / LCTX_PAGE_ROWS);
    }
    s.first_live = std::max(s.first_live, first);
}

void lctx_memory::truncate(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    take_votes_back(seq, n_pos);
    for (int32_t head = 0; head < n_head_total_; head++) {
        const int32_t n = n_pos == 0 ? 0 : n_slot(seq, head, n_pos);
        drop_pages(seq, head, n_block(n), n_block(n_slot(seq, head, s.n_pos)));
    }
    return_rows(seq, n_pos, s.n_pos);
    s.n_pos = n_pos;
    forget_open(seq);
    if (n_pos == 0) {
        s = sequence{};
        forget_evictions(seq);
    }
    return_memory();
}

// Rows up to n_pos, in pages that only this sequence writes to; nothing changes when that cannot be.
bool lctx_memory::grow(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    std::vector<int32_t> wanted = lengths();
    wanted[seq] = n_pos;
    if (pages_needed(wanted) > pages_.n_free()) {
        return refuse("the page pool is empty");
    }
    for (int32_t head = 0; head < n_head_total_; head++) {
        const int32_t now = n_slot(seq, head, s.n_pos), then = n_slot(seq, head, n_pos);
        if (now % LCTX_PAGE_ROWS != 0) {
            own_page(seq, head, now / LCTX_PAGE_ROWS);
        }
        for (int32_t block = n_block(now); block < n_block(then); block++) {
            page(seq, head, block) = pages_.take();
        }
    }
    s.n_pos = n_pos;
    s.first_near = near_ ? std::max(s.first_near, n_pos - near_rows_) : 0;
    return true;
}

bool lctx_memory::place(const llama_ubatch & ubatch) {
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
        if (last[seq] >= 0 && !grow(seq, last[seq] + 1)) {
            return false;
        }
    }
    peak_bytes_ = std::max(peak_bytes_, bytes(pages_.n_held(), lengths()));
    place_open(ubatch);
    return true;
}

void lctx_memory::copy_prefix(int32_t src, int32_t dst, int32_t n_pos) {
    truncate(dst, 0);
    if (n_pos == 0) {
        return;
    }
    for (int32_t head = 0; head < n_head_total_; head++) {
        for (int32_t block = 0; block < n_block(n_slot(src, head, n_pos)); block++) {
            const int32_t p = page(src, head, block);
            page(dst, head, block) = p;
            if (p >= 0) {
                pages_.share(p);
            }
        }
    }
    seqs_[src].shares = true;
    seqs_[dst] = seqs_[src];
    copy_evictions(src, dst);
    take_votes_back(dst, n_pos);
    seqs_[dst].n_pos = n_pos;
    forget_open(dst);
    const int32_t n_near = std::min(seqs_[src].n_pos, near_rows_);
    for (int32_t head = 0; near_ && head < n_head_total_; head++) {
        char * ring = (char *)near_->data + head * near_->nb[2];
        memcpy(ring + dst * near_->nb[3], ring + src * near_->nb[3], n_near * near_->nb[1]);
    }
    copy_chunks(src, dst);
}
