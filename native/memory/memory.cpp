#include "memory.h"

#include "ggml-backend.h"
#include "llama-impl.h"

#include <algorithm>

namespace {

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
                         std::unique_ptr<lctx_method> method, uint32_t n_ctx, uint64_t kv_limit, uint64_t kv_offload)
    : method_(std::move(method)),
      chunks_(method_->chunks()),
      retain_(method_->retain()),
      kv_limit_(kv_limit),
      n_ctx_((int32_t)n_ctx),
      n_rows_all_((int32_t)std::max(n_ctx, cparams.n_ctx)),
      n_ubatch_((int32_t)cparams.n_ubatch),
      n_batch_((int32_t)cparams.n_batch),
      n_seq_((int32_t)cparams.n_seq_max),
      n_threads_(cparams.n_threads_batch) {
    const llama_hparams & hparams = model.hparams;
    shape_ = {params.type_k, params.type_v, (int32_t)hparams.n_embd_head_k(0), (int32_t)hparams.n_embd_head_v(0), n_ctx_, n_seq_, 0, 0, 0,
              chunks_,       retain_};
    check_type(shape_.type_k, shape_.head_dim_k, "K");
    check_type(shape_.type_v, shape_.head_dim_v, "V");
    for (uint32_t il = 0; il < hparams.n_layer(); il++) {
        if ((int32_t)hparams.n_embd_head_k(il) != shape_.head_dim_k || (int32_t)hparams.n_embd_head_v(il) != shape_.head_dim_v) {
            throw lctx_refusal("layers with different head_dim are not supported");
        }
    }
    if (chunks_ && !chunks_->minmax && shape_.head_dim_k != shape_.head_dim_v) {
        throw lctx_refusal("representation=attention compares values with keys, whose sizes differ in this model (" +
                           std::to_string(shape_.head_dim_v) + " and " + std::to_string(shape_.head_dim_k) +
                           "); use representation=minmax");
    }
    if (method_->near_window() > 0) {
        // the window of a ubatch's first query, and a whole batch that may be taken back
        shape_.near_rows = n_block(method_->near_window() + n_ubatch_ + n_batch_) * LCTX_PAGE_ROWS;
    }
    shape_.n_page_head = n_page_head();
    for (uint32_t il = 0; il < hparams.n_layer(); il++) {
        n_head_total_ += (int32_t)hparams.n_head_kv(il);
        n_query_head_total_ += hparams.n_head_kv(il) > 0 ? (int32_t)hparams.n_head(il) : 0;
    }
    shape_.n_slot = kv_offload > 0 ? n_resident(kv_offload) : 0;
    seqs_.resize(n_seq_);
    allocate(model, cparams.offload_kqv);
    if (!model.hparams.no_alloc) {
        clear(false);
    }
}

// Most blocks that one sequence holds: all its rows, or sinks, window, and what a batch and its withdrawal need.
int32_t lctx_memory::live_blocks() const {
    const int32_t window = n_ctx_ - method_->first_row(n_ctx_ - 1);
    return std::min(n_block(n_ctx_), n_block(method_->n_sink()) + n_block(window + n_ubatch_ + n_batch_) + 1);
}

// Sequences share the pool: rows of all together, plus one page that is not full for each.
int32_t lctx_memory::n_page_head() const {
    return (int32_t)std::min<int64_t>((int64_t)n_seq_ * live_blocks(), (int64_t)n_block(n_rows_all_) + n_seq_);
}

// Pages of a head that lie close, for so many bytes: at least those that one query of a group reads.
int32_t lctx_memory::n_resident(uint64_t kv_offload) const {
    if (!chunks_ || retain_) {
        throw lctx_refusal("kv_offload keeps pages in memory of the host and brings those that the heads choose: method=longheads does, " +
                           method_->full_spec() + " does not; use longheads without an eviction rule, or offload_kqv=False");
    }
    const uint64_t page =
        LCTX_PAGE_ROWS * (ggml_row_size(shape_.type_k, shape_.head_dim_k) + ggml_row_size(shape_.type_v, shape_.head_dim_v));
    const auto least = (uint64_t)chunks_->n_chunk * std::max(1, chunks_->chunk_size / LCTX_PAGE_ROWS) + 1;
    const uint64_t n_slot = kv_offload == LCTX_OFFLOAD_AUTO ? 2 * least : kv_offload / (page * n_head_total_);
    if (n_slot < least) {
        throw lctx_refusal("kv_offload: a token reads " + mib(least * page * n_head_total_) + " of pages, which do not fit into " +
                           mib(kv_offload) + " of the device; give it more, or use a smaller window or type_k=type_v=q8_0");
    }
    return (int32_t)std::min<uint64_t>(n_slot, (uint64_t)n_seq_ * n_block(n_ctx_));
}

// One store for every kind of memory that layers have: that of their device, or of the CPU.
void lctx_memory::allocate(const llama_model & model, bool offload) {
    struct part {
        ggml_backend_dev_t dev;
        std::vector<lctx_layer_heads> layers;
        int32_t n_head = 0, n_query_head = 0;
    };
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::vector<std::pair<ggml_backend_buffer_type_t, part>> parts;
    std::vector<std::pair<size_t, size_t>> places;  // of every layer: part, and number in it
    for (uint32_t il = 0; il < model.hparams.n_layer(); il++) {
        const auto n_head = (int32_t)model.hparams.n_head_kv(il), n_query_head = (int32_t)model.hparams.n_head(il);
        ggml_backend_dev_t dev = offload ? model.dev_layer((int)il) : cpu;
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
        auto it = std::find_if(parts.begin(), parts.end(), [&](const auto & p) { return p.first == buft; });
        if (n_head == 0) {
            places.push_back({0, SIZE_MAX});
            continue;
        }
        if (it == parts.end()) {
            it = parts.insert(it, {buft, {dev, {}}});
        }
        part & p = it->second;
        places.push_back({it - parts.begin(), p.layers.size()});
        p.layers.push_back({p.n_head, n_head, p.n_query_head, n_query_head});
        p.n_head += n_head, p.n_query_head += n_query_head;
    }
    for (const auto & [buft, p] : parts) {
        stores_.push_back(std::make_unique<lctx_kv_store>(p.dev, buft, shape_, p.layers, work_));
        if (!stores_.back()->allocate(model.hparams.no_alloc)) {
            if (shape_.n_slot > 0) {
                throw lctx_refusal("kv_offload: memory of the host that " + stores_.back()->name() +
                                   " reads too cannot be had; use a GPU of " + "this machine, a smaller n_ctx, or offload_kqv=False");
            }
            throw lctx_refusal("could not reserve " + mib(stores_.back()->bytes()) + " for the KV cache on " + stores_.back()->name() +
                               "; lower n_ctx or use type_k=type_v=q8_0");
        }
    }
    for (const auto & [i, number] : places) {
        layers_.push_back(number == SIZE_MAX ? layer_place{} : layer_place{stores_[i].get(), parts[i].second.layers[number]});
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
    if (wrong.empty() && !promise(batch)) {
        status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
        wrong = take_error();
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
    const bool rows = first_row >= s.first_live && (shape_.near_rows == 0 || first_near >= s.first_near);
    const bool votes = !retain_ || p == s.n_pos || (p >= s.evicted_to && (p >= s.voted_to || p == s.undo_from));
    const bool queries = !has_open() || p % chunks_->chunk_size == 0 || s.half(p / chunks_->chunk_size) >= 0;
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
    const std::string limit = check_limit(n_held_page(), n_pos_then);
    if (!limit.empty()) {
        return refuse(limit);
    }
    return copy_prefix(src, dst, n_pos);
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
    std::map<ggml_backend_buffer_type_t, size_t> bytes;
    for (const auto & store : stores_) {
        bytes[store->buft] += store->bytes();
    }
    return bytes;
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
    return layers_[il].store->layer(ctx, layers_[il].heads);
}

int32_t lctx_memory::first_layer(const lctx_kv_store & store) const {
    const auto it = std::find_if(layers_.begin(), layers_.end(), [&](const layer_place & layer) { return layer.store == &store; });
    return (int32_t)(it - layers_.begin());
}

void lctx_memory::attach(ggml_backend_sched_t sched) const {
    for (const auto & store : stores_) {
        store->attach(sched);
    }
}

void lctx_memory::begin_graph() const {
    for (const auto & store : stores_) {
        store->begin_graph();
    }
}
