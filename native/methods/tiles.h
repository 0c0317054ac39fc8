// Finds which tokens of a batch belong to whole tiles (../ops/chunks.h). It depends on rows alone, so a text that is
// read in other pieces has the same tiles wherever those end at multiples of the tile.
#pragma once

#include "method.h"

class lctx_batch_tiles {
  public:
    // Tokens at positions pos of sequences seq. The method outlives this.
    lctx_batch_tiles(const lctx_method & method, std::vector<int32_t> pos, const std::vector<int32_t> & seq);

    // First tokens of the tiles that choose; the tokens of others read everything.
    const std::vector<int32_t> & choosing() const { return choosing_; }
    // Return whether a token chooses, alone or with its tile.
    bool selects() const;
    // n_segment() segments of a token.
    void segments(int32_t token, lctx_segment * segs) const;

  private:
    const lctx_method & method_;
    std::vector<int32_t> pos_;
    std::vector<int32_t> first_;  // of every token: the first one of its tile, or -1: it is in none
    std::vector<int32_t> choosing_;
};
