// Which pages of one KV head lie close to where it is computed, while all pages lie in a larger, slower memory.
//
// A key is sequence * n_page_max + block. Place s of head h is page h * n_staged + s of the staged pools. Counts are of pages.
#pragma once

#include "portable.h"

#include <cstdint>

struct lctx_staging {
    int32_t * data;
    int32_t n_staged;

    static constexpr int32_t HEADER = 4;
    LCTX_HD static int64_t size(int32_t n_staged) { return HEADER + 2 * (int64_t)n_staged; }

    LCTX_HD int32_t & clock() const { return data[0]; }                // runs so far
    LCTX_HD int32_t & n_hit() const { return data[1]; }                // pages that were here when they were wanted
    LCTX_HD int32_t & n_miss() const { return data[2]; }               // pages that were brought
    LCTX_HD int32_t & n_far() const { return data[3]; }                // pages that are read where they are: no room
    LCTX_HD int32_t * keys() const { return data + HEADER; }           // -1: the place is empty
    LCTX_HD int32_t * last_used() const { return keys() + n_staged; }  // clock
};
