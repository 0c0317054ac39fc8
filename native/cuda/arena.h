// Memory of a CUDA device in a reserved range of addresses: committed in grains before it is used, given back in grains after.
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <memory>
#include <vector>

class lctx_cuda_arena {
  public:
    // buft: that of a CUDA device. nullptr when it has no virtual memory, or refuses.
    static std::unique_ptr<lctx_cuda_arena> reserve(ggml_backend_buffer_type_t buft, size_t size);
    ~lctx_cuda_arena();
    lctx_cuda_arena(const lctx_cuda_arena &) = delete;
    lctx_cuda_arena & operator=(const lctx_cuda_arena &) = delete;

    size_t grain() const { return grain_; }
    // The whole range as a buffer of the device's own type, of which only what is committed may be touched; to be freed before the range.
    ggml_backend_buffer_t new_buffer();

    // All grains that bytes [from, end) touch, from the beginning of the range; what is in them is undefined. False when the device has
    // no room, and nothing was committed.
    bool commit(size_t from, size_t end);
    // The whole grains in [from, end); nothing may be running that uses them.
    void give_back(size_t from, size_t end);

    int device() const { return device_; }
    char * data() const { return data_; }
    // f(from, end) for every grain that is committed.
    template <typename F> void each_committed(F && f) const {
        for (size_t i = 0; i < is_committed_.size(); i++) {
            if (is_committed_[i]) {
                f(i * grain_, (i + 1) * grain_);
            }
        }
    }

  private:
    lctx_cuda_arena(ggml_backend_buffer_type_t buft, int device, size_t grain) : buft_(buft), device_(device), grain_(grain) {}
    bool map(size_t index);
    void unmap(size_t index);

    ggml_backend_buffer_type_t buft_;
    int device_;  // of the CUDA runtime
    size_t grain_;
    char * data_ = nullptr;
    std::vector<bool> is_committed_;  // per grain: each is a mapping of its own, since a part of one cannot be unmapped
};
