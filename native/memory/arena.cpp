#include "arena.h"

#include "../base/backend.h"
#include "../platform/memory.h"

#include <algorithm>
#include <cstdlib>

namespace {

// 0: memory of the CPU need not be committed.
size_t strict_grain() {
    const char * text = getenv("LCTX_STRICT_ARENA");
    const size_t n = text ? strtoul(text, nullptr, 10) : 0;
    return n > 0 ? GGML_PAD(n, lctx_page_size()) : 0;
}

// Addresses of the CPU: all zero, committed by the system when they are first written to.
class host_arena : public lctx_arena {
  public:
    ~host_arena() override {
        buffer_.reset();
        lctx_pages_end(data_, size_);
    }

    host_arena(char * data, size_t size) : data_(data), size_(size) {
        buffer_.reset(ggml_backend_cpu_buffer_from_ptr(data, size));
    }

    void give_back(size_t from, size_t end) override {
        const size_t mask = lctx_page_size() - 1, first = (from + mask) & ~mask, last = end & ~mask;
        if (first < last) {
            lctx_pages_discard(data_ + first, last - first);
        }
    }

  protected:
    char * data_;
    size_t size_;
};

// Does the same for tests, more strictly: a byte that was not committed cannot be read or written.
class strict_arena final : public host_arena {
  public:
    strict_arena(char * data, size_t size, size_t grain) : host_arena(data, size), grains_(grain, size) {}

    bool commits() const override { return true; }

    bool commit(size_t from, size_t end) override {
        return grains_.commit(from, end, [&](size_t first, size_t last) { return use(first, last, true); });
    }

    void give_back(size_t from, size_t end) override {
        grains_.give_back(from, end, [&](size_t first, size_t last) {
            host_arena::give_back(first, last);
            return use(first, last, false);
        });
    }

    uint64_t committed() const override { return grains_.committed(); }

  private:
    bool use(size_t from, size_t end, bool usable) { return lctx_pages_use(data_ + from, end - from, usable); }

    lctx_grains grains_;
};

class buffer_arena final : public lctx_arena {
  public:
    explicit buffer_arena(ggml_backend_buffer_t buffer) { buffer_.reset(buffer); }
};

class device_arena final : public lctx_arena {
  public:
    explicit device_arena(lctx_device_range * range) : range_(range) { buffer_.reset(range_->new_buffer()); }
    ~device_arena() override { buffer_.reset(); }

    bool commits() const override { return true; }
    bool commit(size_t from, size_t end) override { return range_->commit(from, end); }
    void give_back(size_t from, size_t end) override { range_->give_back(from, end); }
    uint64_t committed() const override { return range_->committed(); }

  private:
    std::unique_ptr<lctx_device_range> range_;
};

const lctx_device_memory_kind * registered = nullptr;

size_t device_grain(ggml_backend_buffer_type_t buft) {
    return registered ? registered->grain(buft) : 0;
}

std::unique_ptr<lctx_arena> create_on_device(ggml_backend_buffer_type_t buft, size_t size) {
    lctx_device_range * range = registered ? registered->reserve(buft, size) : nullptr;
    return range ? std::make_unique<device_arena>(range) : nullptr;
}

ggml_backend_buffer_t pinned_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return registered ? registered->pinned_buffer(buft, size) : nullptr;
}

std::unique_ptr<lctx_arena> on_buffer(ggml_backend_buffer_t buffer) {
    return buffer ? std::make_unique<buffer_arena>(buffer) : nullptr;
}

std::unique_ptr<lctx_arena> create_on_host(size_t size, bool shrinks) {
    const size_t grain = strict_grain();
    size = grain > 0 ? GGML_PAD(size, grain) : size;
    char * data = lctx_pages_reserve(size, grain == 0);
    if (!data) {
        return nullptr;
    }
    lctx_pages_prefer_huge(data, size, !shrinks);  // a huge page stays while any part of it is in use
    return grain > 0 ? std::make_unique<strict_arena>(data, size, grain) : std::make_unique<host_arena>(data, size);
}

}  // namespace

size_t lctx_arena_grain(ggml_backend_buffer_type_t buft) {
    return buft == ggml_backend_cpu_buffer_type() ? std::max(lctx_page_size(), strict_grain()) : device_grain(buft);
}

std::unique_ptr<lctx_arena> lctx_arena_create(ggml_backend_buffer_type_t buft, size_t size, bool shrinks) {
    if (buft == ggml_backend_cpu_buffer_type()) {
        return create_on_host(size, shrinks);
    }
    auto arena = create_on_device(buft, size);
    return arena ? std::move(arena) : on_buffer(ggml_backend_buft_alloc_buffer(buft, size));
}

std::unique_ptr<lctx_arena> lctx_arena_create_far(ggml_backend_buffer_type_t buft, size_t size) {
    return buft == ggml_backend_cpu_buffer_type() ? create_on_host(size, false) : on_buffer(pinned_buffer(buft, size));
}

void lctx_arena_use(const lctx_device_memory_kind * kind) {
    registered = kind;
}
