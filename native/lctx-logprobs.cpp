// The C API: log-probabilities of wanted tokens.
#include "base/firewall.h"
#include "lctx-sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace {

// The logarithm of the sum of exponentials; throws where there is none.
double log_sum(const float * row, int32_t n) {
    if (!std::all_of(row, row + n, [](float x) { return x < INFINITY; })) {
        throw std::domain_error("a logit is NaN or infinite");
    }
    const float top = *std::max_element(row, row + n);
    if (top == -INFINITY) {
        throw std::domain_error("every logit is -inf");
    }
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += std::exp(row[i] - top);
    }
    return top + std::log(sum);
}

}  // namespace

int32_t lctx_logprobs(const float * logits, int32_t n_rows, int32_t n_vocab, const int32_t * tokens, float * own,
                      int32_t n_top, int32_t * top_tokens, float * top) {
    if (n_rows < 0 || n_vocab < 1 || n_top < 0 || n_top > n_vocab ||
        std::any_of(tokens, tokens + n_rows, [&](int32_t token) { return token >= n_vocab; })) {
        return LCTX_INVALID;
    }
    const bool done = lctx_guard(nullptr, [&] {
        std::vector<int32_t> order(n_top > 0 ? n_vocab : 0);
        for (int32_t r = 0; r < n_rows; r++) {
            const float * row = logits + (size_t)r * n_vocab;
            const double norm = log_sum(row, n_vocab);
            own[r] = tokens[r] < 0 ? NAN : (float)(row[tokens[r]] - norm);
            std::iota(order.begin(), order.end(), 0);
            std::partial_sort(order.begin(), order.begin() + n_top, order.end(),
                              [&](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
            for (int32_t i = 0; i < n_top; i++) {
                top_tokens[(size_t)r * n_top + i] = order[i];
                top[(size_t)r * n_top + i] = (float)(row[order[i]] - norm);
            }
        }
    });
    return done ? LCTX_OK : LCTX_FAILED;
}
