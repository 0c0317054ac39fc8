// *fetch*: bring the units that the batch reads close, those that were read in fewer of the last batches making room.
#include "columns.h"
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

// A key, or the first one of some frames.
struct ranked {
    int32_t worth, index;
};

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    job * jobs;        // [n_key]
    ranked * missing;  // [n_key]
    ranked * frames;   // [n_staged]
    want * wanted;     // [n_key]

    static size_t size(const lctx_fetch_args & a) {
        const size_t n_key = a.n_key();
        return GGML_PAD(n_key * (sizeof(job) + sizeof(ranked) + sizeof(want)) + a.params.n_staged * sizeof(ranked),
                        LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_fetch_args & a)
        : jobs((job *)base),
          missing((ranked *)(jobs + a.n_key())),
          frames(missing + a.n_key()),
          wanted((want *)(frames + a.params.n_staged)) {}
};

struct head : scratch {
    const lctx_fetch_args & a;
    int32_t index;
    int32_t n_job = 0, n_far = 0;
    lctx_staging r;

    head(const scratch & w, const lctx_fetch_args & a, int32_t index)
        : scratch(w), a(a), index(index), r(a.staging_of(index)) {}
};

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

// Find what is there already: it stays, and is not wanted any more. Units of a page that lie apart come again with it.
void find(const head & h) {
    const int of_page = h.a.of_page();
    for (int32_t key = 0; key < h.a.n_key(); key++) {
        if (h.wanted[key] != NOT) {
            h.r.read(key);
        }
    }
    for (int frame = 0; frame < h.r.n_staged; frame++) {
        const int32_t key = h.r.keys()[frame];
        if (key < 0 || h.wanted[key] == NOT) {
            continue;
        }
        if (h.wanted[key] == WITH_PAGE && !h.r.has_page(frame - frame % of_page, of_page)) {
            h.a.forget(h.index, key);
            continue;
        }
        h.wanted[key] = NOT;
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

// The frames that are not read now, n at a time, by what their units are worth; returns how many.
int32_t rank_frames(const head & h, int n) {
    int32_t n_free = 0;
    for (int32_t frame = 0; frame < h.r.n_staged; frame += n) {
        const int32_t worth = h.r.worth_of_frames(frame, n);
        if (worth < lctx_staging::MOST_WORTH) {
            h.frames[n_free++] = {worth, frame};
        }
    }
    std::stable_sort(h.frames, h.frames + n_free, [](const ranked & x, const ranked & y) { return x.worth < y.worth; });
    return n_free;
}

// What is wanted so and missing, n units at a time, the worthiest first; returns how many.
int32_t rank_missing(const head & h, want kind, int n) {
    int32_t n_missing = 0;
    for (int32_t key = 0; key < h.a.n_key(); key += n) {
        if (h.wanted[key] == kind) {
            h.missing[n_missing++] = {kind == WITH_PAGE ? lctx_staging::MOST_WORTH : h.r.worth(key), key};
        }
    }
    std::stable_sort(h.missing, h.missing + n_missing,
                     [](const ranked & x, const ranked & y) { return x.worth > y.worth; });
    return n_missing;
}

// Bring what is wanted so and missing: a unit takes the place of one that is not worth more.
void bring(head & h, want kind, int n) {
    const int32_t n_missing = rank_missing(h, kind, n), n_free = n_missing > 0 ? rank_frames(h, n) : 0;
    for (int32_t i = 0; i < n_missing; i++) {
        const bool has_room = i < n_free && h.frames[i].worth <= h.missing[i].worth;
        for (int32_t unit = 0; unit < n; unit++) {
            has_room ? put(h, h.missing[i].index + unit, h.frames[i].index + unit) : pass(h, h.missing[i].index + unit);
        }
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
    std::sort(h.jobs, h.jobs + h.n_job, [](const job & x, const job & y) { return x.key < y.key; });
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
    return scratch::size(args) * n_tasks;
}

void lctx_cpu_fetch(const ggml_compute_params * params, const lctx_fetch_args & args) {
    const scratch w((char *)params->wdata + params->ith * scratch::size(args), args);
    for (int index = params->ith; index < args.n_head_kv; index += params->nth) {
        head h(w, args, index);
        mark(h);
        h.r.clock()++;
        find(h);
        bring(h, WITH_PAGE, args.of_page());
        bring(h, ALONE, 1);
        args.file ? read(h) : copy(h);
    }
}
