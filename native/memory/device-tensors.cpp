#include "device-tensors.h"

#include "../base/refusal.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t LANDING = 8 << 20;  // bytes that go to a device together

// Return the type as which a device copies bytes. ggml's Vulkan backend copies words, of which rows and numbers are
// whole ones.
#ifdef LCTX_VULKAN
ggml_type copied_as(size_t from, size_t to, size_t size) {
    return (from | to | size) % sizeof(int32_t) == 0 ? GGML_TYPE_I32 : GGML_TYPE_I16;
}
#else
ggml_type copied_as(size_t, size_t, size_t) {
    return GGML_TYPE_I8;
}
#endif

}  // namespace

lctx_device_tensors::lctx_device_tensors(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, lctx_work & work)
    : dev(dev),
      buft(buft),
      is_host(buft == ggml_backend_cpu_buffer_type()),
      work_(work),
      ctx_(ggml_init({17 * ggml_tensor_overhead(), nullptr, true})) {
    landing_ = is_host ? nullptr : add("lctx_landing", GGML_TYPE_I8, LANDING, 1);
}

ggml_tensor * lctx_device_tensors::add(const char * name, ggml_type type, int64_t n0, int64_t n1, int64_t n2,
                                       int64_t n3) {
    ggml_tensor * t = ggml_new_tensor_4d(ctx_.get(), type, n0, n1, n2, n3);
    ggml_set_name(t, name);
    return t;
}

std::string lctx_device_tensors::name() const {
    return std::string(ggml_backend_dev_name(dev)) + " (" + ggml_backend_dev_description(dev) + ")";
}

size_t lctx_device_tensors::bytes() const {
    size_t n = 0;
    each_tensor([&](const ggml_tensor * t) { n += ggml_nbytes(t); });
    return n - far_bytes();
}

size_t lctx_device_tensors::far_bytes() const {
    size_t n = 0;
    for (const ggml_tensor * t : far_tensors_) {
        n += ggml_nbytes(t);
    }
    return n;
}

bool lctx_device_tensors::fits_a_buffer() const {
    size_t size = 0;
    each_tensor([&](const ggml_tensor * t) { size += padded(t); });
    return size <= ggml_backend_buft_get_max_size(buft);
}

bool lctx_device_tensors::is_far(const ggml_tensor * t) const {
    return std::find(far_tensors_.begin(), far_tensors_.end(), t) != far_tensors_.end();
}

// Every tensor begins with a grain of its own.
size_t lctx_device_tensors::padded(const ggml_tensor * t) const {
    return GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), std::max(grain_, ggml_backend_buft_get_alignment(buft)));
}

size_t lctx_device_tensors::at(const ggml_tensor * t) const {
    return (char *)t->data - (char *)ggml_backend_buffer_get_base(arena_of(t).buffer());
}

std::unique_ptr<lctx_file_arena> lctx_device_tensors::create_file(const far_tensors & far, size_t size) const {
    std::vector<lctx_file_arena::part> parts;
    size_t first = 0;
    for (const ggml_tensor * t : far.all) {
        parts.push_back({first, far.unit_rows * t->nb[1]});
        first += padded(t);
    }
    return std::make_unique<lctx_file_arena>(buft, far.folder, size, parts);
}

bool lctx_device_tensors::allocate(const far_tensors & far, bool shrinks, bool dry) {
    far_tensors_ = far.all;
    if (dry) {
        dry_.reset(ggml_backend_buft_alloc_buffer(buft, 0));
        each_tensor([&](ggml_tensor * t) { t->buffer = dry_.get(); });
        return dry_ != nullptr;
    }
    size_t size = 0, far_size = 0;
    each_tensor([&](const ggml_tensor * t) { (is_far(t) ? far_size : size) += padded(t); });
    arena_ = lctx_arena_create(buft, size, shrinks);
    if (far_size > 0 && !far.folder.empty()) {
        auto file = create_file(far, far_size);
        file_ = file.get(), far_ = std::move(file);
    } else if (far_size > 0) {
        far_ = lctx_arena_create_far(buft, far_size);
    }
    if (!arena_ || (far_size > 0 && !far_)) {
        return false;
    }
    char * data[] = {(char *)ggml_backend_buffer_get_base(arena_->buffer()),
                     far_ ? (char *)ggml_backend_buffer_get_base(far_->buffer()) : nullptr};
    each_tensor([&](ggml_tensor * t) {
        ggml_backend_tensor_alloc(arena_of(t).buffer(), t, data[is_far(t)]);
        data[is_far(t)] += padded(t);
        t->extra = is_far(t) ? static_cast<lctx_row_file *>(file_) : nullptr;  // kernels find it there
    });
    return true;
}

std::string lctx_device_tensors::no_memory() const {
    const std::string error = take_io_error();
    return !error.empty() ? error + "; remove tokens, or free space there"
                          : name() +
                                " has no memory left for the KV cache: remove tokens, put fewer layers there, or use "
                                "method=window";
}

void lctx_device_tensors::attach(ggml_backend_sched_t sched) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == dev) {
            backend_ = backend;
        }
    }
    if (!backend_) {
        throw lctx_refusal("the context has no backend for " + name() + ", where layers of its model are");
    }
}

// ---- host and device ----

void lctx_device_tensors::wait() {
    run_copies();
    if (!is_host && !is_idle_) {
        ggml_backend_synchronize(backend_);
        work_.n_wait++;
        is_idle_ = true;
    }
}

void lctx_device_tensors::read(const ggml_tensor * t, size_t offset, void * data, size_t size) {
    wait();
    ggml_backend_tensor_get(t, data, offset, size);
    check_file();
}

void lctx_device_tensors::write(ggml_tensor * t, size_t offset, const void * data, size_t size) {
    wait();
    work_.n_sent += !is_host;
    ggml_backend_tensor_set(t, data, offset, size);
    check_file();
}

// ggml's functions for tensors have no way to say that they failed.
void lctx_device_tensors::check_file() {
    const std::string error = take_io_error();
    if (!error.empty()) {
        throw lctx_refusal(error);
    }
}

void lctx_device_tensors::land(ggml_tensor * t, size_t offset, const void * data, size_t size) {
    constexpr size_t MOST = LANDING;
    if (!landing_ || !backend_ || is_far(t) || size == 0 || size > MOST || !commit(landing_, 0, MOST)) {
        return write(t, offset, data, size);
    }
    if (landed_.size() + size > MOST) {
        run_copies();
    }
    copies_.push_back({at(landing_) + landed_.size(), at(t) + offset, size});
    landed_.insert(landed_.end(), (const uint8_t *)data, (const uint8_t *)data + size);
}

void lctx_device_tensors::copy(ggml_tensor * t, size_t from, size_t to, size_t size) {
    if (file_ && is_far(t)) {
        std::vector<uint8_t> bytes(size);
        read(t, from, bytes.data(), size);
        return write(t, to, bytes.data(), size);
    }
    if (is_host || is_far(t)) {
        wait();
        memcpy((char *)t->data + to, (const char *)t->data + from, size);
        return;
    }
    if (size > 0) {
        copies_.push_back({at(t) + from, at(t) + to, size});
    }
}

void lctx_add_node(ggml_cgraph * graph, ggml_tensor * node) {
    const auto init_view = [](ggml_tensor * t) {
        if (t && t->view_src && !t->buffer) {
            ggml_backend_view_init(t);
        }
    };
    std::for_each(std::begin(node->src), std::end(node->src), init_view);
    init_view(node);
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ggml_graph_add_node(graph, node);
}

// One graph for many copies: the device does not answer each of them.
void lctx_device_tensors::run_copies() {
    constexpr size_t MOST = 4096;
    if (!landed_.empty()) {
        ggml_backend_tensor_set(landing_, landed_.data(), 0, landed_.size());
        work_.n_sent++;
        landed_.clear();
    }
    char * base = copies_.empty() ? nullptr : (char *)ggml_backend_buffer_get_base(arena_->buffer());
    for (size_t first = 0; first < copies_.size(); first += MOST) {
        const size_t n = std::min(MOST, copies_.size() - first);
        const ggml_context_ptr ctx(
            ggml_init({3 * n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr, true}));
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), n, false);
        for (size_t i = first; i < first + n; i++) {
            const ggml_type type = copied_as(copies_[i].from, copies_[i].to, copies_[i].size);
            const auto bytes = [&](size_t offset) {
                ggml_tensor * t =
                    ggml_new_tensor_1d(ctx.get(), type, (int64_t)(copies_[i].size / ggml_type_size(type)));
                ggml_backend_tensor_alloc(arena_->buffer(), t, base + offset);
                return t;
            };
            ggml_tensor * from = bytes(copies_[i].from);
            lctx_add_node(graph, ggml_cpy(ctx.get(), from, bytes(copies_[i].to)));
        }
        if (ggml_backend_graph_compute(backend_, graph) != GGML_STATUS_SUCCESS) {
            throw lctx_refusal("copies of rows on " + name() + " failed");
        }
        is_idle_ = true;
    }
    copies_.clear();
}
