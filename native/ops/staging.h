// Tells which rows of one KV head lie close to where it is computed, while all rows lie in a larger, slower memory.
//
// They lie there in units of a chunk, or of a page where chunks do not divide it. A run is read page by page: the units
// of a page that a run touches all lie in the pool, or side by side at frames that begin at a multiple of their number.
// Other units lie where there is room. A key is sequence * n_unit_max + unit. Frame s of head h is unit h * n_staged +
// s of the staged pools. Counts are of units.
#pragma once

#include "portable.h"

#include <cstdint>

struct lctx_staging {
    int32_t * data;
    int32_t n_staged;

    static constexpr int32_t HEADER = 4;
    LCTX_HD static int64_t size(int32_t n_staged, int64_t n_key) { return HEADER + n_staged + n_key; }

    LCTX_HD int32_t & clock() const { return data[0]; }       // runs so far
    LCTX_HD int32_t & n_hit() const { return data[1]; }       // units that were here when they were wanted
    LCTX_HD int32_t & n_miss() const { return data[2]; }      // units that were brought
    LCTX_HD int32_t & n_far() const { return data[3]; }       // units for which there was no room
    LCTX_HD int32_t * keys() const { return data + HEADER; }  // -1: the frame is empty

    // A unit is worth the number of the last RUNS runs that read it; among equals, those read more recently are. Of a
    // text that continues, such a buffer has more than one by age alone, which has what one token read, and more than
    // the best that could be kept for good (docs/offload.md). A use: the last run, and a bit for it and each before it.
    static constexpr int32_t RUNS = 8, MOST_WORTH = (RUNS + 1) << RUNS;
    LCTX_HD uint32_t & use(int32_t key) const { return ((uint32_t *)data)[HEADER + n_staged + key]; }
    // The bits of a key, that of this run the highest.
    LCTX_HD uint32_t runs(int32_t key) const {
        const uint32_t age = ((uint32_t)clock() - (use(key) >> RUNS)) & (UINT32_MAX >> RUNS);
        return age < (uint32_t)RUNS ? (use(key) & ((1u << RUNS) - 1)) >> age : 0;
    }
    LCTX_HD bool is_read(int32_t key) const { return runs(key) >> (RUNS - 1) != 0; }
    LCTX_HD void read(int32_t key) const { use(key) = (uint32_t)clock() << RUNS | runs(key) | 1u << (RUNS - 1); }
    LCTX_HD int32_t worth(int32_t key) const {
        int32_t n = 0;
        for (uint32_t bits = runs(key); bits != 0; bits &= bits - 1) {
            n++;
        }
        return n << RUNS | (int32_t)runs(key);
    }

    // Of n frames: what the best of their units is worth, MOST_WORTH when one is read now, -1 when all are empty.
    LCTX_HD int32_t worth_of_frames(int32_t frame, int32_t n) const {
        int32_t most = -1;
        for (int32_t i = frame; i < frame + n; i++) {
            const int32_t key = keys()[i];
            most = lctx_max(most, key < 0 ? -1 : is_read(key) ? MOST_WORTH : worth(key));
        }
        return most;
    }
    // Return whether n frames have a page of n units.
    LCTX_HD bool has_page(int32_t frame, int32_t n) const {
        const int32_t key = keys()[frame];
        bool all = key >= 0 && key % n == 0;
        for (int32_t i = 1; i < n; i++) {
            all = all && keys()[frame + i] == key + i;
        }
        return all;
    }
};
