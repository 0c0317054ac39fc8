// *select*: every query scores the far chunks of its base at their angles and keeps the best (LongHeads, eq. 3).
#include "ggml-cpu-impl.h"
#include "tile-scores.h"

#include <optional>

namespace {

// ---- scores ----

// Scores of a block, from [column][BLOCK] or [chunk][n_pad] to where they are chosen from, but those of chunks that a
// column has at another angle.
void put_block(const lctx_select_args & a, const lctx_select_tile & t, int slot, int first, int n, const float * from,
               float * s) {
    const lctx_score_steps step(a, t.n_column());
    for (int c = 0; c < t.n_column(); c++) {
        const lctx_chunk_range own = lctx_chunk_range(a, t.token(c), slot).within(first, first + n);
        for (int i = own.first; i < own.end; i++) {
            s[i * step.of_chunk + c * step.of_column] =
                step.few() ? from[c * LCTX_BLOCK + i - first] : from[(i - first) * step.of_chunk + c];
        }
    }
}

// The scores of the tile's columns in some chunks: NaN for those that a column has in no range.
void score_tile(const lctx_select_args & a, const lctx_select_tile & t, const lctx_chunk_range & some, float * s,
                const lctx_select_scratch & w) {
    const lctx_score_steps step(a, t.n_column());
    for (int c = 0; step.few() && c < t.n_column(); c++) {
        std::fill(s + c * step.of_column + some.first, s + c * step.of_column + some.end, NAN);
    }
    if (!step.few()) {
        std::fill(s + some.first * step.of_chunk, s + some.end * step.of_chunk, NAN);
    }
    for (int slot = 0; slot < a.chunks.n_range; slot++) {
        const lctx_chunk_range r = lctx_scored(a, t, slot).within(some.first, some.end);
        if (r.empty()) {
            continue;
        }
        if (a.chunks.by_keys()) {
            lctx_score_keys(a, t, slot, r, s, w);
        } else {
            lctx_each_summary_block(a, t, slot, r, w, [&](int first, int n, const float * from) {
                put_block(a, t, slot, first, n, from, s);
            });
        }
    }
}

// ---- choices ----

// All that a token scores.
lctx_chunk_range candidates(const lctx_select_args & a, int32_t token) {
    lctx_chunk_range all;
    for (int slot = 0; slot < a.chunks.n_range; slot++) {
        all = all.with({a, token, slot});
    }
    return all;
}

// All that the tokens of a tile score.
lctx_chunk_range candidates(const lctx_select_args & a, const lctx_select_tile & t) {
    lctx_chunk_range all;
    for (int32_t i = 0; i < t.n_token; i++) {
        all = all.with(candidates(a, t.first + i));
    }
    return all;
}

// The range of a token that has a chunk, or -1.
int slot_of(const lctx_select_args & a, int32_t token, int chunk) {
    for (int slot = 0; slot < a.chunks.n_range; slot++) {
        const lctx_chunk_range r(a, token, slot);
        if (chunk >= r.first && chunk < r.end) {
            return slot;
        }
    }
    return -1;
}

// Write the segments of a token: its runs, then the chosen chunks that lie in one of its ranges.
void write_chunks(const lctx_select_args & a, int32_t token, const int32_t * chosen, int n, lctx_segment * dst) {
    const int size = a.chunks.chunk_size;
    std::copy_n(a.segs + (size_t)token * a.chunks.n_given(), a.chunks.n_run, dst);
    lctx_segment * to = dst + a.chunks.n_run;
    for (int i = 0; i < n; i++) {
        const int slot = slot_of(a, token, chosen[i]);
        if (slot >= 0) {
            const lctx_segment & r = lctx_range_of(a, token, slot);
            *to++ = {chosen[i] * size, (chosen[i] + 1) * size, r.angle, r.seq};
        }
    }
    std::fill(to, dst + a.chunks.n_segment(), lctx_segment{0, 0, 0, a.rows[token].seq});
}

// Write the segments side by side: runs and chosen chunks in their order, each from one position nearer than the one
// before it.
void write_packed(const lctx_select_args & a, int32_t token, const int32_t * chosen, int n, lctx_segment * dst) {
    const int size = a.chunks.chunk_size;
    const lctx_segment * runs = a.segs + (size_t)token * a.chunks.n_given();
    lctx_segment * to = dst;
    for (int run = 0; run < a.chunks.n_run; run++) {
        for (int32_t row = runs[run].row0; row < runs[run].row1; row += size) {
            *to++ = {row, std::min(row + size, runs[run].row1), 0, runs[run].seq};
        }
        for (int i = 0; run == 0 && i < n; i++) {
            *to++ = {chosen[i] * size, (chosen[i] + 1) * size, 0, runs[run].seq};
        }
    }
    const auto n_read = (int32_t)(to - dst);
    for (int32_t i = 0; i < n_read; i++) {
        dst[i].angle = a.rows[token].angle + n_read - 1 - i;
    }
    std::fill(to, dst + a.chunks.n_segment(), lctx_segment{0, 0, 0, a.rows[token].seq});
}

// Choose for a token: chunks of `all` by their scores.
void choose(const lctx_select_args & a, int32_t token, const lctx_chunk_range & all, const float * scores, int choice,
            const lctx_select_scratch & w) {
    const int n = all.empty() ? 0 : std::min(a.chunks.n_free, all.end - all.first);
    if (n > 0) {
        lctx_take_best(scores, all.first, all.end, n, w.keys, w.chosen);
    }
    lctx_segment * dst = a.choices().alone(a.choices().index(token), choice);
    (a.chunks.packed ? write_packed : write_chunks)(a, token, w.chosen, n, dst);
}

// turned[column][chunk] of LCTX_VL columns that stand side by side: every cache line of theirs is read once.
void turn(const float * s, int64_t stride, const lctx_chunk_range & r, int64_t room, float * turned) {
    for (int i = r.first; i < r.end; i += LCTX_VL) {
        lctx_vf v[LCTX_VL];
        for (int x = 0; x < LCTX_VL; x++) {
            v[x] = lctx_vload(s + std::min(i + x, r.end - 1) * stride);
        }
        lctx_vtranspose(v);
        for (int c = 0; c < LCTX_VL; c++) {
            lctx_vstore(turned + c * room + i, v[c]);
        }
    }
}

// sum += the weights of chunks [r.first, r.end) in the attention of a head: 2^score over the sum with what it reads
// anyway, 2^reference.
void add_weights(const float * scores, const lctx_chunk_range & r, float reference, float * sum) {
    float most = reference;
    for (int i = r.first; i < r.end; i++) {
        most = scores[i] > most ? scores[i] : most;
    }
    const auto weight = [&](float score) { return lctx_vexp2(lctx_vset(score - most))[0]; };
    float all = weight(reference);
    for (int i = r.first; i < r.end; i++) {
        all += scores[i] == scores[i] ? weight(scores[i]) : 0.0f;
    }
    for (int i = r.first; i < r.end; i++) {
        sum[i] += scores[i] == scores[i] ? weight(scores[i]) / all : NAN;
    }
}

// Choices of the tile from its scores. Heads that choose together add their weights, by summaries their scores.
void choose_tile(const lctx_select_args & a, const lctx_select_tile & t, const float * s,
                 const lctx_select_scratch & w) {
    const lctx_score_steps step(a, t.n_column());
    const int64_t room = lctx_n_key(w.n_chunk_max(a));
    const lctx_chunk_range all = candidates(a, t);
    const bool by_weights = a.chunks.by_group && a.chunks.by_keys();
    const std::optional<lctx_reference> reference =
        by_weights ? std::make_optional<lctx_reference>(a, t, w) : std::nullopt;
    for (int c = 0; c < t.n_column(); c++) {
        if (!step.few() && c % LCTX_VL == 0) {
            turn(s + c, step.of_chunk, all, room, w.turned);
        }
        const float * scores = step.few() ? s + c * step.of_column : w.turned + c % LCTX_VL * room;
        const lctx_chunk_range own = candidates(a, t.token(c));
        if (!a.chunks.by_group) {
            choose(a, t.token(c), own, scores, t.head(c), w);
            continue;
        }
        if (c % t.n_head == 0) {
            std::fill(w.sum + own.first, w.sum + own.end, 0.0f);
        }
        if (by_weights) {
            add_weights(scores, own, reference->at(c), w.sum);
        }
        for (int i = own.first; !by_weights && i < own.end; i++) {
            w.sum[i] += scores[i];
        }
        if (c % t.n_head == t.n_head - 1) {
            choose(a, t.token(c), own, w.sum, t.list, w);
        }
    }
}

// ---- tiles ----

// f(tile, its number) for every list of keys or summaries, and up to n_most tokens of a sequence.
template <typename F> void each_tile(const lctx_select_args & a, int32_t n_most, F && f) {
    const int n_head = a.n_head / a.n_list;
    for (int32_t first = 0, end = 0, job = 0; first < a.n_tokens; first = end) {
        while (end < a.n_tokens && end - first < n_most && a.rows[end].seq == a.rows[first].seq &&
               a.choices().is_alone(end)) {
            end++;
        }
        if (end == first) {
            end++;  // of a tile that shares its chunks
            continue;
        }
        for (int list = 0; list < a.n_list; list++) {
            f(lctx_select_tile{first, end - first, list, list * n_head, n_head}, job++);
        }
    }
}

// A thread for every tile.
void select_tiles(const ggml_compute_params * params, const lctx_select_args & a, const lctx_select_scratch & w) {
    each_tile(a, std::max(1, LCTX_MAX_COLUMNS / (a.n_head / a.n_list)), [&](const lctx_select_tile & tile, int job) {
        if (job % params->nth == params->ith) {
            score_tile(a, tile, candidates(a, tile), w.s, w);
            choose_tile(a, tile, w.s, w);
        }
    });
}

// Few tokens: all threads score every tile, which has one token.
bool is_shared(const lctx_select_args & a) {
    constexpr int FEW_TILES = 64;
    return a.choices().n_alone() * a.n_list < FEW_TILES;
}

// Floats for the scores of one such tile.
size_t n_shared_float(const lctx_select_args & a) {
    return lctx_score_steps::n_float(a, a.n_head / a.n_list);
}

void select_shared(const ggml_compute_params * params, const lctx_select_args & a, float * s,
                   const lctx_select_scratch & w) {
    constexpr int PARTS = 4;  // of a tile for each thread, where it is long enough
    int part = 0;
    each_tile(a, 1, [&](const lctx_select_tile & tile, int job) {
        const lctx_chunk_range all = candidates(a, tile);
        const int size =
            lctx_round_up((int)lctx_ceil_div(std::max(1, all.end - all.first), PARTS * params->nth), LCTX_VL);
        for (int first = all.first; first < all.end; first += size) {
            if (part++ % params->nth == params->ith) {
                score_tile(a, tile, {first, std::min(first + size, all.end)}, s + job * n_shared_float(a), w);
            }
        }
    });
    ggml_barrier(params->threadpool);
    each_tile(a, 1, [&](const lctx_select_tile & tile, int job) {
        if (job % params->nth == params->ith) {
            choose_tile(a, tile, s + job * n_shared_float(a), w);
        }
    });
}

// ---- tiles that share their chunks ----

// Floats for the values of a tile's chunks.
int64_t n_value(const lctx_select_args & a) {
    return lctx_round_up(a.n_chunk_max, LCTX_VL);
}

// Write what readers need of the tokens of a tile next to its lists.
void write_given(const lctx_select_args & a, int32_t tile) {
    const lctx_written_choices choices = a.choices();
    choices.firsts()[tile] = a.tiles[tile];
    std::copy_n(a.segs + (size_t)a.tiles[tile] * a.chunks.n_given(), (size_t)a.chunks.tile * a.chunks.n_given(),
                choices.given(tile, 0));
}

// The values of some chunks of a tile.
void value_part(const lctx_select_args & a, int32_t tile, int list, const lctx_chunk_range & some, float * values,
                const lctx_select_scratch & w) {
    const int n_head = a.n_head / a.n_list, n_most = LCTX_MAX_COLUMNS / (a.chunks.tile / a.chunks.step);
    std::fill(values + some.first, values + some.end, -INFINITY);
    for (int before = 0; before < n_head && !some.empty(); before += n_most) {
        const lctx_select_tile t = {
            a.tiles[tile], a.chunks.tile, list, list * n_head + before, std::min(n_most, n_head - before),
            a.chunks.step, before};
        lctx_tile_values(a, t, some, values, w);
    }
}

// The list of a tile: the best chunks that lie in a far range and reach the cutoff, ascending, then -1.
void write_list(const lctx_select_args & a, int32_t tile, int list, const float * values,
                const lctx_select_scratch & w) {
    const lctx_chunk_range all = candidates(a, a.tiles[tile]);
    const int n = all.empty() ? 0 : std::min(a.chunks.n_shared, all.end - all.first);
    int32_t *to = a.choices().list(tile, list), *end = to + a.chunks.n_shared;
    if (n > 0) {
        lctx_take_best(values, all.first, all.end, n, w.keys, w.chosen);
    }
    for (int i = 0; i < n; i++) {
        if (values[w.chosen[i]] >= -(float)a.chunks.cutoff && slot_of(a, a.tiles[tile], w.chosen[i]) >= 0) {
            *to++ = w.chosen[i];
        }
    }
    std::fill(to, end, -1);
}

// values: [n_tile][n_list][n_value].
void select_lists(const ggml_compute_params * params, const lctx_select_args & a, float * values,
                  const lctx_select_scratch & w) {
    constexpr int PARTS = 4;  // of all lists for each thread, at least
    const int n_list = a.n_tile * a.n_list, n_part = (int)lctx_ceil_div(PARTS * params->nth, n_list);
    for (int job = params->ith; job < n_list * n_part; job += params->nth) {
        const int index = job / n_part, tile = index / a.n_list, part = job % n_part;
        if (part == 0 && index % a.n_list == 0) {
            write_given(a, tile);
        }
        const lctx_chunk_range all = candidates(a, a.tiles[tile]);
        const int n = std::max(0, all.end - all.first), first = all.first + n * part / n_part,
                  end = all.first + n * (part + 1) / n_part;
        value_part(a, tile, index % a.n_list, {first, end}, values + index * n_value(a), w);
    }
    ggml_barrier(params->threadpool);
    for (int index = params->ith; index < n_list; index += params->nth) {
        write_list(a, index / a.n_list, index % a.n_list, values + index * n_value(a), w);
    }
}

}  // namespace

size_t lctx_cpu_select_wsize(const lctx_select_args & args, int n_tasks) {
    const int64_t n_shared =
        is_shared(args) ? (int64_t)n_shared_float(args) * args.choices().n_alone() * args.n_list : 0;
    const int64_t n_values = args.n_tile * args.n_list * n_value(args);
    return LCTX_CACHE_LINE + lctx_select_scratch::size(args) * n_tasks + std::max(n_shared, n_values) * sizeof(float);
}

void lctx_cpu_select(const ggml_compute_params * params, const lctx_select_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const lctx_select_scratch w(base + params->ith * lctx_select_scratch::size(args), args);
    auto * shared = (float *)(base + params->nth * lctx_select_scratch::size(args));
    if (args.n_tile > 0) {
        select_lists(params, args, shared, w);
        ggml_barrier(params->threadpool);
    }
    if (is_shared(args)) {
        return select_shared(params, args, shared, w);
    }
    select_tiles(params, args, w);
}
