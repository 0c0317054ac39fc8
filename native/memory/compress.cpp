// Compression of a text that was read (KVzip, arXiv 2505.23416): queries of a replay vote, are taken back, and the heads evict once.
#include "budgets.h"
#include "kv-cache.h"

#include <algorithm>

namespace {

int32_t chunk_size(const lctx_chunks * chunks) {
    return chunks ? chunks->chunk_size : 0;
}

// What the heads [first, first + n) of a store have to decide about at the end of a sequence.
void add_contenders(const lctx_kv & kv, lctx_kv_store & store, int32_t seq, const lctx_layer_heads & heads,
                    std::vector<lctx_contender> & contenders) {
    const int32_t n_pos = kv.seqs.n_pos(seq);
    for (int32_t head = heads.first; head < heads.first + heads.n; head++) {
        const int32_t n = store.n_cell(seq, head, n_pos);
        std::vector<int32_t> rows(n), scores(n);
        store.read(store.held, store.held_offset(seq, head, 0), rows.data(), n * sizeof(int32_t));
        store.read(store.held, store.held_offset(seq, head, 1), scores.data(), n * sizeof(int32_t));
        contenders.emplace_back(*kv.placement.retain(), chunk_size(kv.placement.chunks()), n_pos - 1, rows.data(), scores.data(), n);
    }
}

}  // namespace

// Budgets of the heads for the eviction at the end of a sequence, those of each layer together.
void lctx_kv_cache::share_layers(int32_t seq) {
    for (const lctx_stored_layer & layer : kv_.placement.layers()) {
        std::vector<lctx_contender> contenders;
        if (layer.heads.n > 0) {
            add_contenders(kv_, *layer.store, seq, layer.heads, contenders);
        }
        const std::vector<int32_t> budgets = lctx_share_layer(contenders, *method_->retain());
        for (int32_t i = 0; i < layer.heads.n; i++) {
            layer.store->budget(seq, layer.heads.first + i) = budgets[i];
        }
    }
}

std::string lctx_kv_cache::why_not_compress(int32_t seq) const {
    if (!broken_.empty()) {
        return broken_;
    }
    if (!method_->retain() || !method_->retain()->waits()) {
        return method_->full_spec() + " does not compress a text that was read: that is for a rule that waits for it, kvzip";
    }
    return kv_.seqs.n_pos(seq) == 0 ? "there is no text to compress" : "";
}

int32_t lctx_kv_cache::begin_replay(int32_t seq) {
    const std::string why = why_not_compress(seq);
    if (!why.empty()) {
        throw lctx_refusal(why);
    }
    lctx_sequence & s = kv_.seqs[seq];
    kv_.placement.each_head([&](lctx_kv_store & store, int32_t head) {
        const std::vector<int32_t> none(store.n_cell(seq, head, s.n_pos), lctx_held::first_score(method_->retain()->score));
        store.write(store.held, store.held_offset(seq, head, 1), none.data(), none.size() * sizeof(int32_t));
    });
    s.replay_from = s.n_pos;
    // near keys of later tokens take the place of those that the next query of the text reads
    const int32_t n_ctx = kv_.placement.sizes().n_ctx, near_rows = kv_.placement.shape().near_rows;
    const int32_t most = near_rows > 0 ? near_rows - method_->near_window() : n_ctx;
    return std::min(most, n_ctx - s.n_pos);
}

bool lctx_kv_cache::compress(int32_t seq, double share) {
    const std::string why = why_not_compress(seq);
    if (!why.empty()) {
        return refuse(why);
    }
    if (kv_.seqs[seq].replay_from != kv_.seqs.n_pos(seq)) {
        return refuse("the text was not replayed, or the replay was not taken back");
    }
    std::vector<lctx_contender> contenders;
    for (const lctx_stored_layer & layer : kv_.placement.layers()) {
        if (layer.heads.n > 0) {
            add_contenders(kv_, *layer.store, seq, layer.heads, contenders);
        }
    }
    const auto total = (int64_t)(share * kv_.seqs.n_pos(seq) * kv_.placement.n_head());
    const std::vector<int32_t> budgets = lctx_share_budget(contenders, total, 0);
    size_t i = 0;
    kv_.placement.each_head([&](lctx_kv_store & store, int32_t head) { store.budget(seq, head) = budgets[i++]; });
    end_replay(seq);
    return settle({seq});
}
