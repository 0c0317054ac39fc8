// KVzip (arXiv 2505.23416): a text is read as it is, and compressed when that is asked for. Of all layers and KV heads
// together the rows stay to which a query of the replayed text gave the largest weights. In the paper's code, queries
// read all rows, but their weights are of their own piece, the replay and the first rows. Here weights are of all rows
// that a query reads: with replay=piece these rows, which is automatic where the method can, else the whole text.
#include "method.h"

lctx_rule lctx_kvzip_create(const lctx_method_spec & spec, const lctx_method_env &) {
    constexpr int32_t NEVER = 1 << 30;  // rows of a sequence are fewer
    lctx_retain r = {};
    r.score = LCTX_SCORE_MAX;
    r.evict_every = NEVER;
    r.budget = NEVER;
    constexpr const char * SPECS[] = {"kvzip", "kvzip,replay=text", "kvzip,replay=piece"};
    constexpr lctx_replay REPLAYS[] = {lctx_replay::automatic, lctx_replay::text, lctx_replay::piece};
    const int32_t replay = spec.get("replay");
    return {r, SPECS[1 + replay], "nothing is evicted before compress() is called", 1, REPLAYS[1 + replay]};
}
