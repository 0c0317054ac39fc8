// The queries of the open chunk.
//
// Their ring has two halves of one chunk each. Whole chunks of a ubatch need no ring: only the queries of its last
// chunk are kept, in the half that does not hold the chunk in which the batch began, so that a batch can be taken back
// whole.
#include "llama-batch.h"
#include "sequences.h"

#include <algorithm>

void lctx_sequences::keep_open() {
    for (lctx_sequence & s : seqs_) {
        const int32_t half = has_open() && s.n_pos > 0 ? s.half((s.n_pos - 1) / chunks_->chunk_size) : -1;
        s.kept_half = half >= 0 ? half : s.kept_half;
    }
}

void lctx_sequences::assign_open(const llama_ubatch & ubatch) {
    open_rows_.assign(ubatch.n_tokens, -1);
    if (!has_open()) {
        return;
    }
    const int32_t chunk_size = chunks_->chunk_size;
    std::vector<int32_t> last(seqs_.size(), -1);
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0], half = seqs_[seq].half(ubatch.pos[i] / chunk_size);
        open_rows_[i] =
            ~(std::max(half, 0) * chunk_size + ubatch.pos[i] % chunk_size);  // where the chunk was begun, if it was
        last[seq] = ubatch.pos[i] / chunk_size;
    }
    for (int32_t seq = 0; seq < size(); seq++) {
        lctx_sequence & s = seqs_[seq];
        if (last[seq] >= 0 && s.half(last[seq]) < 0) {
            s.open[1 - s.kept_half] = last[seq];
        }
    }
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t half = seqs_[ubatch.seq_id[i][0]].half(ubatch.pos[i] / chunk_size);
        if (half >= 0) {
            open_rows_[i] = half * chunk_size + ubatch.pos[i] % chunk_size;
        }
    }
}
