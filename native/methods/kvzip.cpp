// KVzip (arXiv 2505.23416): a text is read as it is, and compressed when that is asked for. Of all layers and KV heads together the rows
// stay to which a query of the replayed text gave the largest weights. Weights are of all rows that a query reads; in the paper's code,
// queries read all rows too, but weights are of their own piece, the replay and the first rows. With replay=piece, they read only these.
#include "method.h"

lctx_rule lctx_kvzip_create(const lctx_method_spec & spec, const lctx_method_env &) {
    constexpr int32_t NEVER = 1 << 30;  // rows of a sequence are fewer
    lctx_retain r = {};
    r.score = LCTX_SCORE_MAX;
    r.evict_every = NEVER;
    r.budget = NEVER;
    const bool by_pieces = spec.get("replay") == 1;
    return {r, by_pieces ? "kvzip,replay=piece" : "kvzip", "nothing is evicted before compress() is called", 1, by_pieces};
}
