#include "filter.h"

#include <algorithm>

lctx_filter::lctx_filter(const lctx_method & base, lctx_chunks & chunks, int32_t from)
    : base_(base), chunks_(chunks), n_base_(base.n_segment()), from_(from) {
    chunks.n_run = RUNS * n_base_;
    chunks.n_range = n_base_;
    if (n_base_ > MOST) {
        throw lctx_refusal(base.spec() + " has too many segments to choose chunks of them");
    }
}

// Grow the last interval where they touch.
void lctx_filter::whole::add(int32_t first, int32_t end) {
    if (first >= end) {
        return;
    }
    if (n > 0 && first <= at[n - 1].end) {
        at[n - 1].end = std::max(at[n - 1].end, end);
    } else {
        at[n++] = {first, end};
    }
}

// The first row of the nearby ones: the recent chunks, and where near keys lie in a ring, which is not indexed, those
// too.
int32_t lctx_filter::first_near(int32_t p) const {
    const int32_t size = chunks_.chunk_size;
    int32_t first = (p / size - chunks_.n_recent) * size;
    lctx_segment segs[MOST];
    base_.segments(p, segs);
    for (int32_t s = 0; s < n_base_; s++) {
        first = (base_.near_mask() >> s & 1) ? std::min(first, segs[s].row0 / size * size) : first;
    }
    return std::max(first, 0);
}

lctx_filter::whole lctx_filter::read_whole(int32_t p, int32_t last) const {
    const int32_t size = chunks_.chunk_size, near = first_near(p);
    lctx_segment now[MOST], then[MOST];
    std::vector<interval> borders(n_base_);  // from where a segment begins at first to where it begins at last
    base_.segments(p, now);
    base_.segments(last, then);
    for (int32_t s = 0; s < n_base_; s++) {
        borders[s] = {now[s].row0 / size * size, (then[s].row0 + size - 1) / size * size};
    }
    std::sort(borders.begin(), borders.end(), [](const interval & a, const interval & b) { return a.first < b.first; });
    whole w;
    w.add(0, std::min(size, p + 1));
    for (const interval & border : borders) {
        w.add(border.first, std::min(border.end, near));
    }
    w.add(near, last + 1);
    return w;
}

bool lctx_filter::is_tile(int32_t p) const {
    lctx_segment now[MOST], then[MOST];
    base_.segments(p, now);
    base_.segments(p + chunks_.tile - 1, then);
    bool alike = chunks_.has_tiles();
    for (int32_t s = 0; s < n_base_; s++) {
        alike = alike && then[s].row0 - now[s].row0 <= chunks_.tile;  // it moves with the query, or not at all
    }
    return alike;
}

int32_t lctx_filter::n_far(int32_t p, int32_t last) const {
    const whole w = read_whole(p, last);
    int32_t n = 0;
    for (int32_t i = 1; i < w.n; i++) {
        n += (w.at[i].first - w.at[i - 1].end) / chunks_.chunk_size;
    }
    return n;
}

void lctx_filter::write(int32_t p, int32_t first, int32_t last, bool chooses, lctx_segment * segs) const {
    std::fill_n(segs, chunks_.n_given(), lctx_segment{});
    lctx_segment base[MOST];
    base_.segments(p, base);
    const whole w = read_whole(first, last);
    const bool all = !chooses;
    for (int32_t s = 0; s < n_base_; s++) {
        const interval mine = {base[s].row0, base[s].row1};
        const auto within = [&](int32_t first, int32_t end) {
            return lctx_segment{std::max(mine.first, first),
                                std::max(std::max(mine.first, first), std::min(mine.end, end)), base[s].angle, 0};
        };
        int32_t n = 0;
        if (all && mine.size() > 0) {
            segs[RUNS * s] = base[s];
        }
        for (int32_t i = 0; !all && i < w.n; i++) {
            const lctx_segment run = within(w.at[i].first, w.at[i].end);
            if (run.row0 < run.row1) {
                segs[RUNS * s + n++] = run;
            }
        }
        // between what is read whole, a segment has one range: its own border is in an interval, or lies between chunks
        for (int32_t i = 1; !all && i < w.n; i++) {
            const lctx_segment range = within(w.at[i - 1].end, w.at[i].first);
            if (range.row0 < range.row1) {
                segs[chunks_.n_run + s] = range;
            }
        }
    }
}

uint32_t lctx_filter::near_mask() const {
    uint32_t mask = 0;
    for (int32_t s = 0; s < n_base_; s++) {
        mask |= (base_.near_mask() >> s & 1) ? ((1u << RUNS) - 1) << (RUNS * s) : 0;
    }
    return mask;
}

int32_t lctx_filter::n_read() const {
    constexpr int32_t FAR = 1 << 28;
    lctx_segment now[MOST], then[MOST];
    base_.segments(FAR, now);
    base_.segments(FAR + 1, then);
    const int32_t size = chunks_.chunk_size, of_tile = chunks_.has_tiles() ? chunks_.tile / size + 1 : 0;
    int32_t n = std::max({chunks_.n_chunk(), chunks_.has_tiles() ? chunks_.n_listed() : 0, (from_ + size - 1) / size}) +
                of_tile;
    for (int32_t s = 0; s < n_base_; s++) {
        n += of_tile + (now[s].row0 == then[s].row0    ? 0
                        : (base_.near_mask() >> s & 1) ? base_.near_window() / size + 2
                                                       : 1);
    }
    return n;
}
