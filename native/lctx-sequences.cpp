// The C API: sequences, and their states.
#include "base/firewall.h"
#include "base/log.h"
#include "context-sequences.h"
#include "handles.h"
#include "llama-context.h"

#include <algorithm>
#include <initializer_list>

namespace {

// Empty the memory; what was NaN would be read again.
void clear(lctx_context * ctx) {
    llama_memory_clear(llama_get_memory(ctx->ctx), ctx->has_nan);
    ctx->foreign.forget(-1);
    if (ctx->mtp) {
        ctx->mtp->clear(ctx->has_nan);
    }
    ctx->has_nan = false;
}

// Clear the values too, if they may be NaN, once all sequences are empty.
void clear_nan(lctx_context * ctx) {
    bool is_empty = ctx->has_nan;
    for (uint32_t seq = 0; is_empty && seq < llama_n_seq_max(ctx->ctx); seq++) {
        is_empty = lctx_n_held(ctx, seq) == 0;
    }
    if (is_empty) {
        clear(ctx);
    }
}

// Run f, which returns true, on sequences that there are; errors of the memory are the context's error.
template <typename F> bool guarded(lctx_context * ctx, std::initializer_list<int32_t> seqs, F && f) {
    bool done = false;
    ctx->error.clear();
    lctx_guard(&ctx->error, [&] {
        for (int32_t seq : seqs) {
            if (!lctx_is_sequence(ctx, seq)) {
                throw lctx_refusal(lctx_no_sequence(ctx, seq));
            }
        }
        lctx_log_begin();
        done = f();
        if (!done && ctx->error.empty()) {
            ctx->error = lctx_failure(ctx, "the cache refused");
        }
    });
    return done;
}

// The memory of a context with a method. Throws.
lctx_context_memory & with_method(lctx_context * ctx, const char * what = "has no slices") {
    if (!ctx->memory) {
        throw lctx_refusal(std::string("llama.cpp's own KV cache ") + what);
    }
    return *ctx->memory;
}

constexpr const char * NO_CHOICE = "reads everything: queries choose with method=longheads";
constexpr const char * NO_COMPRESSION = "does not compress a text that was read: use method=kvzip";

// Throws when what was read may be the zeros of an RPC server that has ended, or of a file that could not be read.
void check_sources(const lctx_context * ctx) {
    std::string lost = lctx_rpc_lost(ctx->model->servers);
    if (lost.empty() && ctx->memory) {
        lost = ctx->memory->cache().take_io_error();
    }
    if (!lost.empty()) {
        throw lctx_refusal(lost);
    }
}

// Return the size of what `write` writes, with buf != NULL after its bytes were written there; 0 when that fails or buf
// is too small.
template <typename F> size_t write_out(lctx_context * ctx, int32_t seq, uint8_t * buf, size_t size, F && write) {
    size_t n = 0;
    guarded(ctx, {seq}, [&] {
        lctx_state_counter counted;
        write(counted);
        if (buf && counted.n_bytes() > size) {
            throw lctx_refusal("it takes " + std::to_string(counted.n_bytes()) + " bytes, not " + std::to_string(size));
        }
        if (buf) {
            lctx_state_writer io(buf);
            write(io);
        }
        check_sources(ctx);
        n = counted.n_bytes();
        return true;
    });
    return n;
}

}  // namespace

int32_t lctx_seq_rm(lctx_context * ctx, int32_t seq, int32_t p0, int32_t p1) {
    return guarded(ctx, {seq}, [&] {
        bool done = true;
        if (ctx->memory) {
            done = ctx->memory->seq_rm(seq, p0, p1);
        } else {
            ctx->foreign.remove(seq, p0, p1);
        }
        lctx_cut_mtp(ctx, seq, done ? p0 : lctx_n_held(ctx, seq));
        clear_nan(ctx);
        return done;
    });
}

int32_t lctx_seq_restorable(const lctx_context * ctx, int32_t seq, int32_t n) {
    int32_t most = 0;
    lctx_guard(&ctx->error, [&] {
        if (lctx_is_sequence(ctx, seq)) {
            most = ctx->memory ? ctx->memory->restorable(seq, n) : ctx->foreign.restorable(seq, n);
        }
    });
    return most;
}

int32_t lctx_seq_cp(lctx_context * ctx, int32_t src, int32_t dst, int32_t n) {
    return guarded(ctx, {src, dst}, [&] {
        if (!ctx->memory) {
            ctx->foreign.copy(src, dst, n);
        }
        const bool done = !ctx->memory || ctx->memory->copy(src, dst, n);
        ctx->ctx->memory_update(false);  // what llama.cpp copies, it copies now: dst may be saved or cut next
        if (ctx->mtp && done) {
            ctx->mtp->copy(src, dst, n);
        }
        return done;
    });
}

int32_t lctx_context_rollback(const lctx_context * ctx) {
    const llama_model * model = ctx->model->model;
    if (ctx->memory && !ctx->memory->has_foreign()) {
        return LCTX_ROLLBACK_FREE;
    }
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        return LCTX_ROLLBACK_NONE;
    }
    return llama_model_n_swa(model) > 0 ? LCTX_ROLLBACK_WINDOW : LCTX_ROLLBACK_FREE;
}

int32_t lctx_context_cut_before(const lctx_context * ctx, int32_t pos) {
    pos = std::max(pos, 0);
    return ctx->memory ? ctx->memory->cache().sequences().cut_before(pos) : pos;
}

int32_t lctx_seq_checkpoint(lctx_context * ctx, int32_t seq) {
    return guarded(ctx, {seq}, [&] {
        if (ctx->memory) {
            ctx->memory->checkpoint(seq);
        } else {
            ctx->foreign.save(seq);
        }
        return true;
    });
}

int32_t lctx_seq_checkpoints(const lctx_context * ctx, int32_t seq, int32_t * positions, int32_t n) {
    int32_t n_all = 0;
    lctx_guard(&ctx->error, [&] {
        if (ctx->memory && lctx_is_sequence(ctx, seq)) {
            const std::vector<int32_t> all = ctx->memory->saved_checkpoints(seq);
            n_all = (int32_t)all.size();
            std::copy_n(all.begin(), std::min(std::max(n, 0), n_all), positions);
        }
    });
    return n_all;
}

int32_t lctx_seq_replay(lctx_context * ctx, int32_t seq, int32_t on) {
    int32_t most = LCTX_INVALID;
    guarded(ctx, {seq}, [&] {
        lctx_kv_cache & cache = with_method(ctx, NO_COMPRESSION).cache();
        most = on ? cache.begin_replay(seq) : 0;
        if (!on) {
            cache.end_replay(seq);
        }
        return true;
    });
    return most;
}

int32_t lctx_seq_replay_piece(lctx_context * ctx, int32_t seq, int32_t first, int32_t end) {
    int32_t done = LCTX_INVALID;
    guarded(ctx, {seq}, [&] {
        done = with_method(ctx, NO_COMPRESSION).cache().replay_piece(seq, first, end);
        return true;
    });
    return done;
}

int32_t lctx_context_select_from(lctx_context * ctx, int32_t from) {
    return guarded(ctx, {}, [&] {
        with_method(ctx, NO_CHOICE).cache().select_from(from);
        return true;
    });
}

int32_t lctx_seq_compress(lctx_context * ctx, int32_t seq, double fraction) {
    return guarded(ctx, {seq}, [&] {
        if (!(fraction > 0.0 && fraction <= 1.0)) {
            throw lctx_refusal("the fraction of rows that stay is above 0 and at most 1, not " +
                               std::to_string(fraction));
        }
        return with_method(ctx, NO_COMPRESSION).cache().compress(seq, fraction);
    });
}

void lctx_seq_keep(lctx_context * ctx, int32_t seq) {
    guarded(ctx, {seq}, [&] {
        if (ctx->memory) {
            ctx->memory->seq_keep(seq);
        } else {
            ctx->foreign.keep(seq);
        }
        for (int32_t other = 0; other < (int32_t)llama_n_seq_max(ctx->ctx); other++) {
            lctx_cut_mtp(ctx, other, lctx_n_held(ctx, other));
        }
        return true;
    });
}

size_t lctx_state_size(lctx_context * ctx, int32_t seq) {
    size_t n = 0;
    guarded(ctx, {std::max(seq, 0)}, [&] {
        n = seq < 0 ? llama_state_get_size(ctx->ctx) : llama_state_seq_get_size(ctx->ctx, seq);
        return n > 0;
    });
    return n;
}

size_t lctx_state_get(lctx_context * ctx, int32_t seq, uint8_t * buf, size_t size) {
    size_t n = 0;
    guarded(ctx, {std::max(seq, 0)}, [&] {
        n = seq < 0 ? llama_state_get_data(ctx->ctx, buf, size) : llama_state_seq_get_data(ctx->ctx, buf, size, seq);
        check_sources(ctx);
        return n > 0;
    });
    return ctx->error.empty() ? n : 0;
}

size_t lctx_state_set(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size) {
    size_t n = 0;
    const auto read = [&] {
        ctx->foreign.check_state(seq, buf, size);
        ctx->foreign.make_room(seq);
        n = seq < 0 ? llama_state_set_data(ctx->ctx, buf, size) : llama_state_seq_set_data(ctx->ctx, buf, size, seq);
        return n > 0;
    };
    const bool done = guarded(ctx, {std::max(seq, 0)}, read);
    for (int32_t i = 0; i < (int32_t)llama_n_seq_max(ctx->ctx); i++) {
        lctx_cut_mtp(ctx, i, i == seq || seq < 0 ? 0 : lctx_n_held(ctx, i));
    }
    if (!done && seq < 0) {  // llama.cpp may have given up before the memory was asked
        lctx_guard(nullptr, [&] { clear(ctx); });
    } else if (!done && lctx_is_sequence(ctx, seq)) {
        lctx_guard(nullptr, [&] {
            llama_memory_seq_rm(llama_get_memory(ctx->ctx), seq, -1, -1);
            ctx->foreign.forget(seq);
        });
    }
    return done ? n : 0;
}

int32_t lctx_context_slices(const lctx_context * ctx) {
    int32_t slices = LCTX_SLICES_NONE;
    lctx_guard(nullptr, [&] {
        if (ctx->memory && ctx->memory->cache().why_no_slices().empty()) {
            slices = ctx->memory->has_foreign() ? LCTX_SLICES_AND_FOREIGN : LCTX_SLICES_ROWS;
        }
    });
    return slices;
}

size_t lctx_slice_get(lctx_context * ctx, int32_t seq, int32_t first, int32_t end, uint8_t * buf, size_t size) {
    return write_out(ctx, seq, buf, size,
                     [&](llama_io_write_i & io) { with_method(ctx).cache().slice_write(io, seq, first, end); });
}

int32_t lctx_slice_append(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size) {
    return guarded(ctx, {seq}, [&] {
        lctx_state_reader io(buf, size);
        with_method(ctx).slice_read(io, seq);
        return true;
    });
}

int32_t lctx_slice_insert(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size, int32_t skip, int32_t n) {
    return guarded(ctx, {seq}, [&] {
        lctx_state_reader io(buf, size);
        with_method(ctx).slice_insert(io, seq, skip, n);
        return true;
    });
}

int32_t lctx_seq_exact(const lctx_context * ctx, int32_t seq) {
    return !lctx_is_sequence(ctx, seq) ? 0
           : ctx->memory               ? ctx->memory->cache().sequences().n_exact(seq)
                                       : lctx_n_past(ctx, seq);
}

int32_t lctx_seq_drop(lctx_context * ctx, int32_t seq, int32_t first, int32_t end) {
    return guarded(ctx, {seq}, [&] {
        const bool done = with_method(ctx).drop(seq, first, end);
        lctx_cut_mtp(ctx, seq, done ? first : lctx_n_held(ctx, seq));
        return done;
    });
}

size_t lctx_foreign_get(lctx_context * ctx, int32_t seq, uint8_t * buf, size_t size) {
    return write_out(ctx, seq, buf, size, [&](llama_io_write_i & io) { with_method(ctx).write_foreign(io, seq); });
}

int32_t lctx_foreign_set(lctx_context * ctx, int32_t seq, const uint8_t * buf, size_t size) {
    return guarded(ctx, {seq}, [&] {
        lctx_cut_mtp(ctx, seq, 0);  // a foreign state that does not fit leaves the sequence empty
        lctx_state_reader io(buf, size);
        with_method(ctx).read_foreign(io, seq);
        return true;
    });
}

void lctx_clear(lctx_context * ctx) {
    lctx_guard(&ctx->error, [&] { clear(ctx); });
}
