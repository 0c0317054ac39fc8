// Divides a batch into ubatches: at the borders where heads evict, and as llama.cpp's own memory needs it.
#include "batch.h"
#include "context-memory.h"
#include "llama-impl.h"

#include <algorithm>

namespace {

// Return how many of n tokens from `first` on a ubatch takes if the batch continues: up to a multiple of the tile in
// the last sequence, so that a text that is divided in other ways has the same tiles.
int32_t whole_tiles(const llama_batch & batch, int32_t first, int32_t n, int32_t tile) {
    const int32_t after = first + n, beyond = after < batch.n_tokens ? batch.pos[after] % tile : 0;
    const bool continues = after < batch.n_tokens && batch.seq_id[after][0] == batch.seq_id[after - 1][0];
    const int32_t begin = after - beyond;
    return continues && begin > first && batch.seq_id[begin - 1][0] == batch.seq_id[after][0] ? n - beyond : n;
}

}  // namespace

// Tokens in the order of the batch: none of a ubatch follows a border of its sequence.
std::vector<llama_ubatch> lctx_context_memory::split(llama_batch_allocr & balloc, int32_t n_ubatch) const {
    const llama_batch & batch = balloc.get_batch();
    std::vector<llama_ubatch> ubatches;
    for (int32_t first = 0; first < batch.n_tokens; first += (int32_t)ubatches.back().n_tokens) {
        std::vector<char> is_over(cache_->sequences().size(), 0);
        int32_t n = 0;
        for (; n < std::min(n_ubatch, batch.n_tokens - first) && !is_over[batch.seq_id[first + n][0]]; n++) {
            is_over[batch.seq_id[first + n][0]] = cache_->sequences().until_border(batch.pos[first + n]) == 1;
        }
        const lctx_chunks * chunks = cache_->method().chunks();
        ubatches.push_back(balloc.split_simple(chunks ? whole_tiles(batch, first, n, chunks->tile) : n));
    }
    return ubatches;
}

// As many tokens of every sequence that the ubatch takes: those that llama.cpp will choose, up to the nearest of their
// borders. None, and what is wrong, when it has chosen others.
std::vector<llama_ubatch> lctx_context_memory::split_equal(llama_batch_allocr & balloc, int32_t n_ubatch,
                                                           bool one_sequence, std::string & wrong) const {
    const llama_batch & batch = balloc.get_batch();
    std::vector<int32_t> next = cache_->sequences().lengths();
    std::vector<llama_ubatch> ubatches;
    for (int32_t n_done = 0; n_done < batch.n_tokens; n_done += (int32_t)ubatches.back().n_tokens) {
        std::vector<char> is_in(cache_->sequences().size(), 0);
        int32_t n_seq = 0, last = -1, n_each = INT32_MAX;
        for (int32_t i = 0; i < batch.n_tokens; i++) {
            const int32_t seq = batch.seq_id[i][0];
            const bool follows = n_seq == 0 || (!one_sequence && (!foreign_->splits_sequential() || seq == last + 1));
            if (batch.pos[i] >= next[seq] && !is_in[seq] && follows) {
                is_in[seq] = 1, last = seq, n_seq++;
                n_each = std::min(n_each, cache_->sequences().until_border(next[seq]));
            }
        }
        const auto n = (uint32_t)std::min<int64_t>(n_ubatch, (int64_t)n_each * n_seq);
        llama_ubatch ubatch = one_sequence
                                  ? balloc.split_seq(n)
                                  : balloc.split_equal(n, foreign_->splits_sequential(), foreign_->n_keep_tail());
        if (ubatch.n_tokens == 0) {
            return {};
        }
        for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
            const int32_t seq = ubatch.seq_id[i][0];
            if (!is_in[seq] || ubatch.pos[i] != next[seq]++) {
                wrong = "llama.cpp has divided the batch in another way than the KV cache expects";
                return {};
            }
        }
        ubatches.push_back(std::move(ubatch));
    }
    return ubatches;
}

llama_memory_context_ptr lctx_context_memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch,
                                                         bool embd_all) {
    llama_memory_status status;
    std::string wrong = cache_->admit(balloc.get_batch(), status);
    if (wrong.empty()) {
        balloc.split_reset();
        if (!foreign_) {
            return std::make_unique<lctx_batch_context>(*cache_, split(balloc, (int32_t)n_ubatch));
        }
        const bool one_sequence = foreign_->splits_by_sequence(embd_all);
        const std::vector<llama_ubatch> ubatches = foreign_->splits_equal()
                                                       ? split_equal(balloc, (int32_t)n_ubatch, one_sequence, wrong)
                                                       : split(balloc, (int32_t)n_ubatch);
        llama_memory_context_ptr joint = ubatches.empty() ? nullptr : foreign_->batch(*cache_, ubatches);
        if (joint) {
            return joint;
        }
        status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
        wrong = wrong.empty() ? "the memory of windows or recurrent states has no room for the batch: remove a sequence"
                              : wrong;
    }
    LLAMA_LOG_WARN("lctx: %s\n", wrong.c_str());
    cache_->refuse(wrong);
    return std::make_unique<lctx_batch_context>(*cache_, status);
}

llama_memory_context_ptr lctx_context_memory::init_full() {
    return foreign_ ? foreign_->full(*cache_)
                    : std::make_unique<lctx_batch_context>(*cache_, std::vector<llama_ubatch>());
}

llama_memory_context_ptr lctx_context_memory::init_update(llama_context * lctx, bool optimize) {
    return foreign_ ? foreign_->memory().init_update(lctx, optimize)
                    : std::make_unique<lctx_batch_context>(*cache_, LLAMA_MEMORY_STATUS_NO_UPDATE);
}
