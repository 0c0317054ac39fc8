#include "kv-cache.h"

#include "llama-impl.h"
#include "slice.h"
#include "state.h"

#include <algorithm>

lctx_kv_cache::lctx_kv_cache(const llama_model & model, const llama_memory_params & params,
                             const llama_cparams & cparams, const std::vector<lctx_claimed> & layers,
                             std::unique_ptr<lctx_method> method, uint32_t n_ctx, uint64_t kv_limit,
                             const lctx_offload & offload)
    : method_(std::move(method)),
      has_sections_(model.hparams.n_pos_per_embd() > 1),
      parts_(model, params, cparams, layers, *method_, n_ctx, kv_limit, offload) {
    if (!model.hparams.no_alloc) {
        clear();
    }
}

std::string lctx_kv_cache::why_unsound() const {
    for (int32_t seq = 0; seq < parts_.seqs.size(); seq++) {
        const std::string why = parts_.seqs.why_unsound(parts_.seqs[seq]);
        if (!why.empty()) {
            return "sequence " + std::to_string(seq) + ": " + why;
        }
    }
    const lctx_work before = parts_.placement.work();
    std::string why = parts_.blocks.why_unsound();
    parts_.placement.work() = before;  // only the work for tokens counts
    return why;
}

// ---- batches ----

// Return what is wrong with a batch; empty when it can be evaluated. Nothing changes here.
std::string lctx_kv_cache::check_batch(const llama_batch & batch, llama_memory_status & status) const {
    status = LLAMA_MEMORY_STATUS_FAILED_COMPUTE;
    if (!broken_.empty()) {
        return broken_;
    }
    if (!batch.token && has_sections_) {
        return "pictures (embeddings) of a model with sections of RoPE have positions of their own in each, which no "
               "method knows; " +
               std::string("evaluate text, or run without a method");
    }
    std::vector<int32_t> n_pos = parts_.seqs.lengths();
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (batch.n_seq_id[i] != 1) {
            return "a token of a context with a method belongs to one sequence; evaluate it once and copy the sequence";
        }
        if (!parts_.seqs.has(seq)) {
            return "sequence " + std::to_string(seq) + " is outside n_seq_max " + std::to_string(parts_.seqs.size());
        }
        if (batch.pos[i] != n_pos[seq]) {
            return "positions of a sequence must follow each other: " + std::to_string(n_pos[seq]) + " is next, not " +
                   std::to_string(batch.pos[i]);
        }
        n_pos[seq]++;
    }
    status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
    return parts_.blocks.why_no_room(n_pos);
}

std::string lctx_kv_cache::admit(const llama_batch & batch, llama_memory_status & status) {
    std::string wrong = check_batch(batch, status);
    const std::vector<int32_t> due = parts_.seqs.due_in(batch);
    if (!due.empty() && (wrong.empty() || status == LLAMA_MEMORY_STATUS_FAILED_PREPARE)) {
        // evictions make room, or find none for themselves
        status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
        wrong = settle(due) ? check_batch(batch, status) : take_error();
    }
    if (!wrong.empty()) {
        return wrong;
    }
    // what a batch needs is committed before it changes anything
    std::vector<int32_t> n_pos = parts_.seqs.lengths();
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        n_pos[batch.seq_id[i][0]]++;
    }
    wrong = parts_.blocks.promise(n_pos);
    if (!wrong.empty()) {
        status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
        return wrong;
    }
    parts_.seqs.keep_open();
    return "";
}

bool lctx_kv_cache::prepare(const llama_ubatch & ubatch) {
    parts_.placement.work().n_graph++;
    std::vector<int32_t> last(parts_.seqs.size(), -1);
    std::vector<int32_t> due;
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const int32_t seq = ubatch.seq_id[i][0];
        if (last[seq] < 0) {
            parts_.blocks.drop_dead(seq);
            if (parts_.seqs.is_due(seq)) {
                due.push_back(seq);
            }
        }
        last[seq] = ubatch.pos[i];
    }
    if (!settle(due)) {
        return false;
    }
    parts_.seqs.note_votes(ubatch);
    for (int32_t seq = 0; seq < parts_.seqs.size(); seq++) {
        const std::string why =
            last[seq] >= 0 ? parts_.blocks.grow(seq, {last[seq] + 1 - parts_.seqs.n_pos(seq), {}, 0}) : "";
        if (!why.empty()) {
            return refuse(why);
        }
    }
    parts_.blocks.note_peak();
    parts_.seqs.assign_open(ubatch);
    return true;
}

// ---- sequences ----

void lctx_kv_cache::clear() {
    for (int32_t seq = 0; seq < parts_.seqs.size(); seq++) {
        truncate(seq, 0);
    }
    broken_.clear();
    error_.clear();
}

int32_t lctx_kv_cache::restorable(int32_t seq, int32_t n) const {
    return parts_.seqs.has(seq) && broken_.empty() ? parts_.seqs.restorable(seq, n) : 0;
}

bool lctx_kv_cache::copy(int32_t src, int32_t dst, int32_t n_pos) {
    if (!parts_.seqs.has(src) || !parts_.seqs.has(dst)) {
        return refuse("sequences are 0 .. " + std::to_string(parts_.seqs.size() - 1));
    }
    const int32_t n_src = parts_.seqs.n_pos(src);
    n_pos = n_pos < 0 ? n_src : std::min(n_pos, n_src);
    std::string why = n_pos < n_src ? parts_.seqs.why_not_back_to(src, n_pos) : "";
    if (!why.empty()) {
        return refuse(why);
    }
    if (src == dst) {
        return true;
    }
    std::vector<int32_t> n_pos_then = parts_.seqs.lengths();
    n_pos_then[dst] = n_pos;
    why = parts_.blocks.check_lengths(n_pos_then);
    why = why.empty() ? parts_.copy(src, dst, n_pos) : why;
    return why.empty() || refuse(why);
}

// ---- saved ----

void lctx_kv_cache::state_write(llama_io_write_i & io, int32_t seq_id) const {
    lctx_write_state(parts_, io, seq_id);
}

void lctx_kv_cache::state_read(llama_io_read_i & io, int32_t seq_id) {
    lctx_read_state(parts_, io, seq_id);
}

std::string lctx_kv_cache::why_no_slices() const {
    return lctx_why_no_slices(parts_);
}

void lctx_kv_cache::slice_write(llama_io_write_i & io, int32_t seq, int32_t first, int32_t end) const {
    lctx_write_slice(parts_, io, seq, first, end);
}

void lctx_kv_cache::slice_read(lctx_state_reader & io, int32_t seq) {
    lctx_read_slice(parts_, io, seq);
}

void lctx_kv_cache::slice_insert(lctx_state_reader & io, int32_t seq, int32_t skip, int32_t n) {
    lctx_insert_slice(parts_, io, seq, skip, n);
}

// ---- errors and graphs ----

std::string lctx_kv_cache::take_io_error() const {
    std::string error;
    for (const auto & store : parts_.placement.stores()) {
        const std::string one = store->take_io_error();
        error = error.empty() ? one : error;
    }
    return error;
}

bool lctx_kv_cache::refuse(const std::string & reason) const {
    error_ = reason;
    LLAMA_LOG_INFO("lctx: %s\n", reason.c_str());  // the caller hears it too, and may have a way out
    return false;
}

void lctx_kv_cache::break_with(const std::string & reason) {
    broken_ = reason + "; clear the memory to continue";
    LLAMA_LOG_WARN("lctx: %s\n", broken_.c_str());
    refuse(broken_);
}

bool lctx_kv_cache::always_selects() const {
    const bool any_query = method_->selects(parts_.placement.sizes().n_ctx - 1);
    return always_selects_ || parts_.placement.shape().n_staged > 0 || (is_fixed_ && any_query);
}
