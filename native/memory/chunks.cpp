// The index of keys, summaries of complete chunks, and the queries of the open one.
//
// The ring of queries has two halves of one chunk each. Whole chunks of a ubatch need no ring: only the queries of its last chunk are
// kept, in the half that does not hold the chunk in which the batch began, so that a batch can be taken back whole.
#include "kv-cache.h"

// A batch begins: what its first rows continue must outlive it.
void lctx_kv_cache::keep_open() {
    for (sequence & s : seqs_) {
        const int32_t half = has_open() && s.n_pos > 0 ? s.half((s.n_pos - 1) / chunks_->chunk_size) : -1;
        s.kept_half = half >= 0 ? half : s.kept_half;
    }
}

void lctx_kv_cache::place_open(const llama_ubatch & ubatch) {
    open_rows_.assign(ubatch.n_tokens, -1);
    if (!has_open()) {
        return;
    }
    const int32_t size = chunks_->chunk_size;
    std::vector<int32_t> last(n_seq_, -1);
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0], half = seqs_[seq].half(ubatch.pos[i] / size);
        open_rows_[i] = ~(std::max(half, 0) * size + ubatch.pos[i] % size);  // where the chunk was begun, if it was
        last[seq] = ubatch.pos[i] / size;
    }
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        sequence & s = seqs_[seq];
        if (last[seq] >= 0 && s.half(last[seq]) < 0) {
            s.open[1 - s.kept_half] = last[seq];
        }
    }
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t half = seqs_[ubatch.seq_id[i][0]].half(ubatch.pos[i] / size);
        if (half >= 0) {
            open_rows_[i] = half * size + ubatch.pos[i] % size;
        }
    }
}

// Chunks that begin behind the end of the sequence are not there any more.
void lctx_kv_cache::forget_open(int32_t seq) {
    for (int32_t & chunk : seqs_[seq].open) {
        if (chunk >= 0 && chunk * chunks_->chunk_size >= seqs_[seq].n_pos) {
            chunk = -1;
        }
    }
}

// The index is made from the rows: what was read from elsewhere has none.
void lctx_kv_cache::index_rows(int32_t seq, int32_t first, int32_t end) {
    for (const auto & store : stores_) {
        store->index_rows(seq, first, end, n_threads_);
    }
}
