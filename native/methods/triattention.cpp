// TriAttention (arXiv 2604.04921): of a budget of rows a head keeps those which the mean of its queries, before they are rotated, will
// find important from later positions. With q the queries so far, k a key before its rotation, p their positions, f a rotated pair:
//
//   score = mean over d of sum over f of |E q_f| |k_f| cos(w_f (p_q + d - p_k) + phi_f) + sum over f of (E|q_f| - |E q_f|) |k_f|
//
// with d = 1, 2, 4 .. 65536, in units of its standard deviation over the rows; of the query heads of a group the largest counts. The paper
// has the means from a calibration, here they are those of the sequence itself. Channels that are not rotated add their product.
#include "method.h"

#include <algorithm>

lctx_rule lctx_triattention_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    constexpr int32_t RECENT = 128, EVERY = 128;  // the paper's
    constexpr int32_t SHARE = 4;                  // of a small budget
    std::string reason;
    lctx_retain r = {};
    r.score = LCTX_SCORE_MEAN;
    r.budget = lctx_rule_budget(spec, env, reason);
    const int32_t most = std::max(1, r.budget / SHARE);
    r.recent = lctx_rule_option(spec, "recent", std::min(RECENT, r.budget / SHARE), 0);
    r.evict_every = lctx_rule_option(spec, "evict_every", std::min(EVERY, most), 1);
    r.window = r.evict_every;
    if (r.recent >= r.budget) {
        throw lctx_refusal("triattention: recent " + std::to_string(r.recent) + " must be below budget " + std::to_string(r.budget));
    }
    const std::string heads = lctx_rule_heads(spec, r);
    return {r,
            "triattention,budget=" + std::to_string(r.budget) + ",recent=" + std::to_string(r.recent) +
                ",evict_every=" + std::to_string(r.evict_every) + heads,
            reason};
}
