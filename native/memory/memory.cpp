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
                         std::unique_ptr<lctx_method> method, uint32_t n_ctx)
    : method_(std::move(method)),
      type_k_(params.type_k),
      type_v_(params.type_v),
      n_ctx_((int32_t)n_ctx),
      n_ubatch_((int32_t)cparams.n_ubatch),
      n_seq_((int32_t)cparams.n_seq_max) {
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
    }
    if (method_->near_window() > 0) {
        // the window of a ubatch's first query, and as many rows again for a ubatch that is taken back
        near_rows_ = n_block(method_->near_window() + 2 * n_ubatch_) * LCTX_PAGE_ROWS;
    }
    seqs_.resize(n_seq_);
    allocate(model);
    clear(false);
}

// Rows of a sequence that hold pages at most: all, or sinks, window and what a ubatch and its withdrawal need.
int32_t lctx_memory::live_rows() const {
    const int32_t window = n_ctx_ - method_->first_row(n_ctx_ - 1);
    return std::min(n_block(n_ctx_), n_block(method_->n_sink()) + n_block(window + 2 * n_ubatch_) + 1) * LCTX_PAGE_ROWS;
}

void lctx_memory::allocate(const llama_model & model) {
    const int64_t n_page = (int64_t)n_head_total_ * n_seq_ * (live_rows() / LCTX_PAGE_ROWS);
    const size_t bytes = (size_t)n_page * LCTX_PAGE_ROWS * (ggml_row_size(type_k_, head_dim_k_) + ggml_row_size(type_v_, head_dim_v_)) +
                         (size_t)near_rows_ * n_head_total_ * n_seq_ * ggml_row_size(type_k_, head_dim_k_);
    if (bytes > machine_memory()) {
        throw lctx_refusal("the KV cache for n_ctx " + std::to_string(n_ctx_) + " needs " + mib(bytes) + " (K " + ggml_type_name(type_k_) +
                           ", V " + ggml_type_name(type_v_) + "), this machine has " + mib(machine_memory()) +
                           "; lower n_ctx, use type_k=type_v=q8_0, or method=window");
    }
    ctx_.reset(ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
    k_pool_ = ggml_new_tensor_2d(ctx_.get(), type_k_, head_dim_k_, n_page * LCTX_PAGE_ROWS);
    v_pool_ = ggml_new_tensor_2d(ctx_.get(), type_v_, head_dim_v_, n_page * LCTX_PAGE_ROWS);
    table_ = ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_I32, n_block(n_ctx_), n_head_total_, n_seq_);
    ggml_set_name(k_pool_, "lctx_k_pool");
    ggml_set_name(v_pool_, "lctx_v_pool");
    ggml_set_name(table_, "lctx_table");
    if (near_rows_ > 0) {
        near_ = ggml_new_tensor_4d(ctx_.get(), type_k_, head_dim_k_, near_rows_, n_head_total_, n_seq_);
        ggml_set_name(near_, "lctx_near");
    }
    if (model.hparams.no_alloc) {
        buffers_.emplace_back(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 0));
        for (ggml_tensor * t : {k_pool_, v_pool_, table_, near_}) {
            if (t) {
                t->buffer = buffers_[0].get();
            }
        }
        return;
    }
    // never cleared: pages that are not used cost nothing
    buffers_.emplace_back(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), ggml_backend_cpu_buffer_type()));
    if (!buffers_[0]) {
        throw lctx_refusal("could not reserve " + mib(bytes) + " for the KV cache; lower n_ctx or use type_k=type_v=q8_0");
    }
    pages_ = lctx_pages((int32_t)n_page);
}

int32_t & lctx_memory::page(int32_t seq, int32_t head, int32_t block) {
    return ((int32_t *)table_->data)[((int64_t)seq * n_head_total_ + head) * table_->ne[0] + block];
}

// ---- pages ----

bool lctx_memory::take_block(int32_t seq, int32_t block) {
    if (pages_.n_free() < n_head_total_) {
        return refuse("the page pool is empty");
    }
    for (int32_t head = 0; head < n_head_total_; head++) {
        page(seq, head, block) = pages_.take();
    }
    return true;
}

void lctx_memory::drop_block(int32_t seq, int32_t block) {
    for (int32_t head = 0; head < n_head_total_; head++) {
        int32_t & p = page(seq, head, block);
        if (p >= 0) {
            pages_.give_back(p);
            p = -1;
        }
    }
}

// Return the pages that no query from p - n_ubatch on reads: one ubatch may still be taken back.
void lctx_memory::drop_dead(int32_t seq, int32_t p) {
    sequence & s = seqs_[seq];
    const int32_t first = method_->first_row(std::max(0, p - n_ubatch_)) / LCTX_PAGE_ROWS * LCTX_PAGE_ROWS;
    for (int32_t block = n_block(std::max(s.first_live, method_->n_sink())); (block + 1) * LCTX_PAGE_ROWS <= first; block++) {
        drop_block(seq, block);
    }
    s.first_live = std::max(s.first_live, first);
}

bool lctx_memory::place(const llama_ubatch & ubatch) {
    sequence & s = seqs_[0];
    const int32_t end = s.n_pos + (int32_t)ubatch.n_tokens;
    drop_dead(0, s.n_pos);
    for (int32_t block = n_block(s.n_pos); block < n_block(end); block++) {
        if (!take_block(0, block)) {
            for (int32_t b = n_block(s.n_pos); b < block; b++) {
                drop_block(0, b);
            }
            return false;
        }
    }
    s.n_pos = end;
    s.first_near = std::max(s.first_near, end - near_rows_);
    near_touched_ = std::max(near_touched_, std::min(end, near_rows_));
    return true;
}

void lctx_memory::truncate(int32_t seq, int32_t n_pos) {
    sequence & s = seqs_[seq];
    for (int32_t block = n_block(n_pos); block < n_block(s.n_pos); block++) {
        drop_block(seq, block);
    }
    s.n_pos = n_pos;
    if (n_pos == 0) {
        s = sequence{};
    }
}

// ---- llama_memory_i ----

llama_memory_context_ptr lctx_memory::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool) {
    const auto failed = [this](llama_memory_status status, const std::string & reason) {
        refuse(reason);
        return std::make_unique<lctx_memory_context>(status);
    };
    if (!broken_.empty()) {
        return failed(LLAMA_MEMORY_STATUS_FAILED_COMPUTE, broken_);
    }
    const llama_batch & batch = balloc.get_batch();
    if (batch.n_tokens > n_ctx_ - seqs_[0].n_pos) {
        return failed(LLAMA_MEMORY_STATUS_FAILED_PREPARE, std::to_string(batch.n_tokens) +
                                                              " more tokens do not fit: " + std::to_string(seqs_[0].n_pos) + " of n_ctx " +
                                                              std::to_string(n_ctx_) + " are used");
    }
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        if (batch.n_seq_id[i] != 1 || batch.seq_id[i][0] != 0) {
            return failed(LLAMA_MEMORY_STATUS_FAILED_COMPUTE, "this version serves one sequence, with id 0");
        }
        if (batch.pos[i] != seqs_[0].n_pos + i) {
            return failed(LLAMA_MEMORY_STATUS_FAILED_COMPUTE, "positions must follow each other without a gap");
        }
    }
    balloc.split_reset();
    std::vector<llama_ubatch> ubatches;
    for (llama_ubatch u = balloc.split_simple(n_ubatch); u.n_tokens > 0; u = balloc.split_simple(n_ubatch)) {
        ubatches.push_back(std::move(u));
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
    if (table_->data) {
        memset(table_->data, 0xff, ggml_nbytes(table_));
    }
    broken_.clear();
    error_.clear();
}

bool lctx_memory::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (seq_id > 0) {
        return true;  // nothing is ever stored there
    }
    const sequence & s = seqs_[0];
    p0 = std::max(p0, 0);
    if (p0 >= s.n_pos || (p1 >= 0 && p1 <= p0)) {
        return true;
    }
    if (p1 >= 0 && p1 < s.n_pos) {
        return refuse("only the end of a sequence can be removed, not positions " + std::to_string(p0) + " .. " + std::to_string(p1));
    }
    const int32_t first_row = method_->first_row(p0);
    const int32_t first_near = std::max(0, p0 - method_->near_window() + 1);
    if (p0 > 0 && (std::max(first_row, method_->n_sink()) < s.first_live || (near_rows_ > 0 && first_near < s.first_near))) {
        return refuse("position " + std::to_string(p0) + " is too far back for " + method_->spec() +
                      ": rows that it reads are gone; evaluate the prefix again");
    }
    truncate(0, p0);
    return true;
}

void lctx_memory::seq_cp(llama_seq_id src, llama_seq_id dst, llama_pos, llama_pos) {
    if (src != dst) {
        break_with("seq_cp");
    }
}

void lctx_memory::seq_keep(llama_seq_id seq_id) {
    if (seq_id != 0) {
        clear(false);
    }
}

void lctx_memory::seq_add(llama_seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (shift != 0 && p0 != p1) {
        break_with("seq_add");
    }
}

void lctx_memory::seq_div(llama_seq_id, llama_pos p0, llama_pos p1, int d) {
    if (d != 1 && p0 != p1) {
        break_with("seq_div");
    }
}

llama_pos lctx_memory::seq_pos_min(llama_seq_id seq_id) const {
    return seq_id == 0 && seqs_[0].n_pos > 0 ? 0 : -1;
}

llama_pos lctx_memory::seq_pos_max(llama_seq_id seq_id) const {
    return seq_id == 0 ? seqs_[0].n_pos - 1 : -1;
}

std::map<ggml_backend_buffer_type_t, size_t> lctx_memory::memory_breakdown() const {
    size_t bytes = 0;
    for (const ggml_tensor * t : {k_pool_, v_pool_, table_, near_}) {
        bytes += t ? ggml_nbytes(t) : 0;
    }
    return {{ggml_backend_cpu_buffer_type(), bytes}};
}

void lctx_memory::state_write(llama_io_write_i &, llama_seq_id, llama_state_seq_flags) const {
    throw lctx_refusal("saving the state of a context with a method is not available in this version");
}

void lctx_memory::state_read(llama_io_read_i &, llama_seq_id, llama_state_seq_flags) {
    throw lctx_refusal("restoring the state of a context with a method is not available in this version");
}

bool lctx_memory::refuse(const std::string & reason) const {
    error_ = reason;
    LLAMA_LOG_WARN("lctx: %s\n", reason.c_str());
    return false;
}

void lctx_memory::break_with(const char * operation) {
    broken_ = std::string(operation) +
              " is not available for a context with a method (positions are the method's business); clear the memory to go on";
    refuse(broken_);
}

// ---- graph and API ----

lctx_layer lctx_memory::layer(ggml_context * ctx, int32_t il) const {
    const int64_t n_head = n_head_kv_[il];
    lctx_layer layer = {k_pool_, v_pool_, nullptr, nullptr};
    layer.table = ggml_view_3d(ctx, table_, table_->ne[0], n_head, n_seq_, table_->nb[1], table_->nb[2], head_offset_[il] * table_->nb[1]);
    if (near_) {
        layer.near = ggml_view_4d(ctx, near_, near_->ne[0], near_->ne[1], n_head, n_seq_, near_->nb[1], near_->nb[2], near_->nb[3],
                                  head_offset_[il] * near_->nb[2]);
    }
    return layer;
}

void lctx_memory::usage(lctx_kv_info & info, int32_t * rows) const {
    const uint64_t row_k = ggml_row_size(type_k_, head_dim_k_), row_v = ggml_row_size(type_v_, head_dim_v_);
    const uint64_t page_bytes = LCTX_PAGE_ROWS * (row_k + row_v);
    const sequence & s = seqs_[0];
    info.bytes = pages_.n_held() * page_bytes + (uint64_t)std::min(s.n_pos, near_rows_) * n_head_total_ * row_k;
    info.peak_bytes = pages_.n_touched() * page_bytes + (uint64_t)near_touched_ * n_head_total_ * row_k;
    info.full_bytes = (uint64_t)s.n_pos * n_head_total_ * (row_k + row_v);
    info.n_layer = (int32_t)n_head_kv_.size();
    info.n_head_kv = *std::max_element(n_head_kv_.begin(), n_head_kv_.end());
    if (!rows) {
        return;
    }
    const int32_t dead = std::max(0, s.first_live - n_block(method_->n_sink()) * LCTX_PAGE_ROWS);
    std::fill_n(rows, (size_t)info.n_layer * info.n_head_kv, 0);
    for (int32_t il = 0; il < info.n_layer; il++) {
        std::fill_n(rows + (size_t)il * info.n_head_kv, n_head_kv_[il], s.n_pos - dead);
    }
}
