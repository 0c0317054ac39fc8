// Votes and evictions: what is due, who votes, what can be taken back.
//
// An eviction is due when a sequence ends at a border. It is done when its next token is placed, by a graph of its own, and needs
// pages that nobody else reads.
#include "memory.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>

lctx_held lctx_memory::held(int32_t seq, int32_t head) const {
    return {(int32_t *)held_->data + ((int64_t)seq * n_head_total_ + head) * held_->ne[0], n_ctx_};
}

bool lctx_memory::is_due(int32_t seq) const {
    const sequence & s = seqs_[seq];
    return retain_ && s.n_pos > s.evicted_to && s.n_pos % retain_->evict_every == 0;
}

// The sequences of a batch that evict before it.
std::vector<int32_t> lctx_memory::due_in(const llama_batch & batch) const {
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

// One node per layer, on tensors of this memory only: it can run whenever nothing else does.
void lctx_memory::prepare_eviction() {
    const size_t n_layer = n_head_kv_.size();
    evict_ctx_.reset(ggml_init({n_layer * 8 * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_layer, false), nullptr, true}));
    evict_graph_ = ggml_new_graph_custom(evict_ctx_.get(), n_layer, false);
    for (size_t il = 0; il < n_layer; il++) {
        const lctx_layer l = layer(evict_ctx_.get(), (int32_t)il);
        ggml_tensor * node =
            lctx_evict(evict_ctx_.get(), k_pool_, v_pool_, l.table, l.held, due_, l.reps, *retain_, chunks_ ? chunks_->chunk_size : 0);
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        ggml_graph_add_node(evict_graph_, node);
    }
    evictor_.reset(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(evictor_.get(), n_threads_);
}

// Rows move inside the pages of a sequence, so nobody else may read them.
bool lctx_memory::own_all(int32_t seq) {
    if (!seqs_[seq].shares) {
        return true;
    }
    int64_t n_shared = 0;
    const auto each_block = [&](const std::function<bool(int32_t, int32_t)> & f) {
        bool ok = true;
        for (int32_t head = 0; head < n_head_total_; head++) {
            for (int32_t block = 0; ok && block < n_block(n_slot(seq, head, seqs_[seq].n_pos)); block++) {
                ok = f(head, block);
            }
        }
        return ok;
    };
    each_block([&](int32_t head, int32_t block) {
        n_shared += pages_.is_shared(page(seq, head, block));
        return true;
    });
    const std::string limit = n_shared > 0 ? check_limit(pages_.n_held() + n_shared, lengths()) : "";
    if (!limit.empty()) {
        return refuse(limit);
    }
    if (n_shared > pages_.n_free()) {
        return refuse("the page pool is full: an eviction needs copies of the pages that sequences share; remove a sequence");
    }
    seqs_[seq].shares = !each_block([&](int32_t head, int32_t block) { return own_page(seq, head, block); });
    return !seqs_[seq].shares;
}

// Do what is due for these sequences; false when there is no room to make their pages their own.
bool lctx_memory::settle(const std::vector<int32_t> & seqs) {
    if (seqs.empty()) {
        return true;
    }
    std::fill_n((int32_t *)due_->data, n_seq_, -1);
    for (int32_t seq : seqs) {
        if (!own_all(seq)) {
            return false;
        }
        ((int32_t *)due_->data)[seq] = seqs_[seq].n_pos - 1;
    }
    work_.n_evict++;
    if (ggml_backend_graph_compute(evictor_.get(), evict_graph_) != GGML_STATUS_SUCCESS) {
        break_with("the eviction failed");
        return false;
    }
    for (int32_t seq : seqs) {
        after_eviction(seq);
    }
    return_memory();
    return true;
}

bool lctx_memory::settle_all() {
    std::vector<int32_t> due;
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        if (is_due(seq)) {
            due.push_back(seq);
        }
    }
    return settle(due);
}

// The pages and planes behind the rows that stayed are free.
void lctx_memory::after_eviction(int32_t seq) {
    sequence & s = seqs_[seq];
    for (int32_t head = 0; head < n_head_total_; head++) {
        const lctx_held h = held(seq, head);
        const int32_t n_before = n_slot(seq, head, s.n_pos), n_left = s.n_pos - h.n_gone();
        drop_pages(seq, head, n_block(n_left), n_block(n_before));
        for (int32_t * plane : {h.rows(), h.scores(), h.undo()}) {
            lctx_arena::give_back((char *)(plane + n_left), (char *)(plane + n_before));
        }
        gone_[(size_t)seq * n_head_total_ + head] = h.n_gone();
        h.undo_from() = -1;
    }
    s.evicted_to = s.n_pos;
    s.voted_to = s.n_pos;
    s.undo_from = -1;
}

// Before a ubatch: whose queries vote, and from where on their votes can be taken back.
void lctx_memory::note_votes(const llama_ubatch & ubatch) {
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
        voters_.push_back({p, seq, retain_->votes(p), undo_from[seq]});
    }
}

// The sequence is cut to n_pos rows: nobody behind them has voted. A layer that a failed ubatch did not reach has nothing to take back.
void lctx_memory::take_votes_back(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    if (!retain_ || n_pos >= s.voted_to) {
        return;
    }
    for (int32_t head = 0; n_pos > 0 && n_pos == s.undo_from && head < n_head_total_; head++) {
        const lctx_held h = held(seq, head);
        if (h.undo_from() == n_pos) {
            std::copy_n(h.undo(), n_slot(seq, head, n_pos), h.scores());
        }
    }
    s.voted_to = n_pos;
    s.undo_from = -1;
}

void lctx_memory::forget_evictions(int32_t seq) {
    for (int32_t head = 0; held_ && head < n_head_total_; head++) {
        const lctx_held h = held(seq, head);
        h.n_gone() = h.dense_from() = 0;
        h.undo_from() = -1;
        gone_[(size_t)seq * n_head_total_ + head] = 0;
    }
}

void lctx_memory::copy_evictions(int32_t src, int32_t dst) {
    for (int32_t head = 0; held_ && head < n_head_total_; head++) {
        gone_[(size_t)dst * n_head_total_ + head] = gone_[(size_t)src * n_head_total_ + head];
        std::copy_n(held(src, head).data, lctx_held::HEADER, held(dst, head).data);
    }
    const int64_t stride = held_ ? (src - dst) * (int64_t)held_->nb[2] : 0;
    each_held_run(dst, [&](void * data, size_t size) { memcpy(data, (const char *)data + stride, size); });
}

// f(data, size) for every run of bytes that says what the heads of the sequence hold.
void lctx_memory::each_held_run(int32_t seq, const std::function<void(void *, size_t)> & f) const {
    for (int32_t head = 0; held_ && head < n_head_total_; head++) {
        const lctx_held h = held(seq, head);
        for (int32_t * plane : {h.rows(), h.scores(), h.undo()}) {
            f(plane, n_slot(seq, head, seqs_[seq].n_pos) * sizeof(int32_t));
        }
    }
}

int32_t lctx_memory::held_rows(int32_t seq, int32_t il, int32_t head, int32_t * rows, int32_t * scores, int32_t n_max) {
    if (seq < 0 || seq >= n_seq_ || il < 0 || il >= (int32_t)n_head_kv_.size() || head < 0 || head >= n_head_kv_[il]) {
        return 0;
    }
    if (!settle_all()) {
        error_.clear();
    }
    const int32_t at = head_offset_[il] + head, n_dead_row = n_dead(seq) * LCTX_PAGE_ROWS;
    const int32_t first_dead = n_block(method_->n_sink()) * LCTX_PAGE_ROWS, n = n_slot(seq, at, seqs_[seq].n_pos) - n_dead_row;
    for (int32_t i = 0; i < std::min(n, n_max); i++) {
        if (rows) {
            rows[i] = held_ ? held(seq, at).rows()[i] : i < first_dead ? i : i + n_dead_row;
        }
        if (scores) {
            scores[i] = held_ ? held(seq, at).scores()[i] : 0;
        }
    }
    return n;
}
