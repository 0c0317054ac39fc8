// Memory that kernels of a CUDA device reach, in buffers of the device's own type: a scheduler copies what lies in other types.
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <memory>
#include <vector>

// Memory of the host that stays where it is and that kernels read and write through the bus; nullptr when the system refuses.
ggml_backend_buffer_t lctx_cuda_pinned_buffer(ggml_backend_buffer_type_t buft, size_t size);

// Bytes that are committed and given back together; 0: the device has no virtual memory, or is none of CUDA.
size_t lctx_cuda_arena_grain(ggml_backend_buffer_type_t buft);

// Where a buffer lies.
struct lctx_cuda_memory {
    int device = -1;  // of the CUDA runtime
    char * data = nullptr;
    size_t size = 0;
};

// Memory of the device in a reserved range of addresses: committed in grains before it is used, given back in grains after.
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

  private:
    lctx_cuda_arena(ggml_backend_buffer_type_t buft, int device, size_t grain) : buft_(buft), grain_(grain) { memory_.device = device; }
    bool map(size_t index);
    void unmap(size_t index);

    ggml_backend_buffer_type_t buft_;
    lctx_cuda_memory memory_;
    size_t grain_;
    std::vector<bool> is_committed_;  // per grain: each is a mapping of its own, since a part of one cannot be unmapped
};
