// Memory that kernels of a CUDA device reach, in buffers of the device's own type: a scheduler copies what lies in other types.
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

// Memory of the device in a reserved range of addresses: committed in grains before it is used, given back in grains after. Functions are
// virtual, and nothing of a C++ library is in their types: the caller may come with a library of its own (module.h).
class lctx_cuda_arena {
  public:
    virtual ~lctx_cuda_arena() = default;

    // The whole range as a buffer of the device's own type, of which only what is committed may be touched; to be freed before the range.
    virtual ggml_backend_buffer_t new_buffer() = 0;
    // All grains that bytes [from, end) touch, from the beginning of the range; what is in them is undefined. False when the device has
    // no room, and nothing was committed.
    virtual bool commit(size_t from, size_t end) = 0;
    // The whole grains in [from, end); nothing may be running that uses them.
    virtual void give_back(size_t from, size_t end) = 0;
    // Bytes that are committed now.
    virtual uint64_t committed() const = 0;
};

struct lctx_cuda_arenas {
    // Memory of the host that stays where it is and that kernels read and write through the bus; nullptr when the system refuses.
    ggml_backend_buffer_t (*pinned_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    // Bytes that are committed and given back together; 0: the device has no virtual memory, or is none of CUDA.
    size_t (*grain)(ggml_backend_buffer_type_t buft);
    // buft: that of a CUDA device. nullptr when it has no virtual memory, or refuses; else the caller deletes it.
    lctx_cuda_arena * (*reserve)(ggml_backend_buffer_type_t buft, size_t size);
};

extern const lctx_cuda_arenas lctx_cuda_own_arenas;
