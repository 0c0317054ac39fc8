// SnapKV (arXiv 2404.14469, section 4): when a prompt ends, heads keep its last tokens, the observation window, and of
// the rows before it those with the largest sum of attention weights from queries of the window, summed over neighbors.
// The paper gives all heads the same budget; here they share one, as with kvzip.
#include "method.h"

lctx_rule lctx_snapkv_create(const lctx_method_spec & spec, const lctx_method_env &) {
    constexpr int32_t NEVER = 1 << 30;  // rows of a sequence are fewer
    constexpr int32_t WINDOW = 64;  // of the authors' program, whose pool is 5: that loses the later digits of numbers
    constexpr int32_t POOL = 17;
    lctx_retain r = {};
    r.score = LCTX_SCORE_SUM;
    r.recent = lctx_rule_option(spec, "window", WINDOW, 1);
    r.evict_every = NEVER;
    r.budget = NEVER;
    const int32_t pool = lctx_rule_option(spec, "pool", POOL, 1);
    if (pool % 2 == 0) {
        throw lctx_refusal("snapkv: pool must be odd, not " + std::to_string(pool));
    }
    return {r, "snapkv,window=" + std::to_string(r.recent) + ",pool=" + std::to_string(pool),
            "nothing is evicted before compress() is called", pool};
}
