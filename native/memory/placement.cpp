#include "placement.h"

#include "../base/kernel-name.h"
#include "llama-cparams.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>

namespace {

std::string mib(size_t bytes) {
    return std::to_string(bytes / (1024 * 1024)) + " MiB";
}

void check_type(ggml_type type, int32_t head_dim, const char * what) {
    if (head_dim % ggml_blck_size(type) != 0) {
        throw lctx_refusal(std::string(what) + " type " + ggml_type_name(type) +
                           " needs a head_dim that is a multiple of " + std::to_string(ggml_blck_size(type)) +
                           ", this model has " + std::to_string(head_dim) + "; use f16");
    }
}

int32_t n_block(int32_t n_rows) {
    return lctx_kv_shape::n_block(n_rows);
}

}  // namespace

// Layers whose rows are in the same kind of memory: that of their device, or of the CPU.
struct lctx_placement::device {
    ggml_backend_dev_t dev;
    ggml_backend_buffer_type_t buft;
    std::vector<lctx_layer_heads> layers;
    std::vector<int32_t> il;
    int32_t n_head = 0, n_query_head = 0;

    void add(int32_t layer, int32_t n_kv, int32_t n_query) {
        il.push_back(layer);
        layers.push_back({n_head, n_kv, n_query_head, n_query});
        n_head += n_kv, n_query_head += n_query;
    }
    device part(size_t first, size_t end) const {
        device d = {dev, buft, {}, {}};
        for (size_t i = first; i < end; i++) {
            d.add(il[i], layers[i].n, layers[i].n_query);
        }
        return d;
    }
};

lctx_kv_sizes::lctx_kv_sizes(uint32_t n_ctx, const llama_cparams & cparams)
    : n_ctx((int32_t)n_ctx),
      n_rows_all((int32_t)std::max(n_ctx, cparams.n_ctx)),
      n_ubatch((int32_t)cparams.n_ubatch),
      n_batch((int32_t)cparams.n_batch),
      n_seq((int32_t)cparams.n_seq_max),
      n_threads(cparams.n_threads_batch) {}

lctx_placement::lctx_placement(const llama_model & model, const llama_memory_params & params,
                               const std::vector<lctx_claimed> & layers, const lctx_method & method,
                               const lctx_kv_sizes & sizes, bool offload_kqv, const lctx_offload & offload)
    : method_(method), sizes_(sizes) {
    if (layers.empty()) {
        throw lctx_refusal("no layer of this model has full attention");
    }
    set_shape(model, params, layers);
    check_heads(model, layers);
    // sequences share the pool: rows of all together, plus one page that is not full for each
    shape_.n_page_head = (int32_t)std::min<int64_t>((int64_t)sizes.n_seq * live_blocks(),
                                                    (int64_t)n_block(sizes.n_rows_all) + sizes.n_seq);
    shape_.n_staged = offload.bytes > 0 ? n_staged(offload) : 0;
    shape_.folder = offload.folder;
    for (const device & d : devices_of(model, layers, offload_kqv)) {
        if (!offload.folder.empty() && d.buft != ggml_backend_cpu_buffer_type()) {
            throw lctx_refusal("kv_offload='disk' is for layers on the CPU, and there are some on " +
                               std::string(ggml_backend_dev_name(d.dev)) +
                               "; use n_gpu_layers=0, offload_kqv=False, or kv_offload='host'");
        }
        allocate(d, model.hparams.no_alloc);
    }
    centers_ = std::make_unique<lctx_centers>(model.hparams.no_alloc);
    find_key_bias(model);
}

void lctx_placement::set_shape(const llama_model & model, const llama_memory_params & params,
                               const std::vector<lctx_claimed> & layers) {
    const llama_hparams & hparams = model.hparams;
    const int32_t first = layers[0].source;
    shape_.type_k = params.type_k;
    shape_.type_v = params.type_v;
    shape_.head_dim_k = (int32_t)hparams.n_embd_head_k(first);
    shape_.head_dim_v = (int32_t)hparams.n_embd_head_v(first);
    shape_.n_ctx = sizes_.n_ctx;
    shape_.n_seq = sizes_.n_seq;
    shape_.chunks = method_.chunks();
    shape_.retain = method_.retain();
    shape_.shrinks = shape_.retain || method_.first_row(sizes_.n_ctx) > 0;
    shape_.v_offset = -1;
    if (hparams.is_mla()) {  // K is the latent vector and the channels that are rotated, which come first where there
                             // are any
        shape_.v_offset = hparams.rope_type == LLAMA_ROPE_TYPE_NONE ? 0 : shape_.head_dim_k - shape_.head_dim_v;
        shape_.type_v = shape_.type_k;
    }
    shape_.hadamard =
        lctx_hadamard_of(shape_.type_k, shape_.head_dim_k, shape_.type_v, shape_.head_dim_v, shape_.v_offset);
    if (method_.near_window() > 0) {
        // the window of a ubatch's first query, and a whole batch that may be taken back
        shape_.near_rows = n_block(method_.near_window() + sizes_.n_ubatch + sizes_.n_batch) * LCTX_PAGE_ROWS;
    }
}

void lctx_placement::check_heads(const llama_model & model, const std::vector<lctx_claimed> & layers) {
    const llama_hparams & hparams = model.hparams;
    check_type(shape_.type_k, shape_.head_dim_k, "K");
    check_type(shape_.type_v, shape_.head_dim_v, "V");
    check_type(shape_.type_k, std::max(0, shape_.v_offset), "K");
    for (const lctx_claimed & layer : layers) {
        if ((int32_t)hparams.n_embd_head_k(layer.il) != shape_.head_dim_k ||
            (int32_t)hparams.n_embd_head_v(layer.il) != shape_.head_dim_v) {
            throw lctx_refusal("layers with different head_dim are not supported");
        }
        if (layer.il == layer.source) {
            n_head_ += (int32_t)hparams.n_head_kv(layer.il);
            n_query_head_ += hparams.n_head_kv(layer.il) > 0 ? (int32_t)hparams.n_head(layer.il) : 0;
        }
    }
    if (chunks() && chunks()->by_attention() && shape_.head_dim_k != shape_.head_dim_v) {
        throw lctx_refusal("representation=attention compares values with keys, whose sizes differ in this model (" +
                           std::to_string(shape_.head_dim_v) + " and " + std::to_string(shape_.head_dim_k) +
                           "); use another representation and position");
    }
}

// Of layers whose scores all move by the same when a vector is subtracted from their keys: queries see all keys under
// one angle.
void lctx_placement::find_key_bias(const llama_model & model) {
    key_bias_.assign(layers_.size(), nullptr);
    const bool one_angle = method_.n_angle() == 1 && method_.n_span() == 1 && method_.near_window() == 0;
    for (size_t il = 0; one_angle && shape_.v_offset < 0 && il < std::min(layers_.size(), model.layers.size()); il++) {
        const ggml_tensor * bias = source_[il] == (int32_t)il ? model.layers[il].wk_b : nullptr;
        const bool fits = bias && bias->type == GGML_TYPE_F32 &&
                          ggml_nelements(bias) == (int64_t)shape_.head_dim_k * model.hparams.n_head_kv((uint32_t)il);
        key_bias_[il] = fits ? bias : nullptr;
    }
}

// All its rows, or sinks, window, and what a batch and its withdrawal need.
int32_t lctx_placement::live_blocks() const {
    const int32_t window = sizes_.n_ctx - method_.first_row(sizes_.n_ctx - 1);
    return std::min(n_block(sizes_.n_ctx),
                    n_block(method_.n_sink()) + n_block(window + sizes_.n_ubatch + sizes_.n_batch) + 1);
}

// Units of a head that a query reads which chooses n_chosen chunks: its first rows and those nearby are read in whole
// pages.
int32_t lctx_placement::units_read(int32_t n_chosen) const {
    const int32_t n_nearby = n_block((chunks()->n_recent + 1) * chunks()->chunk_size) + 1,
                  of_chunk = chunks()->chunk_size >> shape_.unit_shift();
    return (1 + n_nearby) * shape_.of_page() + n_chosen * std::max(1, of_chunk);
}

// Units of a head that lie close, for a number of bytes. What does not fit is read over the bus, but not what every
// query reads. Automatic: twice what one query chooses, and all that one reads which does not choose.
int32_t lctx_placement::n_staged(const lctx_offload & offload) const {
    if (!chunks() || retain()) {
        throw lctx_refusal(
            "kv_offload keeps pages in a slower memory and brings those that the heads choose: method=longheads "
            "does, " +
            method_.full_spec() + " does not; use longheads without an eviction rule, or offload_kqv=False");
    }
    if (shape_.v_offset >= 0) {
        throw lctx_refusal(
            "kv_offload does not serve latent attention, whose values are a part of its keys; use offload_kqv=False");
    }
    if (!offload.folder.empty() && !chunks()->by_keys()) {
        throw lctx_refusal(
            "kv_offload='disk' needs an index of the keys, since summaries are made of rows that are not in memory: "
            "use representation=keys2, the default of longheads");
    }
    const uint64_t unit = (uint64_t)n_head_ * shape_.row_bytes() << shape_.unit_shift();
    const uint64_t least = units_read(0), chosen = units_read(chunks()->n_free),
                   whole = n_block(
                       (int32_t)std::min<int64_t>((int64_t)method_.n_read() * chunks()->chunk_size, sizes_.n_ctx));
    const uint64_t n =
        offload.bytes == UINT64_MAX ? std::max(2 * chosen, whole * shape_.of_page()) : offload.bytes / unit;
    if (n < least) {
        throw lctx_refusal("kv_offload: every token reads " + mib(least * unit) +
                           " of rows, which do not fit into a buffer of " + mib(offload.bytes) +
                           "; raise kv_offload_mib, at best to " + mib(2 * chosen * unit) +
                           ", or use type_k=type_v=q8_0");
    }
    const auto n_page = std::min<uint64_t>(n / shape_.of_page(), (uint64_t)sizes_.n_seq * n_block(sizes_.n_ctx));
    return (int32_t)n_page * shape_.of_page();
}

std::vector<lctx_placement::device> lctx_placement::devices_of(const llama_model & model,
                                                               const std::vector<lctx_claimed> & layers,
                                                               bool offload_kqv) {
    const llama_hparams & hparams = model.hparams;
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::vector<device> devices;
    layers_.resize(std::max<size_t>(hparams.n_layer(), layers.back().il + 1));
    source_.assign(layers_.size(), -1);
    for (const auto & [il, source] : layers) {
        source_[il] = source;
        const auto n_head = (int32_t)hparams.n_head_kv(il), n_query_head = (int32_t)hparams.n_head(il);
        if (il != source || n_head == 0) {
            continue;
        }
        ggml_backend_dev_t dev = offload_kqv ? model.dev_layer(il) : cpu;
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);
        auto it = std::find_if(devices.begin(), devices.end(), [&](const device & d) { return d.buft == buft; });
        if (it == devices.end()) {
            it = devices.insert(it, {dev, buft, {}, {}});
        }
        it->add(il, n_head, n_query_head);
    }
    return devices;
}

// A store has one buffer. Where a device limits the size of one, halves of the layers have stores of their own.
void lctx_placement::allocate(const device & d, bool dry) {
    auto store = std::make_unique<lctx_device_store>(d.dev, d.buft, shape_, d.layers, work_);
    if (const size_t n = d.il.size(); n > 1 && !store->fits_a_buffer()) {
        allocate(d.part(0, n / 2), dry);
        return allocate(d.part(n / 2, n), dry);
    }
    stores_.push_back(std::move(store));
    for (size_t i = 0; i < d.il.size(); i++) {
        layers_[d.il[i]] = {stores_.back().get(), d.layers[i]};
    }
    if (stores_.back()->allocate(dry)) {
        return;
    }
    if (shape_.n_staged > 0) {
        throw lctx_refusal("kv_offload: memory of the host that " + stores_.back()->name() +
                           " reads too cannot be had; use a GPU of " +
                           "this machine, a smaller n_ctx, or offload_kqv=False");
    }
    throw lctx_refusal("could not reserve " + mib(stores_.back()->bytes()) + " for the KV cache of " +
                       std::to_string(d.il.size()) + (d.il.size() == 1 ? " layer on " : " layers on ") +
                       stores_.back()->name() + "; lower n_ctx or use type_k=type_v=q8_0");
}

lctx_layer lctx_placement::layer(ggml_context * ctx, int32_t il) const {
    const lctx_stored_layer & stored = layers_[source_[il]];
    return stored.store->layer(ctx, stored.heads);
}

int32_t lctx_placement::first_layer(const lctx_device_store & store) const {
    const auto it = std::find_if(layers_.begin(), layers_.end(),
                                 [&](const lctx_stored_layer & layer) { return layer.store == &store; });
    return (int32_t)(it - layers_.begin());
}

void lctx_placement::attach(ggml_backend_sched_t sched) const {
    for (const auto & store : stores_) {
        store->attach(sched);
    }
}

void lctx_placement::begin_graph() const {
    for (const auto & store : stores_) {
        store->begin_graph();
    }
}

void lctx_placement::prepare_writes(int32_t seq) const {
    for (const auto & store : stores_) {
        store->wait();
        store->forget_staged(seq);
    }
}

void lctx_placement::wait() const {
    for (const auto & store : stores_) {
        store->wait();
    }
}

std::string lctx_placement::full_why() const {
    std::string text = method_.full_why();
    text += text.empty() ? "attention on " : "; on ";
    for (auto it = stores_.begin(), end = it; it != stores_.end(); it = end) {  // stores of a device follow each other
        const lctx_device_store & store = **it;
        end = std::find_if(it, stores_.end(), [&](const auto & other) { return other->buft != store.buft; });
        text += (it == stores_.begin() ? "" : " and ") + std::string(ggml_backend_dev_name(store.dev)) + " (" +
                lctx_kernel_name(store.dev);
        text += end - it == 1 ? ")" : ", " + std::to_string(end - it) + " buffers)";
    }
    text += std::string(", K ") + ggml_type_name(shape_.type_k) + ", V " + ggml_type_name(shape_.type_v);
    if (shape_.n_staged > 0) {
        const auto rows = [&](int32_t n_unit) { return std::to_string(n_unit << shape_.unit_shift()); };
        text += ", in " + (shape_.folder.empty() ? "memory of the host" : "a file in " + shape_.folder) +
                " except for " + rows(shape_.n_staged) + " rows of a head; a query chooses " +
                rows(units_read(chunks()->n_free));
    }
    return text;
}

lctx_offload_info lctx_placement::offload() const {
    lctx_offload_info all = {};
    for (const auto & store : stores_) {
        const lctx_offload_info one = store->offload();
        all.n_hit += one.n_hit, all.n_miss += one.n_miss, all.n_far += one.n_far;
        all.device_bytes += one.device_bytes, all.file_bytes += one.file_bytes;
        all.read_bytes += one.read_bytes, all.written_bytes += one.written_bytes;
        all.file_seconds += one.file_seconds;
        all.unit_bytes = one.unit_bytes, all.n_staged = one.n_staged;
    }
    all.n_chosen = all.n_staged > 0 ? units_read(chunks()->n_free) : 0;
    return all;
}

std::map<ggml_backend_buffer_type_t, size_t> lctx_placement::memory_breakdown() const {
    std::map<ggml_backend_buffer_type_t, size_t> bytes;
    for (const auto & store : stores_) {
        bytes[store->buft] += store->bytes() + centers_->bytes(*store);
    }
    return bytes;
}
