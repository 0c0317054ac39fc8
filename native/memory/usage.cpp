// What is held, and what may be.
#include "kv-cache.h"

#include "../kernel-name.h"

#include <algorithm>
#include <cmath>

// What is wrong with a batch; empty when it can be evaluated. Nothing changes here.
std::string lctx_kv_cache::check_batch(const llama_batch & batch, llama_memory_status & status) const {
    status = LLAMA_MEMORY_STATUS_FAILED_COMPUTE;
    if (!broken_.empty()) {
        return broken_;
    }
    if (!batch.token && has_sections_) {
        return "pictures (embeddings) of a model with sections of RoPE have positions of their own in each, which no method knows; " +
               std::string("evaluate text, or run without a method");
    }
    std::vector<int32_t> n_pos = lengths();
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        const int32_t seq = batch.seq_id[i][0];
        if (batch.n_seq_id[i] != 1) {
            return "a token of a context with a method belongs to one sequence; evaluate it once and copy the sequence";
        }
        if (seq < 0 || seq >= n_seq_) {
            return "sequence " + std::to_string(seq) + " is outside n_seq_max " + std::to_string(n_seq_);
        }
        if (batch.pos[i] != n_pos[seq]) {
            return "positions of a sequence must follow each other: " + std::to_string(n_pos[seq]) + " is next, not " +
                   std::to_string(batch.pos[i]);
        }
        n_pos[seq]++;
    }
    status = LLAMA_MEMORY_STATUS_FAILED_PREPARE;
    return check_room(n_pos);
}

// Why the sequences cannot grow to n_pos rows each; empty when they can.
std::string lctx_kv_cache::check_room(const std::vector<int32_t> & n_pos) const {
    for (int32_t seq = 0; seq < n_seq_; seq++) {
        const sequence & s = seqs_[seq];
        if (n_pos[seq] > n_ctx_) {
            return std::to_string(n_pos[seq] - s.n_pos) + " more tokens do not fit: " + std::to_string(s.n_pos) + " of n_ctx " +
                   std::to_string(n_ctx_) + " are used";
        }
    }
    int64_t n_need = 0;
    for (const auto & store : stores_) {
        const int32_t n = pages_needed(*store, n_pos);
        if (n > store->pages().n_free()) {
            return "the page pool is full: remove a sequence or raise n_ctx";
        }
        n_need += n;
    }
    return check_limit(n_held_page() + n_need, n_pos);
}

// Why so much cannot be held; empty when it can.
std::string lctx_kv_cache::check_limit(int64_t n_held_page, const std::vector<int32_t> & n_pos) const {
    const uint64_t wanted = kv_limit_ ? bytes(n_held_page, n_pos) : 0;
    if (wanted <= kv_limit_) {
        return "";
    }
    return "kv_limit reached: " + std::to_string(wanted) + " bytes are needed, kv_limit is " + std::to_string(kv_limit_) +
           "; raise it, evict more (a smaller window or budget), use a smaller type_k and type_v, or remove tokens";
}

std::vector<int32_t> lctx_kv_cache::lengths() const {
    std::vector<int32_t> n_pos;
    for (const sequence & s : seqs_) {
        n_pos.push_back(s.n_pos);
    }
    return n_pos;
}

// What is held with so many pages and sequences of these lengths.
uint64_t lctx_kv_cache::bytes(int64_t n_held_page, const std::vector<int32_t> & n_pos) const {
    uint64_t n = n_held_page * LCTX_PAGE_ROWS * (shape_.row_bytes() + shape_.index_bytes());
    for (const auto & store : stores_) {
        for (const lctx_plane & plane : store->planes()) {
            n += plane.entry_size * store->n_entry(plane, n_pos);
        }
    }
    return n;
}

// Rows that a head of a sequence holds at most; with corm, whose heads decide for themselves, at least.
int32_t lctx_kv_cache::most_cells() const {
    if (!retain_) {
        return n_ctx_;
    }
    // what comes before it can be judged
    const int64_t judged = retain_->budget > 0 ? (int64_t)retain_->budget + n_batch_ : retain_->recent;
    return (int32_t)std::min<int64_t>(n_ctx_, judged + retain_->evict_every);
}

void lctx_kv_cache::each_size(const std::function<void(ggml_backend_dev_t, const lctx_sizes &)> & f) const {
    uint64_t total = 0;
    for (const auto & store : stores_) {
        const lctx_sizes s = store->sizes(most_cells());
        total += s.k + s.v + s.chunks + s.near;
    }
    const double share = kv_limit_ > 0 && total > kv_limit_ ? (double)kv_limit_ / (double)total : 1.0;
    for (const auto & store : stores_) {
        lctx_sizes near = store->sizes(most_cells()), far = {};
        near.other += centers_->bytes(store->buft);
        if (lctx_arena_grain(store->buft) > 0) {  // where less is taken than there could be
            for (uint64_t * size : {&near.k, &near.v, &near.chunks, &near.near}) {
                *size = (uint64_t)(share * (double)*size);
            }
        }
        if (shape_.n_staged > 0) {
            far.k = near.k, far.v = near.v;
            near.k = ggml_nbytes(store->k_staged), near.v = ggml_nbytes(store->v_staged);
            near.other -= near.k + near.v;
        }
        f(store->dev, near);
        f(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), far);
    }
}

void lctx_kv_cache::note_peak() {
    peak_bytes_ = std::max(peak_bytes_, bytes(n_held_page(), lengths()));
}

void lctx_kv_cache::usage(lctx_kv_info & info, int32_t * rows) const {
    const std::vector<int32_t> n_pos = lengths();
    info.bytes = bytes(n_held_page(), n_pos);
    info.peak_bytes = peak_bytes_;
    info.mapped_bytes = 0;
    for (const auto & store : stores_) {
        info.mapped_bytes += store->committed();
    }
    info.full_bytes = 0;
    for (int32_t n : n_pos) {
        info.full_bytes += (uint64_t)n * n_head_total_ * shape_.row_bytes();
    }
    info.n_layer = (int32_t)layers_.size();
    info.n_head_kv = 0;
    for (const layer_place & layer : layers_) {
        info.n_head_kv = std::max(info.n_head_kv, layer.heads.n);
    }
    if (!rows) {
        return;
    }
    std::fill_n(rows, (size_t)info.n_layer * info.n_head_kv, 0);
    for (int32_t i = 0; i < info.n_layer * info.n_head_kv; i++) {
        const layer_place & layer = layers_[i / info.n_head_kv];
        const int32_t head = i % info.n_head_kv;
        for (int32_t seq = 0; head < layer.heads.n && seq < n_seq_; seq++) {
            rows[i] += layer.store->n_cell(seq, layer.heads.first + head, n_pos[seq]) - n_dead(seq) * LCTX_PAGE_ROWS;
        }
    }
}

std::string lctx_kv_cache::full_why() const {
    const std::string why = method_->full_why();
    std::string where = why.empty() ? "attention on " : "; on ";
    for (const auto & store : stores_) {
        where += (store == stores_[0] ? "" : " and ") + std::string(ggml_backend_dev_name(store->dev));
        where += " (" + lctx_kernel_name(store->dev) + ")";
    }
    where += std::string(", K ") + ggml_type_name(shape_.type_k) + ", V " + ggml_type_name(shape_.type_v);
    if (shape_.n_staged > 0) {
        const auto rows = [&](int32_t n_unit) { return std::to_string(n_unit << shape_.unit_shift()); };
        where += ", in memory of the host except for " + rows(shape_.n_staged) + " rows of a head; a query chooses " +
                 rows(units_read(chunks_->n_free));
    }
    return why + where;
}

lctx_offload_info lctx_kv_cache::offload() const {
    lctx_offload_info all = {};
    for (const auto & store : stores_) {
        const lctx_offload_info one = store->offload();
        all.n_hit += one.n_hit, all.n_miss += one.n_miss, all.n_far += one.n_far;
        all.device_bytes += one.device_bytes;
        all.unit_bytes = one.unit_bytes, all.n_staged = one.n_staged;
    }
    all.n_chosen = all.n_staged > 0 ? units_read(chunks_->n_free) : 0;
    return all;
}
