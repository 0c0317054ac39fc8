// A backend of ours registers here how its devices map memory, and kernels that run in place of those of the CPU, so
// that the rooms which use it do not depend on it.
//
// Functions of a range are virtual, and nothing of a C++ library is in these types: a backend may come with a library
// of its own (cuda/module.h).
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

// Memory of a device in a reserved range of addresses: committed in grains before it is used, given back in grains
// after.
class lctx_device_range {
  public:
    virtual ~lctx_device_range() = default;

    // The whole range as a buffer of the device's own type, of which only what is committed may be touched; to be freed
    // before the range.
    virtual ggml_backend_buffer_t new_buffer() = 0;
    // All grains that bytes [from, end) touch, from the beginning of the range; what is in them is undefined. False
    // when the device has no room, and nothing was committed.
    virtual bool commit(size_t from, size_t end) = 0;
    // The whole grains in [from, end); nothing may be running that uses them.
    virtual void give_back(size_t from, size_t end) = 0;
    // Bytes that are committed now.
    virtual uint64_t committed() const = 0;
};

struct lctx_device_memory_kind {
    // Memory of the host that stays where it is and that kernels read and write through the bus; nullptr when the
    // system refuses.
    ggml_backend_buffer_t (*pinned_buffer)(ggml_backend_buffer_type_t buft, size_t size);
    // Bytes that are committed and given back together; 0: the device has no virtual memory, or is not one of this
    // backend.
    size_t (*grain)(ggml_backend_buffer_type_t buft);
    // buft: that of a device of this backend. nullptr when it has no virtual memory, or refuses; else the caller
    // deletes it.
    lctx_device_range * (*reserve)(ggml_backend_buffer_type_t buft, size_t size);
};

// From now on arenas of devices are made of this memory (memory/arena.cpp); nullptr: of plain buffers.
void lctx_arena_use(const lctx_device_memory_kind * kind);

// Kernels for nodes of GGML_OP_LCTX in the memory of the host.
struct lctx_kernels {
    // Return whether the kernels run the node now. Every thread asks, and must get the same answer.
    bool (*takes)(const ggml_tensor * node);
    // Bytes of work buffer for run.
    size_t (*wsize)(const ggml_tensor * node);
    // The whole node, on one thread.
    void (*run)(ggml_tensor * node, void * work);
};

// From now on they run the nodes that they take, and the kernels of cpu/ the others (cpu/dispatch.cpp).
void lctx_cpu_use(const lctx_kernels * kernels);
