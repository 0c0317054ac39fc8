// Other chunks than those with the best scores: what LongHeads (arXiv 2402.10685) compares with in table 4.
#pragma once

#include "../ops/chunks.h"

#include <cstddef>
#include <cstdint>

// A number that looks random, the same for the same inputs (splitmix64).
inline float lctx_noise(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t z = (a * 0x9e3779b97f4a7c15u) ^ (b * 0xbf58476d1ce4e5b9u) ^ (c * 0x94d049bb133111ebu);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)((z ^ (z >> 31)) >> 40);
}

// Replace the scores of chunks [0, own) as the ablation says.
inline void lctx_ablate(lctx_ablation ablation, int32_t row, int choice, int own, float * scores) {
    for (int i = 0; i < own && ablation != LCTX_ABLATE_NONE; i++) {
        float & score = scores[i];
        switch (ablation) {
            case LCTX_ABLATE_RANDOM:
            case LCTX_ABLATE_RANDOM_ALL: score = lctx_noise(row, choice, i); break;
            case LCTX_ABLATE_LAST:       score = -score; break;
            default:                     break;
        }
    }
}
