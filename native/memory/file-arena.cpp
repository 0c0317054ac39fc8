#include "file-arena.h"

#include "../base/refusal.h"
#include "ggml-backend-impl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
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

// A file that has no name from the beginning, or loses it at once.
int open_unnamed(const std::string & folder) {
#ifdef O_TMPFILE
    const int unnamed = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) {
        return unnamed;
    }
#endif
    std::string name = folder + "/pylongctx-kv-XXXXXX";
    const int named = mkstemp(name.data());
    if (named >= 0) {
        fcntl(named, F_SETFD, FD_CLOEXEC);
        unlink(name.c_str());
    }
    return named;
}

// Network file systems give a file that is open another name instead of removing it.
bool has_name(int file) {
    struct stat s = {};
    return fstat(file, &s) != 0 || s.st_nlink != 0;
}

uint64_t free_bytes(int file) {
    struct statvfs s = {};
    return fstatvfs(file, &s) == 0 ? (uint64_t)s.f_bavail * s.f_frsize : 0;
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
      file_(open_unnamed(folder)),
      grains_(GRAIN, size_) {
    if (file_ < 0) {
        refuse(folder, strerror(errno));
    }
    const uint64_t there = free_bytes(file_);
    const std::string why = has_name(file_) ? "its file system keeps files that were removed while they are open"
                            : there < size_ ? mib(size_) + " are needed for n_ctx tokens and " + mib(there) +
                                                  " are free (or lower n_ctx, or use type_k=type_v=q8_0)"
                            : ftruncate(file_, (off_t)size_) != 0 ? strerror(errno)
                                                                  : "";
    void * data =
        why.empty() ? mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
    if (data == MAP_FAILED) {
        const std::string reason = why.empty() ? strerror(errno) : why;
        close(file_);
        refuse(folder, reason);
    }
    data_ = (char *)data;
    buffer_.reset(ggml_backend_buffer_init(buft, interface(), this, size_));
}

lctx_file_arena::~lctx_file_arena() {
    buffer_.reset();
    munmap(data_, size_);
    close(file_);
}

bool lctx_file_arena::fail(const char * what) {
    const std::string reason = errno ? strerror(errno) : "its length has changed";
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) {
        error_ = "kv_offload='disk': the file of K and V in " + folder_ + " could not be " + what + ": " + reason;
    }
    return false;
}

std::string lctx_file_arena::take_error() {
    struct stat s = {};
    if (fstat(file_, &s) != 0 || (size_t)s.st_size != size_) {
        errno = 0;
        fail("read");
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
#ifdef __linux__
        int rc = 0;
        do {
            rc = fallocate(file_, 0, (off_t)first, (off_t)(last - first));
        } while (rc != 0 && errno == EINTR);
        return rc == 0 || errno == EOPNOTSUPP || fail("enlarged");  // unsupported: writing shows whether there is room
#else
        return first <= last;
#endif
    });
}

void lctx_file_arena::give_back(size_t from, size_t end) {
    if (from >= end) {
        return;
    }
    const size_t first_unit = place_of(from).at / stripe_, end_unit = place_of(end - 1).at / stripe_ + 1;
    grains_.give_back(first_unit * stripe_, end_unit * stripe_, [&](size_t first, size_t last) {
#ifdef __linux__
        fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first, (off_t)(last - first));
#endif
        return first <= last;
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
        if (!f((off_t)p.at, done, n)) {
            return false;
        }
        done += n;
    }
    return true;
}

bool lctx_file_arena::read(const char * at, void * to, size_t size) {
    const stopwatch watch(nanoseconds_);
    n_read_ += size;
    return each_piece(at, size, [&](off_t place, size_t first, size_t n) {
        for (size_t done = 0; done < n;) {
            const ssize_t got = pread(file_, (char *)to + first + done, n - done, place + (off_t)done);
            if (got <= 0 && !(got < 0 && errno == EINTR)) {
                errno = got == 0 ? 0 : errno;
                memset((char *)to + first + done, 0, size - first - done);
                return fail("read");
            }
            done += got > 0 ? (size_t)got : 0;
        }
        return true;
    });
}

bool lctx_file_arena::write(char * at, const void * from, size_t size) {
    const stopwatch watch(nanoseconds_);
    n_written_ += size;
    return each_piece(at, size, [&](off_t place, size_t first, size_t n) {
        for (size_t done = 0; done < n;) {
            const ssize_t put = pwrite(file_, (const char *)from + first + done, n - done, place + (off_t)done);
            if (put < 0 && errno != EINTR) {
                return fail("written");
            }
            done += put > 0 ? (size_t)put : 0;
        }
        return true;
    });
}

bool lctx_file_arena::read_units(const char * first, const lctx_row_target * targets, int n, bool wait) {
    const stopwatch watch(nanoseconds_);
    const auto place = (off_t)place_of((size_t)(first - data_)).at;
    iovec parts[lctx_row_file::MOST_TARGETS];
    size_t size = 0;
    for (int i = 0; i < n; i++) {
        parts[i] = {targets[i].to, targets[i].size};
        size += targets[i].size;
    }
#ifdef RWF_NOWAIT
    const ssize_t got = preadv2(file_, parts, n, place, wait ? 0 : RWF_NOWAIT);
#else
    const ssize_t got = wait ? preadv(file_, parts, n, place) : -1;
#endif
    if (got == (ssize_t)size) {
        n_read_ += size;
        return true;
    }
    if (!wait) {
        posix_fadvise(file_, place, (off_t)size, POSIX_FADV_WILLNEED);
        return false;
    }
    errno = got >= 0 ? 0 : errno;
    return fail("read");
}
