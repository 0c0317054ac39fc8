#include "foreign.h"

#include "../base/firewall.h"
#include "../base/refusal.h"
#include "../memory/check-state.h"
#include "../memory/state-io.h"
#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <string>

void lctx_foreign::open(llama_context * ctx, bool is_alone) {
    ctx_ = ctx;
    is_alone_ = is_alone;
}

llama_memory_i * lctx_foreign::memory() const {
    return llama_get_memory(ctx_);
}

bool lctx_foreign::is_recurrent() const {
    const llama_model * model = llama_get_model(ctx_);
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
}

int32_t lctx_foreign::n_past(int32_t seq) const {
    return llama_memory_seq_pos_max(memory(), seq) + 1;
}

// The checkpoint of a sequence, if it is of at most its first p tokens, or nullptr.
const lctx_foreign::checkpoint * lctx_foreign::checkpoint_within(int32_t seq, int32_t p) const {
    const auto it = checkpoints_.find(seq);
    return it == checkpoints_.end() || it->second.pos > p ? nullptr : &it->second;
}

// That of exactly its first p tokens.
const lctx_foreign::checkpoint * lctx_foreign::checkpoint_at(int32_t seq, int32_t p) const {
    const checkpoint * saved = checkpoint_within(seq, p);
    return saved && saved->pos == p ? saved : nullptr;
}

// Put a sequence, which has more of the same tokens, back to a checkpoint.
void lctx_foreign::restore(int32_t seq, const checkpoint & saved) {
    try {
        lctx_state_reader io(saved.bytes.data(), saved.bytes.size());
        memory()->state_read(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    } catch (const std::exception & e) {
        llama_memory_seq_rm(memory(), seq, -1, -1);
        forget(seq);
        throw lctx_refusal(std::string("the checkpoint could not be restored, the sequence is empty: ") + e.what());
    }
    llama_memory_seq_rm(memory(), seq, saved.pos, -1);
}

void lctx_foreign::require_reach(int32_t seq, int32_t p) const {
    if (restorable(seq, p) != std::min(p, n_past(seq))) {
        throw lctx_refusal("layers with a window or a recurrent state cannot go back to position " + std::to_string(p) +
                           "; evaluate the prefix again");
    }
}

int32_t lctx_foreign::restorable(int32_t seq, int32_t n) const {
    n = std::max(0, std::min(n, n_past(seq)));
    if (n == n_past(seq)) {
        return n;
    }
    if (is_recurrent()) {
        const checkpoint * saved = checkpoint_within(seq, n);
        return saved ? saved->pos : 0;
    }
    const int32_t first = llama_memory_seq_pos_min(memory(), seq), n_swa = llama_model_n_swa(llama_get_model(ctx_));
    const bool is_lost = n_swa > 0 && first > std::max(0, n - n_swa);
    return is_lost ? 0 : n;
}

void lctx_foreign::save(int32_t seq) {
    const int32_t end = n_past(seq);
    if (!is_recurrent() || end == 0 || checkpoint_at(seq, end)) {
        return;
    }
    checkpoints_[seq] = {end, lctx_save_partial(*memory(), seq)};
}

void lctx_foreign::forget(int32_t seq) {
    if (seq < 0) {
        checkpoints_.clear();
    } else {
        checkpoints_.erase(seq);
    }
}

void lctx_foreign::withdraw(int32_t seq, int32_t n) {
    if (llama_memory_seq_rm(memory(), seq, n, -1)) {
        return;
    }
    if (const checkpoint * saved = checkpoint_within(seq, n)) {
        lctx_guard(nullptr, [&] { restore(seq, *saved); });
    } else {
        llama_memory_seq_rm(memory(), seq, -1, -1);
        forget(seq);
    }
}

void lctx_foreign::remove(int32_t seq, int32_t p0, int32_t p1) {
    const int32_t end = n_past(seq);
    p0 = std::max(p0, 0);
    if (p0 >= end || (p1 >= 0 && p1 <= p0)) {
        return;
    }
    if (p1 < 0 || p1 >= end) {
        require_reach(seq, p0);
    } else if (is_recurrent()) {
        throw lctx_refusal("of a recurrent state only the end can be removed, not positions " + std::to_string(p0) +
                           " .. " + std::to_string(p1));
    }
    if (const checkpoint * saved = checkpoint_at(seq, p0)) {
        restore(seq, *saved);
        return;
    }
    forget(seq);
    if (!llama_memory_seq_rm(memory(), seq, p0, p1)) {
        throw lctx_refusal("the memory cannot remove positions " + std::to_string(p0) + " .. " + std::to_string(p1));
    }
}

// A memory copies whole sequences; what is too much is cut off the copy.
void lctx_foreign::copy(int32_t src, int32_t dst, int32_t n) {
    const int32_t end = n_past(src);
    n = n < 0 ? end : std::min(n, end);
    require_reach(src, n);
    if (src == dst) {
        return;
    }
    llama_memory_seq_rm(memory(), dst, -1, -1);
    forget(dst);
    if (n == 0) {
        return;
    }
    llama_memory_seq_cp(memory(), src, dst, -1, -1);
    ctx_->memory_update(false);  // what llama.cpp copies, it copies now: dst may be saved or cut next
    const checkpoint * saved = checkpoint_at(src, n);
    if (n < end && saved) {
        restore(dst, *saved);
    } else if (n < end) {
        llama_memory_seq_rm(memory(), dst, n, -1);
    }
}

void lctx_foreign::keep(int32_t seq) {
    for (int32_t other = 0; other < (int32_t)llama_n_seq_max(ctx_); other++) {
        if (other != seq) {
            llama_memory_seq_rm(memory(), other, -1, -1);
            forget(other);
        }
    }
}

void lctx_foreign::check_state(int32_t seq, const uint8_t * buf, size_t size) const {
    lctx_state_reader io(buf, size);
    uint32_t head[2];  // of one sequence: a number, and the sequence that was saved
    io.read(head, seq < 0 ? sizeof(uint32_t) : sizeof(head));
    if (seq < 0) {
        const std::string arch = llama_get_model(ctx_)->arch_name();
        std::string saved(std::min<size_t>(head[0], arch.size() + 1), 0);  // no more is taken, whatever the state says
        io.read(saved.data(), saved.size());
        if (saved != arch) {
            throw lctx_refusal("the saved state does not fit: it belongs to another architecture");
        }
    }
    if (is_alone_ && memory()) {
        lctx_check_state(io, *memory(), llama_get_model(ctx_)->hparams, {seq, 0, {}}, nullptr);
    }
}

void lctx_foreign::make_room(int32_t seq) {
    forget(seq);
    if (is_alone_ && memory() && seq >= 0) {
        llama_memory_seq_rm(memory(), seq, -1, -1);
    }
}
