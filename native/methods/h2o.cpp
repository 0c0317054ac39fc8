// H2O (arXiv 2306.14048): of a budget of rows a head keeps the newest and those with the largest sum of attention
// weights.
#include "method.h"

lctx_rule lctx_h2o_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    constexpr int32_t RECENT_SHARE = 4;  // 768 + 256, as in table 1 of the CORM paper
    std::string reason;
    lctx_retain r = {};
    r.score = LCTX_SCORE_SUM;
    r.budget = lctx_rule_budget(spec, env, reason);
    r.recent = lctx_rule_option(spec, "recent", r.budget / RECENT_SHARE, 0);
    r.evict_every = lctx_rule_evict_every(spec, r.budget);
    r.window = r.evict_every;
    if (r.recent >= r.budget) {
        throw lctx_refusal("h2o: recent " + std::to_string(r.recent) + " must be below budget " +
                           std::to_string(r.budget));
    }
    const std::string heads = lctx_rule_heads(spec, r);
    return {r,
            "h2o,budget=" + std::to_string(r.budget) + ",recent=" + std::to_string(r.recent) +
                ",evict_every=" + std::to_string(r.evict_every) + heads,
            reason};
}
