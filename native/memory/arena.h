// The memory of one store: a range of addresses on a device, of which parts are committed before they are used and
// given back after.
//
// Three kinds: on the CPU the system commits what is written to first; a plain buffer of a device is there as a whole;
// and a device with virtual memory (a subclass of its own) commits in grains.
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

class lctx_arena {
  public:
    virtual ~lctx_arena() = default;
    lctx_arena(const lctx_arena &) = delete;
    lctx_arena & operator=(const lctx_arena &) = delete;

    // True when commit() does something: then no byte may be touched before it was committed.
    virtual bool commits() const { return false; }
    // Bytes [from, end), counted from the beginning, are about to be used; false when the device has no room for them.
    // Cheap when they were committed before.
    virtual bool commit(size_t from, size_t end) { return from <= end; }
    // Bytes [from, end) and their contents are not needed, except the ends that share a grain with their neighbours.
    // Nothing may be running that uses them.
    virtual void give_back(size_t, size_t) {}
    // Bytes that are committed now; 0 where commit() does nothing.
    virtual uint64_t committed() const { return 0; }

    ggml_backend_buffer_t buffer() const { return buffer_.get(); }

  protected:
    lctx_arena() = default;
    ggml_backend_buffer_ptr buffer_;
};

// Remembers which grains of a range are committed.
class lctx_grains {
  public:
    lctx_grains(size_t grain, size_t size) : grain_(grain), is_committed_((size + grain - 1) / grain, false) {}

    // f(from, end) for the runs of whole grains around [from, end) that are not committed; false as soon as f is.
    template <typename F> bool commit(size_t from, size_t end, F && f) {
        return each_run(from / grain_, (end + grain_ - 1) / grain_, false, f);
    }
    // f(from, end) for the runs of whole grains inside [from, end) that are committed.
    template <typename F> void give_back(size_t from, size_t end, F && f) {
        each_run((from + grain_ - 1) / grain_, end / grain_, true, f);
    }

    uint64_t committed() const { return grain_ * std::count(is_committed_.begin(), is_committed_.end(), true); }

  private:
    template <typename F> bool each_run(size_t grain, size_t end, bool were, F && f) {
        while (grain < end) {
            const size_t first = grain;
            while (grain < end && is_committed_[grain] == were) {
                grain++;
            }
            if (first < grain && !f(first * grain_, grain * grain_)) {
                return false;
            }
            for (size_t i = first; i < grain; i++) {
                is_committed_[i] = !were;
            }
            grain += grain < end && is_committed_[grain] != were;
        }
        return true;
    }

    size_t grain_;
    std::vector<bool> is_committed_;
};

// Bytes that are committed and given back together in arenas of this buffer type; 0: they are allocated as a whole.
size_t lctx_arena_grain(ggml_backend_buffer_type_t buft);

// Memory of this machine's host that the device of a buffer type reads and writes too; nullptr when there is no such
// thing, or none left.
std::unique_ptr<lctx_arena> lctx_arena_create_far(ggml_backend_buffer_type_t buft, size_t size);

// nullptr when the device refuses. shrinks: parts are given back while others stay in use; else the CPU may take huge
// pages. LCTX_STRICT_ARENA=1 in the environment: on the CPU too, what is not committed cannot be touched. A larger
// number is the grain, in bytes.
std::unique_ptr<lctx_arena> lctx_arena_create(ggml_backend_buffer_type_t buft, size_t size, bool shrinks);
