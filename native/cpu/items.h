// The blocks of an item for its readers.
#pragma once

#include "block.h"
#include "walk.h"

// Blocks [first, end) of an item. columns: the queries of its readers; st: their states.
static inline void lctx_attend_blocks(const lctx_attend_args & a, const lctx_columns & columns, const lctx_item & item,
                                      int first, int end, const lctx_states & st, const lctx_block_scratch & w) {
    for (int i = first; i < end; i++) {
        const int index = item.first_block() + i, cell = item.block_lo(index), n = item.block_hi(index) - cell;
        const lctx_block block = {cell, n, item.head_kv, item.seq, item.near, i + 1 < end ? cell + n : item.next};
        lctx_attend_block(a, columns, item.cells, block, st, w, [&](float * s, int cell_step, int column_step) {
            if (item.is_partial(cell, n)) {
                item.mask(a, n, s, cell_step, column_step, [&](int x) { return cell + x; });
            }
        });
    }
}
