// Compression of a text that was read (KVzip, arXiv 2505.23416): queries of a replay vote, are taken back, and the heads evict once.
#include "budgets.h"
#include "kv-cache.h"

#include <algorithm>

namespace {

int32_t chunk_size(const lctx_chunks * chunks) {
    return chunks ? chunks->chunk_size : 0;
}

}  // namespace

// What the heads [first, first + n) of a store have to decide about at the end of a sequence.
void lctx_kv_cache::add_contenders(lctx_kv_store & store, int32_t seq, const lctx_layer_heads & heads,
                                   std::vector<lctx_contender> & contenders) const {
    const int32_t n_pos = seqs_[seq].n_pos;
    for (int32_t head = heads.first; head < heads.first + heads.n; head++) {
        const int32_t n = store.n_cell(seq, head, n_pos);
        std::vector<int32_t> rows(n), scores(n);
        store.read(store.held, store.held_offset(seq, head, 0), rows.data(), n * sizeof(int32_t));
        store.read(store.held, store.held_offset(seq, head, 1), scores.data(), n * sizeof(int32_t));
        contenders.emplace_back(*retain_, chunk_size(chunks_), n_pos - 1, rows.data(), scores.data(), n);
    }
}

// Budgets of the heads for the eviction at the end of a sequence, those of each layer together.
void lctx_kv_cache::share_layers(int32_t seq) {
    for (const layer_place & layer : layers_) {
        std::vector<lctx_contender> contenders;
        if (layer.heads.n > 0) {
            add_contenders(*layer.store, seq, layer.heads, contenders);
        }
        const std::vector<int32_t> budgets = lctx_share_layer(contenders, *retain_);
        for (int32_t i = 0; i < layer.heads.n; i++) {
            layer.store->budget(seq, layer.heads.first + i) = budgets[i];
        }
    }
}

std::string lctx_kv_cache::why_not_compress(int32_t seq) const {
    if (!broken_.empty()) {
        return broken_;
    }
    if (!retain_ || !retain_->waits()) {
        return method_->full_spec() + " does not compress a text that was read: that is for a rule that waits for it, kvzip";
    }
    return seqs_[seq].n_pos == 0 ? "there is no text to compress" : "";
}

int32_t lctx_kv_cache::begin_replay(int32_t seq) {
    const std::string why = why_not_compress(seq);
    if (!why.empty()) {
        throw lctx_refusal(why);
    }
    sequence & s = seqs_[seq];
    each_head([&](lctx_kv_store & store, int32_t head) {
        const std::vector<int32_t> none(store.n_cell(seq, head, s.n_pos), lctx_held::first_score(retain_->score));
        store.write(store.held, store.held_offset(seq, head, 1), none.data(), none.size() * sizeof(int32_t));
    });
    s.replay_from = s.n_pos;
    // near keys of later tokens take the place of those that the next query of the text reads
    const int32_t most = shape_.near_rows > 0 ? shape_.near_rows - method_->near_window() : n_ctx_;
    return std::min(most, n_ctx_ - s.n_pos);
}

bool lctx_kv_cache::compress(int32_t seq, double share) {
    const std::string why = why_not_compress(seq);
    if (!why.empty()) {
        return refuse(why);
    }
    if (seqs_[seq].replay_from != seqs_[seq].n_pos) {
        return refuse("the text was not replayed, or the replay was not taken back");
    }
    std::vector<lctx_contender> contenders;
    for (const layer_place & layer : layers_) {
        if (layer.heads.n > 0) {
            add_contenders(*layer.store, seq, layer.heads, contenders);
        }
    }
    const auto total = (int64_t)(share * seqs_[seq].n_pos * n_head_total_);
    const std::vector<int32_t> budgets = lctx_share_budget(contenders, total, 0);
    size_t i = 0;
    each_head([&](lctx_kv_store & store, int32_t head) { store.budget(seq, head) = budgets[i++]; });
    end_replay(seq);
    return settle({seq});
}
