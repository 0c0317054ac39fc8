#include "planes.h"

#include <algorithm>

int32_t lctx_plane::used(int32_t n_row, int32_t n_cell) const {
    switch (key) {
        case lctx_plane_key::page:  break;
        case lctx_plane_key::ring:  return std::min(n_row, n_entry);
        case lctx_plane_key::cell:  return std::min(n_cell, n_entry);
        case lctx_plane_key::chunk: return n_row / rows_each;
        case lctx_plane_key::query: return std::min((n_row + rows_each - 1) / rows_each * rows_each, n_entry);
    }
    return 0;
}
