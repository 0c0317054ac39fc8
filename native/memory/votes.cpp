// Decides who votes on what is kept, and when: a sequence that ends at a border evicts before its next token.
#include "llama-batch.h"
#include "sequences.h"

#include <algorithm>

int32_t lctx_sequences::until_border(int32_t p) const {
    return retain_ ? retain_->border(p) - p + 1 : INT32_MAX;
}

int32_t lctx_sequences::step(int32_t p, int32_t n) const {
    return std::min({n, sizes_.n_batch, sizes_.n_ubatch, until_border(p)});
}

bool lctx_sequences::is_due(int32_t seq) const {
    const lctx_sequence & s = seqs_[seq];
    return retain_ && s.n_pos > s.evicted_to && s.n_pos % retain_->evict_every == 0;
}

bool lctx_sequences::evicts_before(int32_t seq, int32_t n_pos) const {
    return retain_ && (is_due(seq) || (n_pos - 1) / retain_->evict_every > seqs_[seq].n_pos / retain_->evict_every);
}

std::vector<int32_t> lctx_sequences::due_in(const llama_batch & batch) const {
    std::vector<char> is_in(seqs_.size(), 0);
    for (int32_t i = 0; retain_ && i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (has(seq)) {
            is_in[seq] = is_due(seq);
        }
    }
    std::vector<int32_t> due;
    for (int32_t seq = 0; seq < size(); seq++) {
        if (is_in[seq]) {
            due.push_back(seq);
        }
    }
    return due;
}

void lctx_sequences::note_votes(const llama_ubatch & ubatch) {
    voters_.clear();
    std::vector<int32_t> undo_from(seqs_.size(), -1);
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

bool lctx_sequences::take_votes_back(int32_t seq, int32_t n_pos) {
    lctx_sequence & s = seqs_[seq];
    if (!retain_ || n_pos >= s.voted_to) {
        return false;
    }
    const bool has_undo = n_pos > 0 && n_pos == s.undo_from;
    s.voted_to = n_pos;
    s.undo_from = -1;
    return has_undo;
}

void lctx_sequences::note_eviction(int32_t seq) {
    lctx_sequence & s = seqs_[seq];
    s.evicted_to = s.voted_to = s.n_pos;
    s.undo_from = -1;
}
