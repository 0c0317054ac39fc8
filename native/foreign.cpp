#include "foreign.h"

#include "llama-context.h"
#include "llama-model.h"
#include "memory/check-state.h"
#include "memory/state-io.h"

#include <algorithm>
#include <string>

namespace {

llama_memory_t memory_of(const lctx_context & ctx) {
    return llama_get_memory(ctx.ctx);
}

// The checkpoint of a sequence, if it is of at most its first p tokens, or nullptr.
const lctx_foreign_checkpoint * checkpoint_within(const lctx_context & ctx, int32_t seq, int32_t p) {
    const auto it = ctx.foreign_checkpoints.find(seq);
    return it == ctx.foreign_checkpoints.end() || it->second.pos > p ? nullptr : &it->second;
}

// That of exactly its first p tokens.
const lctx_foreign_checkpoint * checkpoint_at(const lctx_context & ctx, int32_t seq, int32_t p) {
    const lctx_foreign_checkpoint * saved = checkpoint_within(ctx, seq, p);
    return saved && saved->pos == p ? saved : nullptr;
}

// Put a sequence, which has more of the same tokens, back to a checkpoint.
void restore(lctx_context & ctx, int32_t seq, const lctx_foreign_checkpoint & saved) {
    try {
        lctx_state_reader io(saved.bytes.data(), saved.bytes.size());
        memory_of(ctx)->state_read(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    } catch (const std::exception & e) {
        llama_memory_seq_rm(memory_of(ctx), seq, -1, -1);
        lctx_foreign_forget(ctx, seq);
        throw lctx_refusal(std::string("the checkpoint could not be restored, the sequence is empty: ") + e.what());
    }
    llama_memory_seq_rm(memory_of(ctx), seq, saved.pos, -1);
}

void require_reach(const lctx_context & ctx, int32_t seq, int32_t p) {
    if (lctx_foreign_restorable(ctx, seq, p) != std::min(p, lctx_n_past(&ctx, seq))) {
        throw lctx_refusal("layers with a window or a recurrent state cannot go back to position " + std::to_string(p) +
                           "; evaluate the prefix again");
    }
}

}  // namespace

int32_t lctx_foreign_restorable(const lctx_context & ctx, int32_t seq, int32_t n) {
    n = std::max(0, std::min(n, lctx_n_past(&ctx, seq)));
    if (n == lctx_n_past(&ctx, seq)) {
        return n;
    }
    if (lctx_context_rollback(&ctx) == LCTX_ROLLBACK_NONE) {
        const lctx_foreign_checkpoint * saved = checkpoint_within(ctx, seq, n);
        return saved ? saved->pos : 0;
    }
    const int32_t first = llama_memory_seq_pos_min(memory_of(ctx), seq), n_swa = llama_model_n_swa(ctx.model->model);
    const bool is_lost = n_swa > 0 && first > std::max(0, n - n_swa);
    return is_lost ? 0 : n;
}

void lctx_foreign_save(lctx_context & ctx, int32_t seq) {
    const int32_t n_past = lctx_n_past(&ctx, seq);
    if (lctx_context_rollback(&ctx) != LCTX_ROLLBACK_NONE || n_past == 0 || checkpoint_at(ctx, seq, n_past)) {
        return;
    }
    ctx.foreign_checkpoints[seq] = {n_past, lctx_save_partial(*memory_of(ctx), seq)};
}

void lctx_foreign_forget(lctx_context & ctx, int32_t seq) {
    if (seq < 0) {
        ctx.foreign_checkpoints.clear();
    } else {
        ctx.foreign_checkpoints.erase(seq);
    }
}

void lctx_foreign_withdraw(lctx_context & ctx, int32_t seq, int32_t n) {
    if (llama_memory_seq_rm(memory_of(ctx), seq, n, -1)) {
        return;
    }
    if (const lctx_foreign_checkpoint * saved = checkpoint_within(ctx, seq, n)) {
        lctx_guard(nullptr, [&] { restore(ctx, seq, *saved); });
    } else {
        llama_memory_seq_rm(memory_of(ctx), seq, -1, -1);
        lctx_foreign_forget(ctx, seq);
    }
}

void lctx_foreign_remove(lctx_context & ctx, int32_t seq, int32_t p0, int32_t p1) {
    const int32_t n_past = lctx_n_past(&ctx, seq);
    p0 = std::max(p0, 0);
    if (p0 >= n_past || (p1 >= 0 && p1 <= p0)) {
        return;
    }
    if (p1 < 0 || p1 >= n_past) {
        require_reach(ctx, seq, p0);
    } else if (lctx_context_rollback(&ctx) == LCTX_ROLLBACK_NONE) {
        throw lctx_refusal("of a recurrent state only the end can be removed, not positions " + std::to_string(p0) + " .. " +
                           std::to_string(p1));
    }
    if (const lctx_foreign_checkpoint * saved = checkpoint_at(ctx, seq, p0)) {
        restore(ctx, seq, *saved);
        return;
    }
    lctx_foreign_forget(ctx, seq);
    if (!llama_memory_seq_rm(memory_of(ctx), seq, p0, p1)) {
        throw lctx_refusal("the memory cannot remove positions " + std::to_string(p0) + " .. " + std::to_string(p1));
    }
}

// A memory copies whole sequences; what is too much is cut off the copy.
void lctx_foreign_copy(lctx_context & ctx, int32_t src, int32_t dst, int32_t n) {
    const int32_t n_past = lctx_n_past(&ctx, src);
    n = n < 0 ? n_past : std::min(n, n_past);
    require_reach(ctx, src, n);
    if (src == dst) {
        return;
    }
    llama_memory_seq_rm(memory_of(ctx), dst, -1, -1);
    lctx_foreign_forget(ctx, dst);
    if (n == 0) {
        return;
    }
    llama_memory_seq_cp(memory_of(ctx), src, dst, -1, -1);
    ctx.ctx->memory_update(false);  // what llama.cpp copies, it copies now: dst may be saved or cut next
    const lctx_foreign_checkpoint * saved = checkpoint_at(ctx, src, n);
    if (n < n_past && saved) {
        restore(ctx, dst, *saved);
    } else if (n < n_past) {
        llama_memory_seq_rm(memory_of(ctx), dst, n, -1);
    }
}

void lctx_foreign_keep(lctx_context & ctx, int32_t seq) {
    for (int32_t other = 0; other < (int32_t)llama_n_seq_max(ctx.ctx); other++) {
        if (other != seq) {
            llama_memory_seq_rm(memory_of(ctx), other, -1, -1);
            lctx_foreign_forget(ctx, other);
        }
    }
}

void lctx_foreign_check_state(const lctx_context & ctx, int32_t seq, const uint8_t * buf, size_t size) {
    lctx_state_reader io(buf, size);
    uint32_t head[2];  // of one sequence: a number, and the sequence that was saved
    io.read(head, seq < 0 ? sizeof(uint32_t) : sizeof(head));
    if (seq < 0) {
        const std::string arch = ctx.model->model->arch_name();
        std::string saved(std::min<size_t>(head[0], arch.size() + 1), 0);  // no more is taken, whatever the state says
        io.read(saved.data(), saved.size());
        if (saved != arch) {
            throw lctx_refusal("the saved state does not fit: it belongs to another architecture");
        }
    }
    if (!ctx.memory && memory_of(ctx)) {
        lctx_check_state(io, *memory_of(ctx), ctx.model->model->hparams, {seq, 0, {}}, nullptr);
    }
}

void lctx_foreign_make_room(lctx_context & ctx, int32_t seq) {
    lctx_foreign_forget(ctx, seq);
    if (!ctx.memory && memory_of(ctx) && seq >= 0) {
        llama_memory_seq_rm(memory_of(ctx), seq, -1, -1);
    }
}
