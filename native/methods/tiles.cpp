#include "tiles.h"

#include <algorithm>

lctx_batch_tiles::lctx_batch_tiles(const lctx_method & method, const std::vector<int32_t> & pos, const std::vector<int32_t> & seq)
    : first(pos.size(), -1) {
    const int32_t size = method.chunks() ? method.chunks()->tile : 1, n = (int32_t)pos.size();
    for (int32_t i = 0; size > 1 && i + size <= n;) {
        int32_t end = i + 1;
        while (end < i + size && pos[end] == pos[i] + end - i && seq[end] == seq[i]) {
            end++;
        }
        if (pos[i] % size != 0 || end < i + size || !method.is_tile(pos[i])) {
            i++;
            continue;
        }
        std::fill(first.begin() + i, first.begin() + end, i);
        if (method.tile_selects(pos[i])) {
            choosing.push_back(i);
        }
        i = end;
    }
}

bool lctx_batch_tiles::selects(const lctx_method & method, const std::vector<int32_t> & pos) const {
    bool any = !choosing.empty();
    for (size_t i = 0; i < pos.size() && !any; i++) {
        any = first[i] < 0 && method.selects(pos[i]);
    }
    return any;
}

void lctx_batch_tiles::segments(const lctx_method & method, const std::vector<int32_t> & pos, int32_t token, lctx_segment * segs) const {
    if (first[token] < 0) {
        method.segments(pos[token], segs);
    } else {
        method.tile_segments(pos[first[token]], pos[token], segs);
    }
}
