#include "tiles.h"

#include <algorithm>

lctx_batch_tiles::lctx_batch_tiles(const lctx_method & method, std::vector<int32_t> pos,
                                   const std::vector<int32_t> & seq)
    : method_(method), pos_(std::move(pos)), first_(pos_.size(), -1) {
    const int32_t size = method.chunks() ? method.chunks()->tile : 1, n = (int32_t)pos_.size();
    for (int32_t i = 0; size > 1 && i + size <= n;) {
        int32_t end = i + 1;
        while (end < i + size && pos_[end] == pos_[i] + end - i && seq[end] == seq[i]) {
            end++;
        }
        if (pos_[i] % size != 0 || end < i + size || !method.is_tile(pos_[i])) {
            i++;
            continue;
        }
        std::fill(first_.begin() + i, first_.begin() + end, i);
        if (method.tile_selects(pos_[i])) {
            choosing_.push_back(i);
        }
        i = end;
    }
}

bool lctx_batch_tiles::selects() const {
    bool any = !choosing_.empty();
    for (size_t i = 0; i < pos_.size() && !any; i++) {
        any = first_[i] < 0 && method_.selects(pos_[i]);
    }
    return any;
}

void lctx_batch_tiles::segments(int32_t token, lctx_segment * segs) const {
    if (first_[token] < 0) {
        method_.segments(pos_[token], segs);
    } else {
        method_.tile_segments(pos_[first_[token]], pos_[token], segs);
    }
}
