// Tensors on one device, and what goes between host and device.
//
// Nothing of a device is read or written but through here: on the CPU at once, elsewhere after the graphs that were
// started there (wait()).
#pragma once

#include "../base/counts.h"
#include "arena.h"
#include "file-arena.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <vector>

// Add a node whose result is a view, and whose sources may be views, of tensors that have their memory.
void lctx_add_node(ggml_cgraph * graph, ggml_tensor * node);

class lctx_device_tensors {
  public:
    lctx_device_tensors(const lctx_device_tensors &) = delete;
    lctx_device_tensors & operator=(const lctx_device_tensors &) = delete;

    const ggml_backend_dev_t dev;
    const ggml_backend_buffer_type_t buft;
    const bool is_host;

    std::string name() const;    // of the device, for messages
    size_t bytes() const;        // of all tensors on the device
    size_t far_bytes() const;    // of those that are in memory of the host instead
    bool fits_a_buffer() const;  // before allocation: whether a buffer of the device may be that large

    // The backend of the context that runs here; it is known when its first graph is built, and lives as long as the
    // context.
    void attach(ggml_backend_sched_t sched);
    ggml_backend_t backend() const { return backend_; }

    // Read from the device. What lands and copies are done together, before anything else happens there.
    void read(const ggml_tensor * t, size_t offset, void * data, size_t size);
    void write(ggml_tensor * t, size_t offset, const void * data, size_t size);
    // As write, for runs of a state: they cross to the device together, and go where they belong there.
    void land(ggml_tensor * t, size_t offset, const void * data, size_t size);
    void copy(ggml_tensor * t, size_t from, size_t to, size_t size);
    // Until nothing is running there.
    void wait();
    // Where far tensors are in a file: what it could not do since the last call.
    std::string take_io_error() const { return file_ ? file_->take_error() : ""; }
    // The file, or nullptr.
    const lctx_file_arena * file() const { return file_; }

    // True when memory has to be committed before it is used.
    bool commits() const { return arena_->commits() || (far_ && far_->commits()); }
    // Bytes that are committed, where memory is committed in parts; else 0.
    uint64_t committed() const { return arena_->committed(); }

  protected:
    lctx_device_tensors(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, lctx_work & work);
    ~lctx_device_tensors() = default;

    ggml_tensor * add(const char * name, ggml_type type, int64_t n0, int64_t n1, int64_t n2 = 1, int64_t n3 = 1);
    // Tensors in a file in `folder`, whose units have this number of rows; or, without a folder, in memory of the host
    // that the device reads too.
    struct far_tensors {
        std::vector<ggml_tensor *> all;
        std::string folder;
        int32_t unit_rows;
    };
    // The tensors get their memory. False when there is none. shrinks: as of lctx_arena_create; dry: a buffer without
    // memory, for graphs that are never run.
    bool allocate(const far_tensors & far, bool shrinks, bool dry);
    bool is_far(const ggml_tensor * t) const;
    // Bytes [from, end) of a tensor are about to be used, or are not needed any more.
    bool commit(const ggml_tensor * t, size_t from, size_t end) const {
        return arena_of(t).commit(at(t) + from, at(t) + end);
    }
    void give_back(const ggml_tensor * t, size_t from, size_t end) const {
        arena_of(t).give_back(at(t) + from, at(t) + end);
    }
    std::string no_memory() const;
    void run_copies();

    lctx_work & work_;
    const size_t grain_ = lctx_arena_grain(buft);  // 0: memory is there as a whole
    ggml_context_ptr ctx_;
    ggml_backend_t backend_ = nullptr;
    bool is_idle_ = true;  // nothing was started on the device since the last wait()

  private:
    struct copied {
        size_t from, to, size;  // in the arena
    };
    template <typename F> void each_tensor(F && f) const {
        for (ggml_tensor * t = ggml_get_first_tensor(ctx_.get()); t; t = ggml_get_next_tensor(ctx_.get(), t)) {
            if (!t->view_src) {
                f(t);
            }
        }
    }
    lctx_arena & arena_of(const ggml_tensor * t) const { return is_far(t) ? *far_ : *arena_; }
    size_t padded(const ggml_tensor * t) const;
    size_t at(const ggml_tensor * t) const;
    std::unique_ptr<lctx_file_arena> create_file(const far_tensors & far, size_t size) const;
    void check_file();

    std::unique_ptr<lctx_arena> arena_;
    std::unique_ptr<lctx_arena> far_;
    lctx_file_arena * file_ = nullptr;  // far_, where it is one
    std::vector<ggml_tensor *> far_tensors_;
    ggml_backend_buffer_ptr dry_;
    ggml_tensor * landing_ = nullptr;  // of a device: what the host writes is copied from here
    std::vector<copied> copies_;       // not done yet
    std::vector<uint8_t> landed_;      // what goes to landing_ before them
};
