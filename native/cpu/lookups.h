// Counts how much of the lists *attend* and *vote* look at, for tests, with an addition per tile or split. It must grow
// neither with the number of threads nor with the context.
#pragma once

#include <atomic>
#include <cstdint>

struct lctx_lookups {
    static inline std::atomic<int64_t> segments{0};  // of lists that were inverted
    static inline std::atomic<int64_t> items{0};     // that splits of tiles went through
};
