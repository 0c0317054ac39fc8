// What *center* adds up for a query head, and how a row is scored with it: the arithmetic that the CPU and the CUDA kernels share.
#pragma once

#include "ggml.h"
#include "portable.h"

#include <cmath>
#include <cstdint>

// One query head of one sequence: sums over its queries so far, before their rotation, and the same before the last ubatch.
struct lctx_query_sums {
    float * data;
    int32_t head_dim;

    static constexpr int32_t PLANES = 2;
    LCTX_HD static int32_t plane(int32_t head_dim) { return head_dim + head_dim / 2; }
    LCTX_HD static int64_t size(int32_t head_dim) { return (int64_t)PLANES * plane(head_dim); }

    LCTX_HD float * queries() const { return data; }             // [head_dim]
    LCTX_HD float * lengths() const { return data + head_dim; }  // [head_dim / 2] of the rotated pairs
    LCTX_HD float * undo() const { return data + plane(head_dim); }
};

// The dimensions of a rotated pair.
struct lctx_pair_at {
    int32_t first, second;

    LCTX_HD lctx_pair_at(int32_t pair, int32_t n_pair, int32_t rope_mode)
        : first(rope_mode == GGML_ROPE_TYPE_NEOX ? pair : 2 * pair),
          second(rope_mode == GGML_ROPE_TYPE_NEOX ? pair + n_pair : 2 * pair + 1) {}
};

LCTX_HD inline float lctx_length(float x, float y) {
    return sqrtf(x * x + y * y);
}

// A rotated pair as later queries see it: their mean, and how much longer than it they are.
struct lctx_expected_pair {
    float first, second, spread;

    // n: queries; cs: cos and sin of the pair at the last of them; ahead: their means over the distances from there on.
    LCTX_HD lctx_expected_pair(const lctx_query_sums & sums, const lctx_pair_at & at, int32_t pair, float n, const float * cs,
                               const float * ahead) {
        const float x = sums.queries()[at.first] / n, y = sums.queries()[at.second] / n;
        const float here_x = x * cs[0] - y * cs[1], here_y = x * cs[1] + y * cs[0];
        first = here_x * ahead[0] - here_y * ahead[1];
        second = here_x * ahead[1] + here_y * ahead[0];
        spread = (sums.lengths()[pair] / n - lctx_length(x, y)) * lctx_length(cs[0], cs[1]);
    }
};
