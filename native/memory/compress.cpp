// Compression of a text: queries vote, those of a replay that is taken back (KVzip, arXiv 2505.23416) or the last ones
// of the text (SnapKV, arXiv 2404.14469), and the heads evict once.
#include "budgets.h"
#include "kv-cache.h"

#include <algorithm>

namespace {

int32_t chunk_size(const lctx_chunks * chunks) {
    return chunks ? chunks->chunk_size : 0;
}

// Add for each of the heads [first, first + n) of a store the entries that it may evict at the end of a sequence.
void add_contenders(const lctx_cache_parts & parts, lctx_device_store & store, int32_t seq,
                    const lctx_layer_heads & heads, std::vector<lctx_contender> & contenders) {
    const int32_t n_pos = parts.seqs.n_pos(seq);
    for (int32_t head = heads.first; head < heads.first + heads.n; head++) {
        const int32_t n = store.n_cell(seq, head, n_pos);
        std::vector<int32_t> rows(n), scores(n);
        store.read(store.held, store.held_offset(seq, head, 0), rows.data(), n * sizeof(int32_t));
        store.read(store.held, store.held_offset(seq, head, 1), scores.data(), n * sizeof(int32_t));
        contenders.emplace_back(*parts.placement.retain(), chunk_size(parts.placement.chunks()), n_pos - 1, rows.data(),
                                scores.data(), n);
    }
}

// The scores of the first n rows of a head become sums over `pool` neighbors, so that what is around an important row
// stays with it.
void pool_scores(lctx_device_store & store, int32_t seq, int32_t head, int32_t n, int32_t pool) {
    std::vector<int32_t> scores(n);
    store.read(store.held, store.held_offset(seq, head, 1), scores.data(), n * sizeof(int32_t));
    std::vector<double> before(n + 1);  // sums of the scores before each row
    for (int32_t i = 0; i < n; i++) {
        before[i + 1] = before[i] + lctx_held::as_float(scores[i]);
    }
    const int32_t reach = std::min(pool / 2, n);
    for (int32_t i = 0; i < n; i++) {
        scores[i] = lctx_held::as_score((float)(before[std::min(n, i + reach + 1)] - before[std::max(0, i - reach)]));
    }
    store.write(store.held, store.held_offset(seq, head, 1), scores.data(), n * sizeof(int32_t));
}

}  // namespace

// Budgets of the heads for the eviction at the end of a sequence, those of each layer together.
void lctx_kv_cache::divide_layers(int32_t seq) {
    for (const lctx_stored_layer & layer : parts_.placement.layers()) {
        std::vector<lctx_contender> contenders;
        if (layer.heads.n > 0) {
            add_contenders(parts_, *layer.store, seq, layer.heads, contenders);
        }
        const std::vector<int32_t> budgets = lctx_layer_budgets(contenders, *method_->retain());
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
        return method_->full_spec() +
               " does not compress a text that was read: that is for a rule that waits for it, kvzip or snapkv";
    }
    return parts_.seqs.n_pos(seq) == 0 ? "there is no text to compress" : "";
}

int32_t lctx_kv_cache::begin_replay(int32_t seq) {
    const std::string why = why_not_compress(seq);
    if (!why.empty()) {
        throw lctx_refusal(why);
    }
    lctx_sequence & s = parts_.seqs[seq];
    parts_.placement.each_head([&](lctx_device_store & store, int32_t head) {
        const std::vector<int32_t> none(store.n_cell(seq, head, s.n_pos),
                                        lctx_held::first_score(method_->retain()->score));
        store.write(store.held, store.held_offset(seq, head, 1), none.data(), none.size() * sizeof(int32_t));
    });
    end_replay(seq);
    s.replay_from = s.n_pos;
    // near keys of later tokens take the place of those that the next query of the text reads
    const int32_t n_ctx = parts_.placement.sizes().n_ctx, near_rows = parts_.placement.shape().near_rows;
    const int32_t most = near_rows > 0 ? near_rows - method_->near_window() : n_ctx;
    return std::min(most, n_ctx - s.n_pos);
}

void lctx_kv_cache::end_replay(int32_t seq) {
    lctx_sequence & s = parts_.seqs[seq];
    s.replay_from = INT32_MAX;
    s.piece_first = s.piece_end = 0;
}

bool lctx_kv_cache::replay_piece(int32_t seq, int32_t first, int32_t end) {
    lctx_sequence & s = parts_.seqs[seq];
    if (s.replay_from == INT32_MAX || first < 0 || first >= end || end > s.replay_from) {
        throw lctx_refusal("rows [" + std::to_string(first) + ", " + std::to_string(end) +
                           ") are not part of a text that is replayed");
    }
    if (!method_->reads_pieces()) {
        return false;
    }
    s.piece_first = first;
    s.piece_end = end;
    return true;
}

bool lctx_kv_cache::compress(int32_t seq, double fraction) {
    const std::string why = why_not_compress(seq);
    if (!why.empty()) {
        return refuse(why);
    }
    const int32_t n_pos = parts_.seqs.n_pos(seq), n_stays = method_->retain()->recent;  // of the tokens that voted
    if (parts_.seqs[seq].replay_from != n_pos - n_stays) {
        return refuse(n_stays > 0 ? "the last " + std::to_string(n_stays) + " tokens did not vote"
                                  : "the text was not replayed, or the replay was not taken back");
    }
    if (method_->rule->pool > 1) {
        parts_.placement.each_head([&](lctx_device_store & store, int32_t head) {
            pool_scores(store, seq, head, store.n_cell(seq, head, n_pos - n_stays), method_->rule->pool);
        });
    }
    std::vector<lctx_contender> contenders;
    for (const lctx_stored_layer & layer : parts_.placement.layers()) {
        if (layer.heads.n > 0) {
            add_contenders(parts_, *layer.store, seq, layer.heads, contenders);
        }
    }
    const std::vector<int32_t> budgets = lctx_text_budgets(contenders, fraction, n_pos);
    size_t i = 0;
    parts_.placement.each_head(
        [&](lctx_device_store & store, int32_t head) { store.budget(seq, head) = budgets[i++]; });
    end_replay(seq);
    return settle({seq});
}
