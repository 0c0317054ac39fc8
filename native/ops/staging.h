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
    LCTX_HD static int64_t size(int32_t n_staged) { return HEADER + 2 * (int64_t)n_staged; }

    LCTX_HD int32_t & clock() const { return data[0]; }                // runs so far
    LCTX_HD int32_t & n_hit() const { return data[1]; }                // units that were here when they were wanted
    LCTX_HD int32_t & n_miss() const { return data[2]; }               // units that were brought
    LCTX_HD int32_t & n_far() const { return data[3]; }                // units that are read where they are: no room
    LCTX_HD int32_t * keys() const { return data + HEADER; }           // -1: the frame is empty
    LCTX_HD int32_t * last_used() const { return keys() + n_staged; }  // clock

    // Return when any of n frames was read last.
    LCTX_HD int32_t last_used(int32_t frame, int32_t n) const {
        int32_t last = last_used()[frame];
        for (int32_t i = 1; i < n; i++) {
            last = lctx_max(last, last_used()[frame + i]);
        }
        return last;
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
