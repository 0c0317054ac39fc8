// The best of scored candidates.
//
// Scores become integers that compare as they do. The n-th best is found by bisection: every step counts the candidates
// that reach a value. So the time does not depend on how many are wanted.
#pragma once

#include "vec.h"

#include <algorithm>
#include <cfloat>
#include <cstdint>

typedef uint32_t lctx_vu __attribute__((vector_size(LCTX_VL * 4)));

// Larger for a better score. NaN, a chunk without rows, is worse than any number; the two zeros are one.
static inline uint32_t lctx_key_of(float score) {
    constexpr uint32_t SIGN = 0x80000000u;
    const float there = (score > -FLT_MAX ? score : -FLT_MAX) + 0.0f;
    uint32_t bits;
    memcpy(&bits, &there, sizeof(bits));
    return score != score ? 1 : bits & SIGN ? ~bits : bits | SIGN;
}

// Room for the keys of n candidates.
static inline int lctx_n_key(int n) {
    return (n + LCTX_VL - 1) / LCTX_VL * LCTX_VL;
}

// Count those of n keys, a multiple of LCTX_VL, that reach `least`.
static inline int lctx_count_keys(const uint32_t * keys, int n, uint32_t least) {
    lctx_vi count = {};
    for (int i = 0; i < n; i += LCTX_VL) {
        lctx_vu key;
        memcpy(&key, keys + i, sizeof(key));
        count -= (lctx_vi)(key >= lctx_vu{} + least);
    }
    int sum = 0;
    for (int i = 0; i < LCTX_VL; i++) {
        sum += count[i];
    }
    return sum;
}

// The largest key that n_best of the keys reach; n as for lctx_count_keys.
static inline uint32_t lctx_threshold(const uint32_t * keys, int n, int n_best) {
    uint32_t low = 1, high = *std::max_element(keys, keys + n);
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        const int reached = lctx_count_keys(keys, n, middle);
        if (reached == n_best) {
            return middle;
        }
        if (reached > n_best) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// The n_best best of candidates [first, end), ascending in `best`; among those that only reach the threshold, the
// first. keys: room for all.
static inline void lctx_take_best(const float * scores, int first, int end, int n_best, uint32_t * keys,
                                  int32_t * best) {
    const int n = lctx_n_key(end - first);
    for (int i = first; i < end; i++) {
        keys[i - first] = lctx_key_of(scores[i]);
    }
    std::fill(keys + (end - first), keys + n, 0);  // worse than any
    const uint32_t least = lctx_threshold(keys, n, n_best);
    int rest = n_best - (least == UINT32_MAX ? 0 : lctx_count_keys(keys, n, least + 1));
    for (int i = 0; i < n; i += LCTX_VL) {
        if (lctx_count_keys(keys + i, LCTX_VL, least) == 0) {
            continue;  // as nearly everywhere
        }
        for (int j = i; j < i + LCTX_VL; j++) {
            if (keys[j] > least || (keys[j] == least && rest-- > 0)) {
                *best++ = first + j;
            }
        }
    }
}
