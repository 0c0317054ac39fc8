// The blocks of a sequence: a block is the pages of all layers and KV heads for 64 rows.
#include "memory.h"

#include <algorithm>
#include <cstring>

int32_t & lctx_memory::page(int32_t seq, int32_t head, int32_t block) const {
    return ((int32_t *)table_->data)[((int64_t)seq * n_head_total_ + head) * table_->ne[0] + block];
}

int32_t lctx_memory::held_blocks(int32_t seq) const {
    const sequence & s = seqs_[seq];
    const int32_t n_dead = std::max(0, s.first_live / LCTX_PAGE_ROWS - n_block(method_->n_sink()));
    return n_block(s.n_pos) - n_dead;
}

bool lctx_memory::take_block(int32_t seq, int32_t block) {
    if (pages_.n_free() < n_head_total_) {
        return refuse("the page pool is empty");
    }
    for (int32_t head = 0; head < n_head_total_; head++) {
        page(seq, head, block) = pages_.take();
    }
    return true;
}

// Copy a block that other sequences read too, before this one writes to it.
bool lctx_memory::own_block(int32_t seq, int32_t block) {
    if (!is_shared(seq, block)) {
        return true;
    }
    if (pages_.n_free() < n_head_total_) {
        return refuse("the page pool is empty");
    }
    for (int32_t head = 0; head < n_head_total_; head++) {
        const int32_t old = page(seq, head, block), fresh = pages_.take();
        for (ggml_tensor * pool : {k_pool_, v_pool_}) {
            const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
            memcpy((char *)pool->data + fresh * size, (const char *)pool->data + old * size, size);
        }
        pages_.give_back(old);
        page(seq, head, block) = fresh;
    }
    return true;
}

void lctx_memory::drop_block(int32_t seq, int32_t block) {
    for (int32_t head = 0; head < n_head_total_; head++) {
        int32_t & p = page(seq, head, block);
        if (p >= 0) {
            pages_.give_back(p);
            p = -1;
        }
    }
}

// Return the pages that no query from p - n_batch on reads: one batch may still be taken back.
void lctx_memory::drop_dead(int32_t seq, int32_t p) {
    sequence & s = seqs_[seq];
    const int32_t first = method_->first_row(std::max(0, p - n_batch_)) / LCTX_PAGE_ROWS * LCTX_PAGE_ROWS;
    for (int32_t block = n_block(std::max(s.first_live, method_->n_sink())); (block + 1) * LCTX_PAGE_ROWS <= first; block++) {
        drop_block(seq, block);
    }
    s.first_live = std::max(s.first_live, first);
}

void lctx_memory::truncate(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    for (int32_t block = n_block(n_pos); block < n_block(s.n_pos); block++) {
        drop_block(seq, block);
    }
    s.n_pos = n_pos;
    forget_open(seq);
    if (n_pos == 0) {
        s = sequence{};
    }
}

// Rows up to n_pos, in pages that only this sequence writes to.
bool lctx_memory::grow(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    if (s.n_pos % LCTX_PAGE_ROWS != 0 && !own_block(seq, s.n_pos / LCTX_PAGE_ROWS)) {
        return false;
    }
    for (int32_t block = n_block(s.n_pos); block < n_block(n_pos); block++) {
        if (!take_block(seq, block)) {
            return false;
        }
        s.n_pos = std::min(n_pos, (block + 1) * LCTX_PAGE_ROWS);
    }
    s.n_pos = n_pos;
    if (near_) {
        s.first_near = std::max(s.first_near, n_pos - near_rows_);
        near_touched_[seq] = std::max(near_touched_[seq], std::min(n_pos, near_rows_));
    }
    return true;
}

bool lctx_memory::place(const llama_ubatch & ubatch) {
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0];
        drop_dead(seq, std::min(ubatch.pos[i], seqs_[seq].n_pos));
    }
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        if (!grow(ubatch.seq_id[i][0], ubatch.pos[i] + 1)) {
            return false;
        }
    }
    place_open(ubatch);
    return true;
}

void lctx_memory::copy_prefix(int32_t src, int32_t dst, int32_t n_pos) {
    truncate(dst, 0);
    for (int32_t block = 0; block < n_block(n_pos); block++) {
        for (int32_t head = 0; head < n_head_total_; head++) {
            const int32_t p = page(src, head, block);
            page(dst, head, block) = p;
            if (p >= 0) {
                pages_.share(p);
            }
        }
    }
    seqs_[dst] = seqs_[src];
    seqs_[dst].n_pos = n_pos;
    forget_open(dst);
    const int32_t n_near = std::min(seqs_[src].n_pos, near_rows_);
    near_touched_[dst] = std::max(near_touched_[dst], n_near);
    for (int32_t head = 0; near_ && head < n_head_total_; head++) {
        char * ring = (char *)near_->data + head * near_->nb[2];
        memcpy(ring + dst * near_->nb[3], ring + src * near_->nb[3], n_near * near_->nb[1]);
    }
    copy_chunks(src, dst);
}
