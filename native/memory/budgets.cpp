#include "budgets.h"

#include <algorithm>
#include <functional>

namespace {

constexpr int32_t SAFEGUARD = 5;  // every head keeps this fraction, one fifth, of an equal part of a budget

// Return how many rows each head keeps, so that they keep `total` together: those that are safe, the `least` best of
// every head, and the best of all. Of equal keys that of the first head stays.
std::vector<int32_t> divide_budget(std::vector<lctx_contender> & heads, int64_t total, int32_t least) {
    const auto best_first = [](std::vector<uint64_t> & keys, int64_t n) {
        std::nth_element(keys.begin(), keys.begin() + n, keys.end(), std::greater<uint64_t>());
    };
    std::vector<int32_t> budgets, own;
    std::vector<uint64_t> open;
    for (lctx_contender & head : heads) {
        own.push_back(std::min(std::max(0, least - head.n_safe), (int32_t)head.keys.size()));
        best_first(head.keys, own.back());
        open.insert(open.end(), head.keys.begin() + own.back(), head.keys.end());
        budgets.push_back(head.n_safe + own.back());
        total -= budgets.back();
    }
    const int64_t n = std::min(std::max<int64_t>(0, total), (int64_t)open.size());
    if (n == 0) {
        return budgets;
    }
    best_first(open, n - 1);
    const uint64_t last = open[n - 1];
    int64_t n_equal = std::count(open.begin(), open.begin() + n, last);
    for (size_t i = 0; i < heads.size(); i++) {
        for (auto key = heads[i].keys.begin() + own[i]; key != heads[i].keys.end(); key++) {
            budgets[i] += *key > last || (*key == last && n_equal-- > 0);
        }
    }
    return budgets;
}

}  // namespace

lctx_contender::lctx_contender(const lctx_retain & retain, int32_t chunk_size, int32_t p, const int32_t * rows,
                               const int32_t * scores, int32_t n_held) {
    const auto n_old = (int32_t)(std::lower_bound(rows, rows + n_held, retain.first_safe(p, chunk_size)) - rows);
    for (int32_t i = 0; i < n_old; i++) {
        keys.push_back((uint64_t)lctx_held::rank(retain.score, scores[i]) << 32 | (uint32_t)rows[i]);
    }
    n_safe = n_held - n_old;
}

std::vector<int32_t> lctx_text_budgets(std::vector<lctx_contender> & heads, double fraction, int32_t n_row) {
    const double equal = fraction * n_row;
    return divide_budget(heads, (int64_t)(equal * (double)heads.size()), (int32_t)equal / SAFEGUARD);
}

std::vector<int32_t> lctx_layer_budgets(std::vector<lctx_contender> & heads, const lctx_retain & retain) {
    return divide_budget(heads, (int64_t)retain.budget * (int64_t)heads.size(), retain.budget / SAFEGUARD);
}
