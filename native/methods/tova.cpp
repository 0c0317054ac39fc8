// TOVA (arXiv 2401.06104): of a budget of rows a head keeps those to which the last query gives the largest weights.
// The paper averages over the heads of a layer; here every KV head decides for itself, or with heads=adaptive they
// share what they keep.
#include "method.h"

lctx_rule lctx_tova_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    std::string reason;
    lctx_retain r = {};
    r.score = LCTX_SCORE_SUM;
    r.resets = 1;
    r.window = 1;
    r.budget = lctx_rule_budget(spec, env, reason);
    r.evict_every = lctx_rule_evict_every(spec, r.budget);
    const std::string heads = lctx_rule_heads(spec, r);
    return {r, "tova,budget=" + std::to_string(r.budget) + ",evict_every=" + std::to_string(r.evict_every) + heads,
            reason};
}
