// Which tokens of a batch belong to whole tiles (../ops/chunks.h). It depends on rows alone, so a text that is read in other pieces has the
// same tiles wherever those end at multiples of the tile.
#pragma once

#include "method.h"

struct lctx_batch_tiles {
    std::vector<int32_t> first;     // of every token: the first one of its tile, or -1: it is in none
    std::vector<int32_t> choosing;  // first tokens of the tiles that choose; the others read everything

    // Tokens at positions pos of sequences seq.
    lctx_batch_tiles(const lctx_method & method, const std::vector<int32_t> & pos, const std::vector<int32_t> & seq);
    // Whether a token chooses, alone or with its tile.
    bool selects(const lctx_method & method, const std::vector<int32_t> & pos) const;
    // n_segment() segments of a token.
    void segments(const lctx_method & method, const std::vector<int32_t> & pos, int32_t token, lctx_segment * segs) const;
};
