// Rows of a part that come to the end of a sequence: all of them, or those that the heads kept when the text was compressed.
#include "kv-cache.h"

#include <algorithm>

// Append rows [skip, skip + n) of a part. When it throws, the sequence is as before.
void lctx_kv_cache::append_rows(lctx_state_reader & io, int32_t seq, const lctx_part & part, int32_t skip, int32_t n) {
    std::vector<lctx_part_take> takes;
    lctx_growth growth = {n, {}, 0};
    each_head([&](lctx_kv_store & store, int32_t head) {
        lctx_part_take take = {part.at.end - part.at.first, skip, n, store.n_cell(seq, head, seqs_[seq].n_pos)};
        if (has_lists()) {
            const std::vector<int32_t> & rows = part.rows[takes.size()];
            take.n_row = (int32_t)rows.size();
            take.first = (int32_t)(std::lower_bound(rows.begin(), rows.end(), skip) - rows.begin());
            take.n = (int32_t)(std::lower_bound(rows.begin(), rows.end(), skip + n) - rows.begin()) - take.first;
        }
        takes.push_back(take);
        growth.n_each.push_back(take.n);
    });
    const std::string why = grow_to_write(seq, growth);
    part_require(why.empty(), why);
    try {
        size_t i = 0;
        each_head([&](lctx_kv_store & store, int32_t head) {
            const lctx_part_take & take = takes[i++];
            for (int32_t row = 0, n_block; row < take.n_row; row += n_block) {
                n_block = std::min(LCTX_PAGE_ROWS, take.n_row - row);
                for (const lctx_plane * rows : store.row_planes()) {
                    ggml_tensor * pool = rows->tensor;
                    const uint8_t * bytes = part_rows(io, pool, n_block);
                    const int32_t end = std::min(n_block, take.first + take.n - row);
                    for (int32_t at = std::max(0, take.first - row), n_run; at < end; at += n_run) {
                        const int32_t cell = take.to + row + at - take.first;
                        n_run = std::min(end - at, LCTX_PAGE_ROWS - cell % LCTX_PAGE_ROWS);
                        const int64_t page = store.page(seq, head, cell / LCTX_PAGE_ROWS);
                        store.land(pool, (page * LCTX_PAGE_ROWS + cell % LCTX_PAGE_ROWS) * pool->nb[1], bytes + at * pool->nb[1],
                                   n_run * pool->nb[1]);
                    }
                }
            }
        });
        part_finish(io);
    } catch (...) {
        shrink(seq, growth);
        throw;
    }
    note_rows(seq, n, part, skip, takes);
}

// Which rows the heads hold now; before the end of those that were compressed the sequence cannot be cut.
void lctx_kv_cache::note_rows(int32_t seq, int32_t n, const lctx_part & part, int32_t skip, const std::vector<lctx_part_take> & takes) {
    if (!has_lists()) {
        return;
    }
    sequence & s = seqs_[seq];
    size_t i = 0;
    each_head([&](lctx_kv_store & store, int32_t head) {
        const lctx_part_take & take = takes[i];
        const auto first = part.rows[i++].begin() + take.first;
        std::vector<int32_t> rows(first, first + take.n);
        std::for_each(rows.begin(), rows.end(), [&](int32_t & row) { row += s.n_pos - n - skip; });
        const std::vector<int32_t> scores(take.n, lctx_held::first_score(retain_->score));
        for (int32_t plane = 0; plane < lctx_held::PLANES; plane++) {
            const std::vector<int32_t> & values = plane == 0 ? rows : scores;
            store.land(store.held, store.held_offset(seq, head, plane) + take.to * sizeof(int32_t), values.data(),
                       take.n * sizeof(int32_t));
        }
    });
    if (std::any_of(takes.begin(), takes.end(), [&](const lctx_part_take & take) { return take.n < n; })) {
        s.evicted_to = s.voted_to = s.n_pos;
        s.undo_from = -1;
    }
    for (const auto & store : stores_) {
        store->set_headers(seq, s.evicted_to, -1);
    }
}
