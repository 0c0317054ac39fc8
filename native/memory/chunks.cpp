// Representations of complete chunks, and the queries of the open one.
//
// The ring of queries has two halves of one chunk each. Whole chunks of a ubatch need no ring: only the queries of its last chunk are
// kept, in the half that does not hold the chunk in which the batch began, so that a batch can be taken back whole.
#include "memory.h"

#include <cstring>

// A batch begins: what its first rows continue must outlive it.
void lctx_memory::keep_open() {
    for (sequence & s : seqs_) {
        const int32_t half = open_ && s.n_pos > 0 ? s.half((s.n_pos - 1) / chunks_->chunk_size) : -1;
        s.kept_half = half >= 0 ? half : s.kept_half;
    }
}

void lctx_memory::place_open(const llama_ubatch & ubatch) {
    open_rows_.assign(ubatch.n_tokens, -1);
    if (!open_) {
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
void lctx_memory::forget_open(int32_t seq) {
    for (int32_t & chunk : seqs_[seq].open) {
        if (chunk >= 0 && chunk * chunks_->chunk_size >= seqs_[seq].n_pos) {
            chunk = -1;
        }
    }
}

// f(tensor, offset, size) for every run of bytes that holds representations or open queries of the sequence.
void lctx_memory::each_chunk_run(int32_t seq, const std::function<void(ggml_tensor *, size_t, size_t)> & f) const {
    for (int64_t head = 0; n_complete(seqs_[seq].n_pos) > 0 && head < reps_->ne[2]; head++) {
        f(reps_, seq * reps_->nb[3] + head * reps_->nb[2], n_complete(seqs_[seq].n_pos) * reps_->nb[1]);
    }
    for (int64_t head = 0; open_ && head < open_->ne[2]; head++) {
        for (int32_t half = 0; half < 2; half++) {
            if (seqs_[seq].open[half] >= 0) {
                const size_t half_size = chunks_->chunk_size * open_->nb[1];
                f(open_, seq * open_->nb[3] + head * open_->nb[2] + half * half_size, half_size);
            }
        }
    }
}

void lctx_memory::copy_chunks(int32_t src, int32_t dst) {
    each_chunk_run(dst, [&](ggml_tensor * t, size_t offset, size_t size) {
        memcpy((char *)t->data + offset, (char *)t->data + offset + (src - dst) * (int64_t)t->nb[3], size);
    });
}

// At most: a chunk in each half of the ring.
size_t lctx_memory::chunk_bytes(int32_t n_pos) const {
    size_t bytes = reps_ ? (size_t)n_complete(n_pos) * reps_->nb[1] * reps_->ne[2] : 0;
    if (open_ && n_pos > 0) {
        bytes += (size_t)(n_pos > chunks_->chunk_size ? 2 : 1) * chunks_->chunk_size * open_->nb[1] * open_->ne[2];
    }
    return bytes;
}
