#include "file-arena.h"

#include "../base/refusal.h"
#include "../platform/memory.h"
#include "../platform/system.h"
#include "ggml-backend-impl.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

namespace {

constexpr size_t GRAIN = 64 << 10;  // bytes of the disk that are reserved and given back together

std::string mib(uint64_t bytes) {
    return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

[[noreturn]] void refuse(const std::string & folder, const std::string & why) {
    throw lctx_refusal("kv_offload='disk' cannot keep K and V in " + folder + ": " + why +
                       "; give another folder as kv_offload_path");
}

lctx_unnamed_file open_in(const std::string & folder) {
    try {
        return lctx_unnamed_file(folder);
    } catch (const lctx_refusal & reason) {
        refuse(folder, reason.what());
    }
}

// ---- the buffer ----

lctx_file_arena & arena_of(ggml_backend_buffer_t buffer) {
    return *(lctx_file_arena *)buffer->context;
}

ggml_backend_buffer_i interface() {
    ggml_backend_buffer_i i = {};
    i.get_base = [](ggml_backend_buffer_t buffer) { return (void *)arena_of(buffer).data(); };
    i.set_tensor = [](ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size) {
        arena_of(buffer).write((char *)t->data + offset, data, size);
    };
    i.get_tensor = [](ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t size) {
        arena_of(buffer).read((const char *)t->data + offset, data, size);
    };
    i.clear = [](ggml_backend_buffer_t, uint8_t) {};  // what was never written is zeros
    return i;
}

// Counts the time until it ends.
class stopwatch {
  public:
    explicit stopwatch(std::atomic<uint64_t> & sum) : sum_(sum) {}
    stopwatch(const stopwatch &) = delete;
    stopwatch & operator=(const stopwatch &) = delete;
    ~stopwatch() { sum_ += (uint64_t)std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count(); }

  private:
    std::atomic<uint64_t> & sum_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

lctx_file_arena::lctx_file_arena(ggml_backend_buffer_type_t buft, const std::string & folder, size_t size,
                                 const std::vector<part> & parts)
    : folder_(folder),
      parts_(parts),
      stripe_(
          std::accumulate(parts.begin(), parts.end(), (size_t)0, [](size_t n, const part & p) { return n + p.unit; })),
      size_(GGML_PAD(size + stripe_, GRAIN)),
      file_(open_in(folder)),
      grains_(GRAIN, size_) {
    const uint64_t there = file_.free_bytes();
    std::string why;
    if (there < size_) {
        refuse(folder, mib(size_) + " are needed for n_ctx tokens and " + mib(there) +
                           " are free (or lower n_ctx, or use type_k=type_v=q8_0)");
    }
    if (!file_.resize(size_, why)) {
        refuse(folder, why);
    }
    data_ = lctx_pages_reserve(size_, false);
    if (!data_) {
        refuse(folder, lctx_system_error());
    }
    buffer_.reset(ggml_backend_buffer_init(buft, interface(), this, size_));
}

lctx_file_arena::~lctx_file_arena() {
    buffer_.reset();
    lctx_pages_end(data_, size_);
}

bool lctx_file_arena::fail(const char * what, const std::string & why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) {
        error_ = "kv_offload='disk': the file of K and V in " + folder_ + " could not be " + what + ": " +
                 (why.empty() ? "its length has changed" : why);
    }
    return false;
}

std::string lctx_file_arena::take_error() {
    if (file_.size() != size_) {
        fail("read", "");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(error_, {});
}

// ---- blocks of the disk ----

// Units are whole in what is committed and given back, and the tensors agree on which.
bool lctx_file_arena::commit(size_t from, size_t end) {
    if (from >= end) {
        return true;
    }
    const place last = place_of(end - 1);
    return grains_.commit(place_of(from).at, last.at + last.n, [&](size_t first, size_t last) {
        std::string why;
        return file_.reserve(first, last - first, why) || fail("enlarged", why);
    });
}

void lctx_file_arena::give_back(size_t from, size_t end) {
    if (from >= end) {
        return;
    }
    const size_t first_unit = place_of(from).at / stripe_, end_unit = place_of(end - 1).at / stripe_ + 1;
    grains_.give_back(first_unit * stripe_, end_unit * stripe_, [&](size_t first, size_t last) {
        file_.give_back(first, last - first);
        return true;
    });
}

// ---- bytes ----

lctx_file_arena::place lctx_file_arena::place_of(size_t address) const {
    size_t before = 0;  // of the stripe
    auto part = parts_.begin();
    for (; std::next(part) != parts_.end() && std::next(part)->first <= address; ++part) {
        before += part->unit;
    }
    const size_t unit = (address - part->first) / part->unit, in_unit = (address - part->first) % part->unit;
    return {unit * stripe_ + before + in_unit, part->unit - in_unit};
}

// f(place in the file, bytes before, bytes) for what lies together there; false as soon as f is.
template <typename F> bool lctx_file_arena::each_piece(const char * at, size_t size, F && f) {
    for (size_t done = 0; done < size;) {
        const place p = place_of((size_t)(at - data_) + done);
        const size_t n = std::min(p.n, size - done);
        if (!f(p.at, done, n)) {
            return false;
        }
        done += n;
    }
    return true;
}

bool lctx_file_arena::read(const char * at, void * to, size_t size) {
    const stopwatch watch(nanoseconds_);
    n_read_ += size;
    std::string why;
    return each_piece(
               at, size,
               [&](size_t place, size_t first, size_t n) { return file_.read(place, (char *)to + first, n, why); }) ||
           fail("read", why);
}

bool lctx_file_arena::write(char * at, const void * from, size_t size) {
    const stopwatch watch(nanoseconds_);
    n_written_ += size;
    std::string why;
    return each_piece(at, size,
                      [&](size_t place, size_t first, size_t n) {
                          return file_.write(place, (const char *)from + first, n, why);
                      }) ||
           fail("written", why);
}

bool lctx_file_arena::read_units(const char * first, const lctx_row_target * targets, int n, bool wait) {
    const stopwatch watch(nanoseconds_);
    std::string why;
    if (file_.read_parts(place_of((size_t)(first - data_)).at, targets, n, wait, why)) {
        n_read_ += std::accumulate(targets, targets + n, (size_t)0,
                                   [](size_t sum, const lctx_row_target & t) { return sum + t.size; });
        return true;
    }
    return wait && fail("read", why);
}
