// Evictions: due when a sequence ends at a border, done when its next token comes, by a graph of its own. They need
// pages that no other sequence reads.
#include "kv-cache.h"

#include <algorithm>

// Do what is due for these sequences; false when there is no room to make their pages their own.
bool lctx_kv_cache::settle(const std::vector<int32_t> & seqs) {
    if (seqs.empty()) {
        return true;
    }
    std::vector<int32_t> due(parts_.seqs.size(), -1);
    for (int32_t seq : seqs) {
        const std::string why = parts_.blocks.own_all(seq);
        if (!why.empty()) {
            return refuse(why);
        }
        due[seq] = parts_.seqs.n_pos(seq) - 1;
        if (method_->retain()->adaptive) {
            divide_layers(seq);
        }
    }
    parts_.placement.work().n_evict++;
    for (const auto & store : parts_.placement.stores()) {
        if (!store->evict(due, parts_.placement.sizes().n_threads)) {
            break_with("the eviction on " + store->name() + " failed");
            return false;
        }
    }
    for (int32_t seq : seqs) {
        parts_.seqs.note_eviction(seq);
    }
    return true;
}

int32_t lctx_kv_cache::held_rows(int32_t seq, int32_t il, int32_t head, int32_t * rows, int32_t * scores,
                                 int32_t n_max) const {
    const std::vector<lctx_stored_layer> & layers = parts_.placement.layers();
    if (!parts_.seqs.has(seq) || il < 0 || il >= (int32_t)layers.size() || head < 0 || head >= layers[il].heads.n) {
        return 0;
    }
    lctx_device_store & store = *layers[il].store;
    const int32_t at = layers[il].heads.first + head, n_dead_row = parts_.blocks.n_dead(seq) * LCTX_PAGE_ROWS;
    const int32_t first_dead = parts_.blocks.first_dead() * LCTX_PAGE_ROWS,
                  n = store.n_cell(seq, at, parts_.seqs.n_pos(seq)) - n_dead_row;
    const int32_t n_out = std::min(n, n_max);
    for (int32_t plane = 0; plane < 2; plane++) {
        int32_t * out = plane == 0 ? rows : scores;
        if (out && store.held) {
            store.read(store.held, store.held_offset(seq, at, plane), out, std::max(0, n_out) * sizeof(int32_t));
        }
        for (int32_t i = 0; out && !store.held && i < n_out; i++) {
            out[i] = plane == 1 ? 0 : i < first_dead ? i : i + n_dead_row;
        }
    }
    return n;
}
