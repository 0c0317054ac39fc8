// Weights that a token reads once: fetched early, because the hardware stops at the end of 4 KiB and begins slowly.
#pragma once

#include <cstddef>

constexpr size_t LCTX_AHEAD =
    8192;  // bytes, into the second-level cache; 4096 leave a quarter of the bandwidth, more are no better

// Prefetch what will be read LCTX_AHEAD bytes after these n bytes.
static inline void lctx_read_ahead(const void * p, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch((const char *)p + LCTX_AHEAD + i, 0, 2);
    }
}
