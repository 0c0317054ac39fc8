#include "memory.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama-impl.h"

#include <unistd.h>
#include <algorithm>
#include <cstring>

namespace {

size_t machine_memory() {
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGE_SIZE);
}

std::string mib(size_t bytes) {
    return std::to_string(bytes / (1024 * 1024)) + " MiB";
}

void check_type(ggml_type type, int32_t head_dim, const char * what) {
    if (head_dim % ggml_blck_size(type) != 0) {
        throw lctx_refusal(std::string(what) + " type " + ggml_type_name(type) + " needs a head_dim that is a multiple of " +
                           std::to_string(ggml_blck_size(type)) + ", this model has " + std::to_string(head_dim) + "; use f16");
    }
}

}  // namespace

lctx_memory::lctx_memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                         std::unique_ptr<lctx_method> method, uint32_t n_ctx, uint64_t kv_limit)
    : method_(std::move(method)),
      chunks_(method_->chunks()),
      retain_(method_->retain()),
      kv_limit_(kv_limit),
      type_k_(params.type_k),
      type_v_(params.type_v),
      n_ctx_((int32_t)n_ctx),
      n_rows_all_((int32_t)std::max(n_ctx, cparams.n_ctx)),
      n_ubatch_((int32_t)cparams.n_ubatch),
      n_batch_((int32_t)cparams.n_batch),
      n_seq_((int32_t)cparams.n_seq_max),
      n_threads_(cparams.n_threads_batch) {
    const llama_hparams & hparams = model.hparams;
    head_dim_k_ = (int32_t)hparams.n_embd_head_k(0);
    head_dim_v_ = (int32_t)hparams.n_embd_head_v(0);
    check_type(type_k_, head_dim_k_, "K");
    check_type(type_v_, head_dim_v_, "V");
    for (uint32_t il = 0; il < hparams.n_layer(); il++) {
        if ((int32_t)hparams.n_embd_head_k(il) != head_dim_k_ || (int32_t)hparams.n_embd_head_v(il) != head_dim_v_) {
            throw lctx_refusal("layers with different head_dim are not supported");
        }
        head_offset_.push_back(n_head_total_);
        n_head_kv_.push_back((int32_t)hparams.n_head_kv(il));
        n_head_total_ += n_head_kv_.back();
        query_head_offset_.push_back(n_query_head_total_);
        n_query_head_.push_back((int32_t)hparams.n_head(il));
        n_query_head_total_ += n_query_head_.back();
    }
    if (chunks_ && !chunks_->minmax && head_dim_k_ != head_dim_v_) {
        throw lctx_refusal("representation=attention compares values with keys, whose sizes differ in this model (" +
                           std::to_string(head_dim_v_) + " and " + std::to_string(head_dim_k_) + "); use representation=minmax");
    }
    if (method_->near_window() > 0) {
        // the window of a ubatch's first query, and a whole batch that may be taken back
        near_rows_ = n_block(method_->near_window() + n_ubatch_ + n_batch_) * LCTX_PAGE_ROWS;
    }
    seqs_.resize(n_seq_);
    gone_.resize((size_t)n_seq_ * n_head_total_);
    allocate(model);
    clear(false);
}

// Most blocks that one sequence holds: all its rows, or sinks, window, and what a batch and its withdrawal need.
int32_t lctx_memory::live_blocks() const {
    const int32_t window = n_ctx_ - method_->first_row(n_ctx_ - 1);
    return std::min(n_block(n_ctx_), n_block(method_->n_sink()) + n_block(window + n_ubatch_ + n_batch_) + 1);
}

// Sequences share the pool: rows of all together, plus one page that is not full for each.
int32_t lctx_memory::n_page() const {
    const int64_t blocks = std::min<int64_t>((int64_t)n_seq_ * live_blocks(), (int64_t)n_block(n_rows_all_) + n_seq_);
    return (int32_t)(blocks * n_head_total_);
}

void lctx_memory::allocate(const llama_model & model) {
    const int64_t n_row = (int64_t)n_page() * LCTX_PAGE_ROWS;
    ctx_.reset(ggml_init({8 * ggml_tensor_overhead(), nullptr, true}));
    const auto tensor = [&](const char * name, ggml_type type, int64_t n0, int64_t n1, int64_t n2 = 1, int64_t n3 = 1) {
        ggml_tensor * t = ggml_new_tensor_4d(ctx_.get(), type, n0, n1, n2, n3);
        ggml_set_name(t, name);
        return t;
    };
    k_pool_ = tensor("lctx_k_pool", type_k_, head_dim_k_, n_row);
    v_pool_ = tensor("lctx_v_pool", type_v_, head_dim_v_, n_row);
    table_ = tensor("lctx_table", GGML_TYPE_I32, n_block(n_ctx_), n_head_total_, n_seq_);
    if (near_rows_ > 0) {
        near_ = tensor("lctx_near", type_k_, head_dim_k_, near_rows_, n_head_total_, n_seq_);
    }
    if (chunks_) {
        const int64_t n_chunk = std::max(1, n_complete(n_ctx_));
        reps_ = tensor("lctx_reps", GGML_TYPE_F32, chunks_->rep_dim(head_dim_k_), n_chunk,
                       chunks_->minmax ? n_head_total_ : n_query_head_total_, n_seq_);
    }
    if (chunks_ && !chunks_->minmax) {
        open_ = tensor("lctx_open", GGML_TYPE_F32, head_dim_k_, 2 * chunks_->chunk_size, n_query_head_total_, n_seq_);
    }
    if (retain_) {
        held_ = tensor("lctx_held", GGML_TYPE_I32, lctx_held::size(n_ctx_), n_head_total_, n_seq_);
        due_ = tensor("lctx_due", GGML_TYPE_I32, n_seq_, 1);
    }
    const size_t size = memory_breakdown().begin()->second;
    check_machine(size);
    if (model.hparams.no_alloc) {
        buffers_.emplace_back(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 0));
        each_tensor([&](ggml_tensor * t) { t->buffer = buffers_[0].get(); });
        return;
    }
    if (!arena_.reserve(arena_size())) {
        throw lctx_refusal("could not reserve " + mib(size) + " for the KV cache; lower n_ctx or use type_k=type_v=q8_0");
    }
    buffers_.emplace_back(ggml_backend_cpu_buffer_from_ptr(arena_.data(), arena_.size()));
    char * at = arena_.data();
    each_tensor([&](ggml_tensor * t) {
        ggml_backend_tensor_alloc(buffers_[0].get(), t, at);
        at += GGML_PAD(ggml_nbytes(t), lctx_arena::grain());
    });
    memset(table_->data, 0xff, ggml_nbytes(table_));  // -1: no page
    pages_ = lctx_pages(n_page());
    if (retain_) {
        prepare_eviction();
    }
}

// Every tensor begins with a grain of its own.
size_t lctx_memory::arena_size() const {
    size_t size = 0;
    each_tensor([&](const ggml_tensor * t) { size += GGML_PAD(ggml_nbytes(t), lctx_arena::grain()); });
    return size;
}

// Pages are committed as they are used: of the pools no more than kv_limit.
void lctx_memory::check_machine(size_t size) const {
    const size_t pools = ggml_nbytes(k_pool_) + ggml_nbytes(v_pool_);
    const size_t most = kv_limit_ ? size - pools + std::min<size_t>(pools, kv_limit_) : size;
    if (most > machine_memory()) {
        throw lctx_refusal("the KV cache for n_ctx " + std::to_string(n_ctx_) + " needs " + mib(most) + " (K " + ggml_type_name(type_k_) +
                           ", V " + ggml_type_name(type_v_) + "), this machine has " + mib(machine_memory()) +
                           "; lower n_ctx, use type_k=type_v=q8_0, set a kv_limit, or method=window");
    }
}

// ---- llama_memory_i ----

// Tokens of the batch from `first` on that make a ubatch: none follows a border of its sequence.
int32_t lctx_memory::next_ubatch(const llama_batch & batch, int32_t first, int32_t n_ubatch) const {
    const int32_t most = std::min(n_ubatch, batch.n_tokens - first);
    if (!retain_) {
        return most;
    }
    std::vector<char> is_over(n_seq_, 0);
    for (int32_t i = 0; i < most; i++) {
        const int32_t seq = batch.seq_id[first + i][0], p = batch.pos[first + i];
        if (is_over[seq]) {
            return i;
        }
        is_over[seq] = p == retain_->border(p);
    }
    return most;
}

llama_memory_context_ptr lctx_memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool) {
    llama_memory_status status;
    const llama_batch & batch = balloc.get_batch();
    std::string wrong = check_batch(batch, status);
    const std::vector<int32_t> due = due_in(batch);
    if (!due.empty() && (wrong.empty() || status == LLAMA_MEMORY_STATUS_FAILED_PREPARE)) {
        // evictions make room, or find none for themselves
        status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
        wrong = settle(due) ? check_batch(batch, status) : take_error();
    }
    if (!wrong.empty()) {
        LLAMA_LOG_WARN("lctx: %s\n", wrong.c_str());
        refuse(wrong);
        return std::make_unique<lctx_memory_context>(status);
    }
    keep_open();
    balloc.split_reset();
    std::vector<llama_ubatch> ubatches;
    for (int32_t first = 0; first < batch.n_tokens; first += (int32_t)ubatches.back().n_tokens) {
        ubatches.push_back(balloc.split_simple(next_ubatch(batch, first, (int32_t)n_ubatch)));
    }
    return std::make_unique<lctx_memory_context>(this, std::move(ubatches));
}

llama_memory_context_ptr lctx_memory::init_full() {
    return std::make_unique<lctx_memory_context>(this, std::vector<llama_ubatch>());
}

llama_memory_context_ptr lctx_memory::init_update(llama_context *, bool) {
    return std::make_unique<lctx_memory_context>(LLAMA_MEMORY_STATUS_NO_UPDATE);
}

void lctx_memory::clear(bool) {
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        truncate(seq, 0);
    }
    broken_.clear();
    error_.clear();
}

// Why the sequence cannot be cut back to p tokens; empty when it can.
std::string lctx_memory::why_not_back_to(int32_t seq, int32_t p) const {
    const sequence & s = seqs_[seq];
    const int32_t first_row = std::max(method_->first_row(p), method_->n_sink());
    const int32_t first_near = std::max(0, p - method_->near_window() + 1);
    const bool rows = first_row >= s.first_live && (near_rows_ == 0 || first_near >= s.first_near);
    const bool votes = !retain_ || p == s.n_pos || (p >= s.evicted_to && (p >= s.voted_to || p == s.undo_from));
    const bool queries = !open_ || p % chunks_->chunk_size == 0 || s.half(p / chunks_->chunk_size) >= 0;
    if (p == 0 || (rows && queries && votes)) {
        return "";
    }
    return "position " + std::to_string(p) + " is too far back for " + method_->full_spec() + ": " +
           (!rows              ? "rows that it reads are gone; evaluate the prefix again"
            : p < s.evicted_to ? "rows were evicted after it; evaluate the prefix again, or restore a checkpoint"
            : !votes           ? "later queries have voted on what is kept; evaluate the prefix again, or restore a checkpoint"
                               : "queries of its chunk are gone; go back to the chunk's beginning");
}

int32_t lctx_memory::restorable(int32_t seq, int32_t n) const {
    if (seq < 0 || seq >= n_seq_ || !broken_.empty()) {
        return 0;
    }
    n = std::max(0, std::min(n, seqs_[seq].n_pos));
    if (n == seqs_[seq].n_pos || why_not_back_to(seq, n).empty()) {
        return n;
    }
    for (int32_t place : {chunks_ ? n / chunks_->chunk_size * chunks_->chunk_size : 0, seqs_[seq].undo_from, seqs_[seq].evicted_to}) {
        if (0 < place && place <= n && why_not_back_to(seq, place).empty()) {
            return place;
        }
    }
    return 0;
}

int32_t lctx_memory::step(int32_t pos, int32_t n) const {
    const int32_t most = std::min({n, n_batch_, n_ubatch_});
    return retain_ ? std::min(most, retain_->border(pos) - pos + 1) : most;
}

bool lctx_memory::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (seq_id < 0) {
        bool done = true;
        for (int32_t seq = 0; seq < n_seq_; seq++) {
            done = seq_rm(seq, p0, p1) && done;
        }
        return done;
    }
    if (seq_id >= n_seq_) {
        return true;  // nothing is ever stored there
    }
    const sequence & s = seqs_[seq_id];
    p0 = std::max(p0, 0);
    if (p0 >= s.n_pos || (p1 >= 0 && p1 <= p0)) {
        return true;
    }
    if (p1 >= 0 && p1 < s.n_pos) {
        return refuse("only the end of a sequence can be removed, not positions " + std::to_string(p0) + " .. " + std::to_string(p1));
    }
    const std::string why = why_not_back_to(seq_id, p0);
    if (!why.empty()) {
        return refuse(why);
    }
    truncate(seq_id, p0);
    return true;
}

void lctx_memory::seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    if (p0 > 0) {
        break_with("seq_cp copies a sequence from its beginning, not from position " + std::to_string(p0));
    } else if (!copy(src, dst, p1)) {
        break_with("seq_cp: " + error_);
    }
}

bool lctx_memory::copy(int32_t src, int32_t dst, int32_t n_pos) {
    if (src < 0 || dst < 0 || src >= n_seq_ || dst >= n_seq_) {
        return refuse("sequences are 0 .. " + std::to_string(n_seq_ - 1));
    }
    n_pos = n_pos < 0 ? seqs_[src].n_pos : std::min(n_pos, seqs_[src].n_pos);
    const std::string why = n_pos < seqs_[src].n_pos ? why_not_back_to(src, n_pos) : "";
    if (!why.empty()) {
        return refuse(why);
    }
    if (src == dst) {
        return true;
    }
    std::vector<int32_t> n_pos_then = lengths();
    n_pos_then[dst] = n_pos;
    const std::string limit = check_limit(pages_.n_held(), n_pos_then);
    if (!limit.empty()) {
        return refuse(limit);
    }
    copy_prefix(src, dst, n_pos);
    return true;
}

void lctx_memory::seq_keep(llama_seq_id seq_id) {
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        if (seq != seq_id) {
            truncate(seq, 0);
        }
    }
}

void lctx_memory::seq_add(llama_seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (shift != 0 && p0 != p1) {
        break_with("seq_add is not available for a context with a method: positions are the method's business");
    }
}

void lctx_memory::seq_div(llama_seq_id, llama_pos p0, llama_pos p1, int d) {
    if (d != 1 && p0 != p1) {
        break_with("seq_div is not available for a context with a method: positions are the method's business");
    }
}

llama_pos lctx_memory::seq_pos_min(llama_seq_id seq_id) const {
    return seq_pos_max(seq_id) >= 0 ? 0 : -1;
}

llama_pos lctx_memory::seq_pos_max(llama_seq_id seq_id) const {
    return seq_id >= 0 && seq_id < n_seq_ ? seqs_[seq_id].n_pos - 1 : -1;
}

std::map<ggml_backend_buffer_type_t, size_t> lctx_memory::memory_breakdown() const {
    size_t bytes = 0;
    each_tensor([&](const ggml_tensor * t) { bytes += ggml_nbytes(t); });
    return {{ggml_backend_cpu_buffer_type(), bytes}};
}

bool lctx_memory::refuse(const std::string & reason) const {
    error_ = reason;
    LLAMA_LOG_INFO("lctx: %s\n", reason.c_str());  // the caller hears it too, and may have a way out
    return false;
}

void lctx_memory::break_with(const std::string & reason) {
    broken_ = reason + "; clear the memory to go on";
    LLAMA_LOG_WARN("lctx: %s\n", broken_.c_str());
    refuse(broken_);
}

// ---- graph and API ----

lctx_layer lctx_memory::layer(ggml_context * ctx, int32_t il) const {
    const int64_t n_head = n_head_kv_[il];
    lctx_layer layer = {k_pool_, v_pool_, nullptr, nullptr, nullptr, nullptr, nullptr};
    // the heads of this layer in a tensor [*, *, heads of all layers, n_seq]
    const auto heads = [&](ggml_tensor * t, int64_t first, int64_t n) {
        return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n, n_seq_, t->nb[1], t->nb[2], t->nb[3], first * t->nb[2]);
    };
    // the same in a tensor [*, heads of all layers, n_seq]
    const auto lists = [&](ggml_tensor * t) {
        return ggml_view_3d(ctx, t, t->ne[0], n_head, n_seq_, t->nb[1], t->nb[2], head_offset_[il] * t->nb[1]);
    };
    layer.table = lists(table_);
    if (held_) {
        layer.held = lists(held_);
    }
    if (near_) {
        layer.near = heads(near_, head_offset_[il], n_head);
    }
    if (reps_) {
        layer.reps = chunks_->minmax ? heads(reps_, head_offset_[il], n_head) : heads(reps_, query_head_offset_[il], n_query_head_[il]);
    }
    if (open_) {
        layer.open = heads(open_, query_head_offset_[il], n_query_head_[il]);
    }
    return layer;
}
