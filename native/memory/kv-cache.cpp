#include "kv-cache.h"

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

lctx_kv_cache::lctx_kv_cache(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                             const std::vector<lctx_claimed> & layers, std::unique_ptr<lctx_method> method, uint32_t n_ctx,
                             uint64_t kv_limit, uint64_t kv_offload)
    : method_(std::move(method)),
      chunks_(method_->chunks()),
      retain_(method_->retain()),
      kv_limit_(kv_limit),
      n_ctx_((int32_t)n_ctx),
      n_rows_all_((int32_t)std::max(n_ctx, cparams.n_ctx)),
      n_ubatch_((int32_t)cparams.n_ubatch),
      n_batch_((int32_t)cparams.n_batch),
      n_seq_((int32_t)cparams.n_seq_max),
      n_threads_(cparams.n_threads_batch),
      has_sections_(model.hparams.n_pos_per_embd() > 1),
      rope_{cparams.rope_freq_base, cparams.rope_freq_scale, cparams.yarn_ext_factor, cparams.yarn_attn_factor,
            cparams.yarn_beta_fast, cparams.yarn_beta_slow,  cparams.n_ctx_orig_yarn} {
    if (layers.empty()) {
        throw lctx_refusal("no layer of this model has full attention");
    }
    const llama_hparams & hparams = model.hparams;
    const int32_t first = layers[0].source;
    shape_ = {params.type_k,
              params.type_v,
              (int32_t)hparams.n_embd_head_k(first),
              (int32_t)hparams.n_embd_head_v(first),
              n_ctx_,
              n_seq_,
              0,
              0,
              0,
              chunks_,
              retain_,
              retain_ || method_->first_row(n_ctx_) > 0,
              -1,
              {}};
    if (hparams.is_mla()) {  // K is the latent vector and the channels that are rotated, which come first where there are any
        shape_.v_offset = hparams.rope_type == LLAMA_ROPE_TYPE_NONE ? 0 : shape_.head_dim_k - shape_.head_dim_v;
        shape_.type_v = shape_.type_k;
    }
    shape_.hadamard = lctx_hadamard_of(shape_.type_k, shape_.head_dim_k, shape_.type_v, shape_.head_dim_v, shape_.v_offset);
    check_type(shape_.type_k, shape_.head_dim_k, "K");
    check_type(shape_.type_v, shape_.head_dim_v, "V");
    check_type(shape_.type_k, std::max(0, shape_.v_offset), "K");
    for (const lctx_claimed & layer : layers) {
        if ((int32_t)hparams.n_embd_head_k(layer.il) != shape_.head_dim_k ||
            (int32_t)hparams.n_embd_head_v(layer.il) != shape_.head_dim_v) {
            throw lctx_refusal("layers with different head_dim are not supported");
        }
        if (layer.il == layer.source) {
            n_head_total_ += (int32_t)hparams.n_head_kv(layer.il);
            n_query_head_total_ += hparams.n_head_kv(layer.il) > 0 ? (int32_t)hparams.n_head(layer.il) : 0;
        }
    }
    if (has_open() && shape_.head_dim_k != shape_.head_dim_v) {
        throw lctx_refusal("representation=attention compares values with keys, whose sizes differ in this model (" +
                           std::to_string(shape_.head_dim_v) + " and " + std::to_string(shape_.head_dim_k) +
                           "); use another representation and position");
    }
    if (method_->near_window() > 0) {
        // the window of a ubatch's first query, and a whole batch that may be taken back
        shape_.near_rows = n_block(method_->near_window() + n_ubatch_ + n_batch_) * LCTX_PAGE_ROWS;
    }
    shape_.n_page_head = n_page_head();
    shape_.n_staged = kv_offload > 0 ? n_staged(kv_offload) : 0;
    seqs_.resize(n_seq_);
    allocate(model, layers, cparams.offload_kqv);
    centers_ = std::make_unique<lctx_centers>(model.hparams.no_alloc);
    find_key_bias(model);
    if (!model.hparams.no_alloc) {
        clear();
    }
}

// Of layers whose scores all move by the same when a vector is subtracted from their keys: queries see all keys under one angle.
void lctx_kv_cache::find_key_bias(const llama_model & model) {
    key_bias_.assign(layers_.size(), nullptr);
    const bool one_angle = method_->n_angle() == 1 && method_->n_span() == 1 && method_->near_window() == 0;
    for (size_t il = 0; one_angle && shape_.v_offset < 0 && il < std::min(layers_.size(), model.layers.size()); il++) {
        const ggml_tensor * bias = source_[il] == (int32_t)il ? model.layers[il].wk_b : nullptr;
        const bool fits = bias && bias->type == GGML_TYPE_F32 &&
                          ggml_nelements(bias) == (int64_t)shape_.head_dim_k * model.hparams.n_head_kv((uint32_t)il);
        key_bias_[il] = fits ? bias : nullptr;
    }
}

// Most blocks that one sequence holds: all its rows, or sinks, window, and what a batch and its withdrawal need.
int32_t lctx_kv_cache::live_blocks() const {
    const int32_t window = n_ctx_ - method_->first_row(n_ctx_ - 1);
    return std::min(n_block(n_ctx_), n_block(method_->n_sink()) + n_block(window + n_ubatch_ + n_batch_) + 1);
}

// Sequences share the pool: rows of all together, plus one page that is not full for each.
int32_t lctx_kv_cache::n_page_head() const {
    return (int32_t)std::min<int64_t>((int64_t)n_seq_ * live_blocks(), (int64_t)n_block(n_rows_all_) + n_seq_);
}

// Units of a head that a query reads which chooses n_chosen chunks: its first rows and those nearby are read in whole pages.
int32_t lctx_kv_cache::units_read(int32_t n_chosen) const {
    const int32_t n_nearby = n_block((chunks_->n_recent + 1) * chunks_->chunk_size) + 1,
                  of_chunk = chunks_->chunk_size >> shape_.unit_shift();
    return (1 + n_nearby) * shape_.of_page() + n_chosen * std::max(1, of_chunk);
}

// Units of a head that lie close, for a number of bytes. What does not fit is read over the bus, but not what every query reads. Automatic:
// twice what one query chooses, and all that one reads which does not choose.
int32_t lctx_kv_cache::n_staged(uint64_t kv_offload) const {
    if (!chunks_ || retain_) {
        throw lctx_refusal("kv_offload keeps pages in memory of the host and brings those that the heads choose: method=longheads does, " +
                           method_->full_spec() + " does not; use longheads without an eviction rule, or offload_kqv=False");
    }
    if (shape_.v_offset >= 0) {
        throw lctx_refusal("kv_offload does not serve latent attention, whose values are a part of its keys; use offload_kqv=False");
    }
    const uint64_t unit = (uint64_t)n_head_total_ * shape_.row_bytes() << shape_.unit_shift();
    const uint64_t least = units_read(0), chosen = units_read(chunks_->n_free),
                   whole = n_block((int32_t)std::min<int64_t>((int64_t)method_->n_read() * chunks_->chunk_size, n_ctx_));
    const uint64_t n = kv_offload == UINT64_MAX ? std::max(2 * chosen, whole * shape_.of_page()) : kv_offload / unit;
    if (n < least) {
        throw lctx_refusal("kv_offload: every token reads " + mib(least * unit) + " of rows, which do not fit into " + mib(kv_offload) +
                           " of the device; give it more, at best " + mib(2 * chosen * unit) + ", or use type_k=type_v=q8_0");
    }
    const auto n_page = std::min<uint64_t>(n / shape_.of_page(), (uint64_t)n_seq_ * n_block(n_ctx_));
    return (int32_t)n_page * shape_.of_page();
}

// One store for every kind of memory that layers have: that of their device, or of the CPU.
void lctx_kv_cache::allocate(const llama_model & model, const std::vector<lctx_claimed> & layers, bool offload) {
    struct part {
        ggml_backend_dev_t dev;
        std::vector<lctx_layer_heads> layers;
        std::vector<int32_t> il;
        int32_t n_head = 0, n_query_head = 0;
    };
    const llama_hparams & hparams = model.hparams;
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::vector<std::pair<ggml_backend_buffer_type_t, part>> parts;
    layers_.resize(std::max<size_t>(hparams.n_layer(), layers.back().il + 1));
    source_.assign(layers_.size(), -1);
    for (const auto & [il, source] : layers) {
        source_[il] = source;
        const auto n_head = (int32_t)hparams.n_head_kv(il), n_query_head = (int32_t)hparams.n_head(il);
        if (il != source || n_head == 0) {
            continue;
        }
        ggml_backend_dev_t dev = offload ? model.dev_layer(il) : cpu;
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
        auto it = std::find_if(parts.begin(), parts.end(), [&](const auto & p) { return p.first == buft; });
        if (it == parts.end()) {
            it = parts.insert(it, {buft, {dev, {}, {}}});
        }
        part & p = it->second;
        p.il.push_back(il);
        p.layers.push_back({p.n_head, n_head, p.n_query_head, n_query_head});
        p.n_head += n_head, p.n_query_head += n_query_head;
    }
    for (const auto & [buft, p] : parts) {
        stores_.push_back(std::make_unique<lctx_kv_store>(p.dev, buft, shape_, p.layers, work_));
        for (size_t i = 0; i < p.il.size(); i++) {
            layers_[p.il[i]] = {stores_.back().get(), p.layers[i]};
        }
        if (!stores_.back()->allocate(hparams.no_alloc)) {
            if (shape_.n_staged > 0) {
                throw lctx_refusal("kv_offload: memory of the host that " + stores_.back()->name() +
                                   " reads too cannot be had; use a GPU of " + "this machine, a smaller n_ctx, or offload_kqv=False");
            }
            throw lctx_refusal("could not reserve " + mib(stores_.back()->bytes()) + " for the KV cache on " + stores_.back()->name() +
                               "; lower n_ctx or use type_k=type_v=q8_0");
        }
    }
}

// ---- batches ----

std::string lctx_kv_cache::admit(const llama_batch & batch, llama_memory_status & status) {
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
    if (wrong.empty()) {
        keep_open();
    }
    return wrong;
}

int32_t lctx_kv_cache::until_border(int32_t p) const {
    return retain_ ? retain_->border(p) - p + 1 : INT32_MAX;
}

// ---- sequences ----

void lctx_kv_cache::clear() {
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        truncate(seq, 0);
    }
    broken_.clear();
    error_.clear();
}

std::string lctx_kv_cache::why_not_back_to(int32_t seq, int32_t p) const {
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

int32_t lctx_kv_cache::restorable(int32_t seq, int32_t n) const {
    if (seq < 0 || seq >= n_seq_ || !broken_.empty()) {
        return 0;
    }
    n = std::max(0, std::min(n, seqs_[seq].n_pos));
    if (n == seqs_[seq].n_pos || why_not_back_to(seq, n).empty()) {
        return n;
    }
    for (int32_t place : {has_open() ? n / chunks_->chunk_size * chunks_->chunk_size : 0, seqs_[seq].undo_from, seqs_[seq].evicted_to}) {
        if (0 < place && place <= n && why_not_back_to(seq, place).empty()) {
            return place;
        }
    }
    return 0;
}

int32_t lctx_kv_cache::step(int32_t pos, int32_t n) const {
    return std::min({n, n_batch_, n_ubatch_, until_border(pos)});
}

bool lctx_kv_cache::copy(int32_t src, int32_t dst, int32_t n_pos) {
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

std::map<ggml_backend_buffer_type_t, size_t> lctx_kv_cache::memory_breakdown() const {
    std::map<ggml_backend_buffer_type_t, size_t> bytes;
    for (const auto & store : stores_) {
        bytes[store->buft] += store->bytes() + centers_->bytes(store->buft);
    }
    return bytes;
}

bool lctx_kv_cache::refuse(const std::string & reason) const {
    error_ = reason;
    LLAMA_LOG_INFO("lctx: %s\n", reason.c_str());  // the caller hears it too, and may have a way out
    return false;
}

void lctx_kv_cache::break_with(const std::string & reason) {
    broken_ = reason + "; clear the memory to go on";
    LLAMA_LOG_WARN("lctx: %s\n", broken_.c_str());
    refuse(broken_);
}

// ---- graph and API ----

lctx_layer lctx_kv_cache::layer(ggml_context * ctx, int32_t il) const {
    const layer_place & place = layers_[source_[il]];
    return place.store->layer(ctx, place.heads);
}

int32_t lctx_kv_cache::first_layer(const lctx_kv_store & store) const {
    const auto it = std::find_if(layers_.begin(), layers_.end(), [&](const layer_place & layer) { return layer.store == &store; });
    return (int32_t)(it - layers_.begin());
}

void lctx_kv_cache::attach(ggml_backend_sched_t sched) const {
    for (const auto & store : stores_) {
        store->attach(sched);
    }
}

void lctx_kv_cache::begin_graph() const {
    for (const auto & store : stores_) {
        store->begin_graph();
    }
}
