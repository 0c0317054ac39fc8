// A bump allocator of a work buffer.
#pragma once

#include "ggml.h"

#include <cstdint>

constexpr size_t LCTX_BUMP_ALIGN = 64;

// Arrays in a work buffer, one after the other, each at the start of a cache line.
struct lctx_bump {
    uintptr_t base;  // 0 to count only
    size_t used = 0;

    template <typename T> T * take(size_t n) {
        T * array = (T *)(base + used);
        used += GGML_PAD(n * sizeof(T), LCTX_BUMP_ALIGN);
        return array;
    }
};
