// A reserved range of addresses: memory is committed when it is first written to, and can be given back in parts.
#pragma once

#include <cstddef>

class lctx_arena {
  public:
    lctx_arena() = default;
    ~lctx_arena();
    lctx_arena(const lctx_arena &) = delete;
    lctx_arena & operator=(const lctx_arena &) = delete;

    // Bytes that one commitment has at least: parts are given back in multiples of it.
    static size_t grain();

    // All zero; false when the system refuses. Once.
    bool reserve(size_t size);
    // The bytes in [from, end) are zero again and belong to the system, but for the ends that share a grain with their neighbours.
    static void give_back(char * from, char * end);

    char * data() const { return data_; }
    size_t size() const { return size_; }

  private:
    char * data_ = nullptr;
    size_t size_ = 0;
};
