// *fetch*: bring the units that the batch reads close, the least recently read ones making room.
#include "../ops/cache.h"
#include "ggml-cpu-impl.h"
#include "kernels.h"

#include <algorithm>
#include <utility>

namespace {

enum want : char { NOT, ALONE, WITH_PAGE };

// A unit that is brought.
struct job {
    int32_t key, unit;
};

struct head {
    const lctx_fetch_args & a;
    int32_t index;
    want * wanted;    // [n_key]
    int32_t * order;  // [n_staged]
    job * jobs;       // [n_key]
    int32_t n_job = 0, n_far = 0;
    lctx_staging r = a.staging_of(index);
};

size_t wanted_size(const lctx_fetch_args & a) {
    return GGML_PAD((size_t)a.n_key(), sizeof(job));
}

size_t scratch_size(const lctx_fetch_args & a) {
    return wanted_size(a) + GGML_PAD(a.params.n_staged, 2) * sizeof(int32_t) + a.n_key() * sizeof(job);
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

void put(head & h, int32_t key, int32_t frame) {
    const lctx_fetch_args & a = h.a;
    if (h.r.keys()[frame] >= 0) {
        a.forget(h.index, h.r.keys()[frame]);
    }
    a.forget(h.index, key);
    a.entry(h.index, key) = a.near_unit(h.index, frame);
    h.r.keys()[frame] = key;
    h.r.last_used()[frame] = h.r.clock();
    h.r.n_miss()++;
    h.jobs[h.n_job++] = {key, a.near_unit(h.index, frame)};
}

// There is no room for a unit: it is read where it is, or passes through.
void pass(head & h, int32_t key) {
    const lctx_fetch_args & a = h.a;
    a.forget(h.index, key);
    h.r.n_far()++;
    if (!a.file) {
        a.entry(h.index, key) = a.far_unit(h.index, key);
        return;
    }
    a.entry(h.index, key) = a.transit_unit(h.index, h.n_far++);
    h.jobs[h.n_job++] = {key, a.entry(h.index, key)};
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
void bring(head & h, want kind, int n) {
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
                pass(h, key + i);
            }
        }
        next++;
    }
}

// ---- bytes ----

// K or V of a unit, where it is and where it goes.
struct move {
    const char * from;
    char * to;
    size_t size;

    move(const head & h, const job & j, const lctx_pool_args & pool, const lctx_pool_args & staged,
         const lctx_pool_args & transit)
        : size(pool.row_size << h.a.shift()) {
        const int32_t n_staged = h.a.n_head_kv * h.a.params.n_staged;
        from = pool.data + h.a.pool_unit(h.index, j.key) * size;
        to = j.unit < n_staged ? staged.data + j.unit * size : transit.data + (j.unit - n_staged) * size;
    }
};

move keys_of(const head & h, const job & j) {
    return {h, j, h.a.all.k_pool, h.a.k_staged, h.a.k_transit};
}

move values_of(const head & h, const job & j) {
    return {h, j, h.a.all.v_pool, h.a.v_staged, h.a.v_transit};
}

void copy(const head & h) {
    for (int32_t i = 0; i < h.n_job; i++) {
        for (const move & m : {keys_of(h, h.jobs[i]), values_of(h, h.jobs[i])}) {
            memcpy(m.to, m.from, m.size);
        }
    }
}

// Of the jobs from `first` on, read those whose units follow each other: how many they are, and whether they came.
std::pair<int32_t, bool> read_run(const head & h, int32_t first, int32_t n_job, bool wait) {
    constexpr int32_t MOST = lctx_row_file::MOST_TARGETS / 2;
    lctx_row_target targets[2 * MOST];
    const int32_t unit = h.a.pool_unit(h.index, h.jobs[first].key);
    int32_t n = 0;
    for (; n < MOST && first + n < n_job && h.a.pool_unit(h.index, h.jobs[first + n].key) == unit + n; n++) {
        const move k = keys_of(h, h.jobs[first + n]), v = values_of(h, h.jobs[first + n]);
        targets[2 * n] = {k.to, k.size};
        targets[2 * n + 1] = {v.to, v.size};
    }
    return {n, h.a.file->read_units(keys_of(h, h.jobs[first]).from, targets, 2 * n, wait)};
}

// What the system has in memory comes at once, and the rest is asked for before any of it is waited for. A unit that
// cannot be read is not here: the file keeps the error.
void read(const head & h) {
    int32_t n_late = 0;
    for (int32_t i = 0; i < h.n_job;) {
        const auto [n, is_here] = read_run(h, i, h.n_job, false);
        n_late = is_here ? n_late : (int32_t)(std::copy_n(h.jobs + i, n, h.jobs + n_late) - h.jobs);
        i += n;
    }
    for (int32_t i = 0; i < n_late;) {
        const auto [n, is_here] = read_run(h, i, n_late, true);
        for (const int32_t end = i + n; i < end; i++) {
            if (!is_here) {
                h.a.forget(h.index, h.jobs[i].key);
            }
        }
    }
}

}  // namespace

size_t lctx_cpu_fetch_wsize(const lctx_fetch_args & args, int n_tasks) {
    return scratch_size(args) * n_tasks;
}

void lctx_cpu_fetch(const ggml_compute_params * params, const lctx_fetch_args & args) {
    char * scratch = (char *)params->wdata + params->ith * scratch_size(args);
    for (int index = params->ith; index < args.n_head_kv; index += params->nth) {
        head h = {args, index, (want *)scratch, (int32_t *)(scratch + wanted_size(args)), nullptr};
        h.jobs = (job *)(h.order + GGML_PAD(args.params.n_staged, 2));
        mark(h);
        h.r.clock()++;
        find(h);
        bring(h, WITH_PAGE, args.of_page());
        bring(h, ALONE, 1);
        args.file ? read(h) : copy(h);
    }
}
