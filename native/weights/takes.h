// Divides the rows of a product among threads.
#pragma once

#include <algorithm>
#include <cstdint>

// Rows that threads take, ever fewer: half of what is left by all of them together, so that each reads long stretches
// and all end together.
class lctx_takes {
  public:
    // unit: rows that stay together.
    lctx_takes(int64_t n_row, int64_t unit, int64_t n_thread) : n_row(n_row), unit(unit), n_thread(n_thread) {}
    int64_t first(int64_t take) const {
        constexpr int64_t LEAST = 16;
        const auto share = [&](int64_t left) { return std::max(LEAST, left / (2 * n_thread) / unit * unit); };
        int64_t left = n_row, size = share(left);
        for (; take >= n_thread && size > LEAST; take -= n_thread) {
            left -= n_thread * size;
            size = share(left);
        }
        return std::min(n_row, n_row - left + take * size);
    }

  private:
    int64_t n_row, unit, n_thread;
};
