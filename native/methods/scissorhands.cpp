// Scissorhands (arXiv 2305.17118, algorithm 2): of a budget of rows a head keeps the newest and those that most queries
// of the history window found important (at least the average weight).
#include "method.h"

lctx_rule lctx_scissorhands_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    constexpr int32_t RECENT_SHARE = 4;  // 768 + 256, as in table 1 of the CORM paper
    std::string reason;
    lctx_retain r = {};
    r.score = LCTX_SCORE_COUNT;
    r.resets = 1;
    r.budget = lctx_rule_budget(spec, env, reason);
    r.evict_every = lctx_rule_evict_every(spec, r.budget);
    r.window = lctx_rule_option(spec, "window", r.evict_every, 1);
    r.recent = lctx_rule_option(spec, "recent", r.budget / RECENT_SHARE, 0);
    if (r.recent >= r.budget) {
        throw lctx_refusal("scissorhands: recent " + std::to_string(r.recent) + " must be below budget " +
                           std::to_string(r.budget));
    }
    if (r.window > r.evict_every) {
        throw lctx_refusal("scissorhands: window " + std::to_string(r.window) + " must not exceed evict_every " +
                           std::to_string(r.evict_every) + ": votes are counted from one eviction to the next");
    }
    const std::string heads = lctx_rule_heads(spec, r);
    return {r,
            "scissorhands,budget=" + std::to_string(r.budget) + ",window=" + std::to_string(r.window) +
                ",recent=" + std::to_string(r.recent) + ",evict_every=" + std::to_string(r.evict_every) + heads,
            reason};
}
