// CORM (arXiv 2404.15949, algorithm 1): a key stays while one of the last `window` queries found it important, that is,
// gave it at least the average weight 1/t (definition 3.1), or while it is among the last `recent` ones. No budget.
//
// The paper keeps a window x n matrix of bits; the last query that found a key important makes the same decisions. With
// grouped query heads a key stays when any of them wants it. t counts the rows that the query's segments span, evicted
// ones too.
#include "method.h"

#include <algorithm>

lctx_rule lctx_corm_create(const lctx_method_spec & spec, const lctx_method_env &) {
    constexpr int32_t WINDOW = 256, RECENT = 256;  // the paper's
    constexpr int32_t LEAST_EVERY =
        64;  // measured (docs/methods/eviction.md): from the window on, every row needs one vote only
    lctx_retain r = {};
    r.score = LCTX_SCORE_LAST;
    r.window = lctx_rule_option(spec, "window", WINDOW, 1);
    r.recent = lctx_rule_option(spec, "recent", RECENT, 0);
    r.evict_every = lctx_rule_option(spec, "evict_every", std::max(r.window, LEAST_EVERY), 1);
    return {r,
            "corm,window=" + std::to_string(r.window) + ",recent=" + std::to_string(r.recent) +
                ",evict_every=" + std::to_string(r.evict_every),
            "every head drops what its last " + std::to_string(r.window) +
                " queries found less important than the average"};
}
