// Work buffers in parts.
#pragma once

#include "ggml.h"

#include <cstdint>

constexpr size_t LCTX_PART_ALIGN = 64;

// Parts of a work buffer, one after the other, each at the start of a cache line.
struct lctx_parts {
    uintptr_t base;  // 0 to count only
    size_t used = 0;

    template <typename T> T * take(size_t n) {
        T * part = (T *)(base + used);
        used += GGML_PAD(n * sizeof(T), LCTX_PART_ALIGN);
        return part;
    }
};
