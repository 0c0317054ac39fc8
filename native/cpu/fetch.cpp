// *fetch*: bring the units that the batch reads close, the least recently read ones making room.
#include "../ops/cache.h"
#include "ggml-cpu-impl.h"
#include "kernels.h"

#include <algorithm>

namespace {

enum want : char { NOT, ALONE, WITH_PAGE };

struct head {
    const lctx_fetch_args & a;
    int32_t index;
    want * wanted;    // [n_key]
    int32_t * order;  // [n_staged]
    lctx_staging r = a.staging_of(index);
};

size_t wanted_size(const lctx_fetch_args & a) {
    return GGML_PAD((size_t)a.n_key(), sizeof(int32_t));
}

size_t scratch_size(const lctx_fetch_args & a) {
    return wanted_size(a) + a.params.n_staged * sizeof(int32_t);
}

void mark(const head & h, const lctx_segment & segment, bool is_run) {
    const lctx_fetch_args & a = h.a;
    const int n = is_run ? a.of_page() : 1, shift = is_run ? LCTX_PAGE_SHIFT : a.shift();
    const int first = (segment.row0 >> shift) * n, end = ((segment.row1 - 1) >> shift) * n + n;
    for (int unit = first; segment.row0 < segment.row1 && unit < end; unit++) {
        want & w = h.wanted[segment.seq * a.n_page_max * a.of_page() + unit];
        w = std::max(w, is_run ? WITH_PAGE : ALONE);
    }
}

// Mark what tokens outside of tiles read, then the runs of those in tiles, and each list once.
void mark(const head & h) {
    const lctx_fetch_args & a = h.a;
    const lctx_choices choices = a.choices();
    const int n_choice = a.n_choice / a.n_head_kv, n_run = a.params.n_run, n_given = a.params.tiles.n_given;
    std::fill_n(h.wanted, a.n_key(), NOT);
    for (int64_t list = 0; list < (int64_t)choices.n_alone() * n_choice; list++) {
        const lctx_segment * segs =
            choices.alone((int32_t)(list / n_choice), (int32_t)(h.index * n_choice + list % n_choice));
        for (int i = 0; i < a.n_seg; i++) {
            mark(h, segs[i], i < n_run);
        }
    }
    for (int tile = 0; tile < a.params.tiles.n_tile; tile++) {
        for (int i = 0; i < a.params.tiles.size * n_run; i++) {
            mark(h, choices.given(tile, i / n_run)[i % n_run], true);
        }
        for (int i = 0; i < a.params.tiles.n_shared; i++) {
            const int32_t chunk = choices.list(tile, h.index)[i];
            mark(h, lctx_listed(choices.given(tile, 0), n_run, n_given, chunk, a.params.chunk_size), false);
        }
    }
}

// Find what is there already: it stays, and is not wanted any more.
void find(const head & h) {
    const int of_page = h.a.of_page();
    for (int frame = 0; frame < h.r.n_staged; frame++) {
        const int32_t key = h.r.keys()[frame];
        if (key < 0 || h.wanted[key] == NOT ||
            (h.wanted[key] == WITH_PAGE && !h.r.has_page(frame - frame % of_page, of_page))) {
            continue;
        }
        h.wanted[key] = NOT;
        h.r.last_used()[frame] = h.r.clock();
        h.r.n_hit()++;
    }
}

void copy_unit(const lctx_pool_args & from, size_t from_unit, const lctx_pool_args & to, size_t to_unit, int shift) {
    const size_t size = from.row_size << shift;
    memcpy(to.data + to_unit * size, from.data + from_unit * size, size);
}

void put(const head & h, int32_t key, int32_t frame) {
    const lctx_fetch_args & a = h.a;
    if (h.r.keys()[frame] >= 0) {
        a.forget(h.index, h.r.keys()[frame]);
    }
    a.forget(h.index, key);
    a.entry(h.index, key) = a.near_unit(h.index, frame);
    h.r.keys()[frame] = key;
    h.r.last_used()[frame] = h.r.clock();
    h.r.n_miss()++;
    copy_unit(a.all.k_pool, a.pool_unit(h.index, key), a.k_staged, a.near_unit(h.index, frame), a.shift());
    copy_unit(a.all.v_pool, a.pool_unit(h.index, key), a.v_staged, a.near_unit(h.index, frame), a.shift());
}

// The frames that are not read now, n at a time, those first that were not for the longest time; returns how many.
int sort_frames(const head & h, int n) {
    int n_free = 0;
    for (int frame = 0; frame < h.r.n_staged; frame += n) {
        if (h.r.last_used(frame, n) < h.r.clock()) {
            h.order[n_free++] = frame;
        }
    }
    std::sort(h.order, h.order + n_free, [&](int32_t a, int32_t b) {
        const int32_t age_a = h.r.last_used(a, n), age_b = h.r.last_used(b, n);
        return age_a != age_b ? age_a < age_b : a < b;
    });
    return n_free;
}

// Bring what is wanted so and missing, n units at a time.
void bring(const head & h, want kind, int n) {
    int n_free = -1, next = 0;
    for (int32_t key = 0; key < h.a.n_key(); key += n) {
        if (h.wanted[key] != kind) {
            continue;
        }
        n_free = n_free < 0 ? sort_frames(h, n) : n_free;
        for (int i = 0; i < n; i++) {
            if (next < n_free) {
                put(h, key + i, h.order[next] + i);
            } else {
                h.a.forget(h.index, key + i);
                h.a.entry(h.index, key + i) = h.a.far_unit(h.index, key + i);
                h.r.n_far()++;
            }
        }
        next++;
    }
}

}  // namespace

size_t lctx_cpu_fetch_wsize(const lctx_fetch_args & args, int n_tasks) {
    return scratch_size(args) * n_tasks;
}

void lctx_cpu_fetch(const ggml_compute_params * params, const lctx_fetch_args & args) {
    char * scratch = (char *)params->wdata + params->ith * scratch_size(args);
    for (int index = params->ith; index < args.n_head_kv; index += params->nth) {
        const head h = {args, index, (want *)scratch, (int32_t *)(scratch + wanted_size(args))};
        mark(h);
        h.r.clock()++;
        find(h);
        bring(h, WITH_PAGE, args.of_page());
        bring(h, ALONE, 1);
    }
}
