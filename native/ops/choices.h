// The result of *select*: what every query reads.
//
// Without tiles it is the segments of every token and choice. With tiles, tokens outside of them come first in the same
// form; then the first token of each tile, what the host has written of the tokens of tiles (runs and far ranges), and
// a list of chunks for each tile and KV head: ascending numbers, then -1. Nothing has the size of tokens x heads x
// chunks for the tokens of tiles.
#pragma once

#include "chunks.h"
#include "portable.h"

#include <cstddef>
#include <cstdint>

// One segment of one query: rows [row0, row1) of sequence seq, seen from the position of an angle row.
struct lctx_segment {
    int32_t row0;
    int32_t row1;
    int32_t angle;
    int32_t seq;
};

// The tiles of a ubatch; n_tile = 0: none.
struct lctx_tiles {
    int32_t n_tile;
    int32_t size;      // tokens of a tile
    int32_t n_given;   // segments of a token that the host writes: runs, then far ranges
    int32_t n_shared;  // chunks in a list at most

    LCTX_HD int32_t n_token() const { return n_tile * size; }
    LCTX_HD int32_t n_alone(int32_t n_tokens) const { return n_tokens - n_token(); }
    // Numbers after the segments of tokens outside of tiles.
    LCTX_HD int64_t n_int(int32_t n_head_kv) const {
        return first_size() + given_size() + (int64_t)n_tile * n_head_kv * n_shared;
    }
    LCTX_HD int64_t first_size() const { return (n_tile + 3) / 4 * 4; }
    LCTX_HD int64_t given_size() const { return (int64_t)n_token() * n_given * 4; }
};

// T: const int32_t for readers, S: const lctx_segment.
template <typename T, typename S> struct lctx_choices_of {
    T * data;
    int32_t n_tokens, n_choice, n_segment;  // n_segment: of a token outside of tiles
    int32_t n_head_kv;
    lctx_tiles tiles;

    LCTX_HD S * alone(int32_t index, int32_t choice) const {
        return (S *)data + ((int64_t)index * n_choice + choice) * n_segment;
    }
    LCTX_HD T * firsts() const { return data + (int64_t)tiles.n_alone(n_tokens) * n_choice * n_segment * 4; }
    // Return what the host has written of token `at` of a tile.
    LCTX_HD S * given(int32_t tile, int32_t at) const {
        return (S *)(firsts() + tiles.first_size()) + ((int64_t)tile * tiles.size + at) * tiles.n_given;
    }
    LCTX_HD T * list(int32_t tile, int32_t head_kv) const {
        return firsts() + tiles.first_size() + tiles.given_size() +
               ((int64_t)tile * n_head_kv + head_kv) * tiles.n_shared;
    }
    // The last tile that begins at a token or before it, or -1; whether the token is in it.
    LCTX_HD int32_t tile_before(int32_t token) const {
        int32_t tile = tiles.n_tile - 1;
        while (tile >= 0 && firsts()[tile] > token) {
            tile--;
        }
        return tile;
    }
    LCTX_HD bool is_in(int32_t token, int32_t tile) const { return tile >= 0 && token < firsts()[tile] + tiles.size; }
    LCTX_HD int32_t n_alone() const { return tiles.n_alone(n_tokens); }
    LCTX_HD bool is_alone(int32_t token) const { return !is_in(token, tile_before(token)); }
    // The index of a token among those outside of tiles.
    LCTX_HD int32_t index(int32_t token) const { return token - (tile_before(token) + 1) * tiles.size; }
    // Segments of any token, where lists are written out for each.
    LCTX_HD int32_t n_expanded(int32_t n_run) const {
        return tiles.n_tile > 0 && n_run + tiles.n_shared > n_segment ? n_run + tiles.n_shared : n_segment;
    }
};

typedef lctx_choices_of<const int32_t, const lctx_segment> lctx_choices;
typedef lctx_choices_of<int32_t, lctx_segment> lctx_written_choices;

// The segment of a chunk of a list, as a token of the tile sees it. given: of the token.
LCTX_HD inline lctx_segment lctx_listed(const lctx_segment * given, int32_t n_run, int32_t n_given, int32_t chunk,
                                        int32_t chunk_size) {
    for (int32_t slot = n_run; chunk >= 0 && slot < n_given; slot++) {
        if (given[slot].row0 <= chunk * chunk_size && chunk * chunk_size < given[slot].row1) {
            return {chunk * chunk_size, (chunk + 1) * chunk_size, given[slot].angle, given[slot].seq};
        }
    }
    return {0, 0, given[0].angle, given[0].seq};
}

// Segment `at` of n_expanded that a token reads with a choice.
LCTX_HD inline lctx_segment lctx_expanded(const lctx_choices & c, int32_t n_run, int32_t chunk_size, int32_t token,
                                          int32_t choice, int32_t at) {
    const int32_t tile = c.tile_before(token);
    if (!c.is_in(token, tile)) {
        const lctx_segment * segs = c.alone(c.index(token), choice);
        return at < c.n_segment ? segs[at] : lctx_segment{0, 0, segs[0].angle, segs[0].seq};
    }
    const lctx_segment * given = c.given(tile, token - c.firsts()[tile]);
    if (at < n_run) {
        return given[at];
    }
    const int32_t index = at - n_run, head_kv = choice / (c.n_choice / c.n_head_kv);
    const int32_t chunk = index < c.tiles.n_shared ? c.list(tile, head_kv)[index] : -1;
    return lctx_listed(given, n_run, c.tiles.n_given, chunk, chunk_size);
}
