// Budgets of heads that keep their best rows together (AdaKV, arXiv 2407.11550; KVzip, arXiv 2505.23416): how many each
// of them keeps.
#pragma once

#include "../ops/retain.h"

#include <cstdint>
#include <vector>

// A head that is about to evict.
struct lctx_contender {
    std::vector<uint64_t>
        keys;        // of the rows that may leave: larger for a better score, of equal ones for the newer row
    int32_t n_safe;  // rows that stay whatever their score

    // After row p. rows, scores: [n_held]; chunk_size: 0 or that of the chunks.
    lctx_contender(const lctx_retain & retain, int32_t chunk_size, int32_t p, const int32_t * rows,
                   const int32_t * scores, int32_t n_held);
};

// Return how many rows each head keeps of a text of n_row rows, of which the heads together keep a fraction: those that
// are safe, the best ones of every head up to its own part, and the best of all. Keys are in another order afterwards.
// A fifth of an equal part is each head's own (AdaKV's safeguard, section 4): heads that no query of a replay needs
// would keep no row, and some of them questions need.
std::vector<int32_t> lctx_text_budgets(std::vector<lctx_contender> & heads, double fraction, int32_t n_row);

// Return how many rows each head of one layer keeps: each has the budget of the rule, of which a fifth is its own.
std::vector<int32_t> lctx_layer_budgets(std::vector<lctx_contender> & heads, const lctx_retain & retain);
