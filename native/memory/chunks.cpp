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

// Every run of bytes that holds summaries of n chunks of the sequence.
void lctx_kv_cache::each_summary_run(int32_t seq, int32_t first_chunk, int32_t n_chunk, const run_visitor & f) const {
    for (const layer_place & l : layers_) {
        if (!l.store || !l.store->summaries) {
            continue;
        }
        const int32_t first = has_open() ? l.heads.first_query : l.heads.first;
        const int32_t n = has_open() ? l.heads.n_query : l.heads.n;
        for (int32_t head = first; n_chunk > 0 && head < first + n; head++) {
            ggml_tensor * t = l.store->summaries;
            f(*l.store, t, seq * t->nb[3] + head * t->nb[2] + first_chunk * t->nb[1], n_chunk * t->nb[1]);
        }
    }
}

// Every run of bytes that holds summaries or open queries of the sequence.
void lctx_kv_cache::each_chunk_run(int32_t seq, const run_visitor & f) const {
    each_summary_run(seq, 0, shape_.n_complete(seqs_[seq].n_pos), f);
    for (const layer_place & l : layers_) {
        for (int32_t i = 0; has_open() && i < 2 * l.heads.n_query; i++) {
            const int32_t head = l.heads.first_query + i / 2, half = i % 2;
            if (seqs_[seq].open[half] >= 0) {
                ggml_tensor * t = l.store->open;
                const size_t half_size = chunks_->chunk_size * t->nb[1];
                f(*l.store, t, seq * t->nb[3] + head * t->nb[2] + half * half_size, half_size);
            }
        }
    }
}

void lctx_kv_cache::copy_chunks(int32_t src, int32_t dst) {
    each_chunk_run(dst, [&](lctx_kv_store & store, ggml_tensor * t, size_t offset, size_t size) {
        store.copy(t, offset + src * t->nb[3] - dst * t->nb[3], offset, size);
    });
}

// At most: a chunk in each half of the ring.
size_t lctx_kv_cache::chunk_bytes(int32_t n_pos) const {
    if (!chunks_ || chunks_->by_keys()) {
        return 0;
    }
    const ggml_type type = lctx_summary_type(chunks_->representation, shape_.head_dim_k, shape_.type_k);
    const size_t summary = ggml_row_size(type, chunks_->summary_dim(shape_.head_dim_k));
    const size_t query = shape_.head_dim_k * sizeof(float);
    size_t bytes = shape_.n_complete(n_pos) * summary * (has_open() ? n_query_head_total_ : n_head_total_);
    if (has_open() && n_pos > 0) {
        bytes += (n_pos > chunks_->chunk_size ? 2 : 1) * chunks_->chunk_size * query * n_query_head_total_;
    }
    return bytes;
}
