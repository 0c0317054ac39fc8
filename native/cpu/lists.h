// Tiles whose tokens share a list of chunks (../ops/choices.h): attention as over any rows.
//
// The rows of the list are copied side by side, 64 at a time, in their own type, and every column reads all of them: no
// masks, no lists of columns. Runs, which end at the query's own row, follow as blocks of the cache.
#pragma once

#include "items.h"

// Heads of a tile whose columns are computed together.
static inline int lctx_list_heads(const lctx_attend_args & a) {
    return std::max(1, std::min(LCTX_MAX_COLUMNS / a.params.tiles.size, a.n_head / a.n_head_kv));
}
static inline int64_t lctx_list_jobs(const lctx_attend_args & a) {
    return (int64_t)a.n_head_kv * a.params.tiles.n_tile * lctx_ceil_div(a.n_head / a.n_head_kv, lctx_list_heads(a));
}

struct lctx_list_scratch {
    lctx_block_scratch block;
    float * states;         // lctx_states
    lctx_reader * readers;  // [n_column]
    char *k, *v;            // [BLOCK] rows as stored

    static int n_column(const lctx_attend_args & a) {
        return a.params.tiles.n_tile > 0 ? lctx_round_up(lctx_list_heads(a) * a.params.tiles.size, LCTX_VL) : 0;
    }
    static int dim_v(const lctx_attend_args & a) { return lctx_round_up(a.head_dim_v, LCTX_VL); }
    static size_t n_float(const lctx_attend_args & a) {
        const int n = n_column(a);
        return n == 0 ? 0
                      : lctx_round_up((int)(lctx_block_scratch::n_float(n, a.head_dim_k, dim_v(a)) +
                                            lctx_states::n_float(n, dim_v(a))),
                                      16);
    }
    static size_t rows_size(const lctx_pool_args & pool) {
        return GGML_PAD(LCTX_BLOCK * pool.row_size, LCTX_CACHE_LINE);
    }
    static size_t size(const lctx_attend_args & a) {
        const size_t n = n_column(a);
        return n == 0 ? 0
                      : n_float(a) * sizeof(float) + rows_size(a.cache.k_pool) + rows_size(a.cache.v_pool) +
                            n * sizeof(lctx_reader);
    }
    lctx_list_scratch(char * base, const lctx_attend_args & a)
        : block((float *)base, n_column(a), a.head_dim_k, dim_v(a)),
          states((float *)base + lctx_block_scratch::n_float(n_column(a), a.head_dim_k, dim_v(a))),
          k(base + n_float(a) * sizeof(float)),
          v(k + rows_size(a.cache.k_pool)) {
        readers = (lctx_reader *)(v + rows_size(a.cache.v_pool));
    }
};

// The columns of a job over rows that all of them read.
class lctx_list_attention {
  public:
    lctx_list_attention(const lctx_attend_args & a, int32_t index, const lctx_tile & tile, const lctx_list_scratch & w)
        : a_(a),
          choices_(a.choices()),
          index_(index),
          tile_(tile),
          w_(w),
          given_(choices_.given(index, 0)),
          cells_(a.cache, tile.head_kv, given_->seq),
          columns_(w.block.queries, tile.n_column, a.head_dim_k, a.params.fixed, false),
          states_(w.states, columns_.n_pad, w.dim_v(a)),
          host_(a) {
        host_.segs = given_, host_.n_seg = choices_.tiles.n_given, host_.n_choice = 1;
    }

    void run() {
        states_.clear(columns_.n_pad);
        for (int slot = a_.params.n_run; slot < choices_.tiles.n_given; slot++) {
            attend_listed(slot);
        }
        for (int run = 0; run < a_.params.n_run; run++) {
            attend_run(run);
        }
        for (int c = 0; c < tile_.n_column; c++) {
            lctx_write_state(a_, tile_.token(c), tile_.head(c), states_.m[c], states_.l[c], states_.out(c));
        }
    }

  private:
    // Segment `seg` of what the host has written, which all columns read.
    lctx_item item_of(int seg) const {
        for (int c = 0; c < tile_.n_column; c++) {
            const int32_t index = c / tile_.n_head * host_.n_seg + seg;
            w_.readers[c] = {c, index, given_[index].angle};
        }
        return {host_, tile_.head_kv, w_.readers, tile_.n_column};
    }
    // Queries as they see the item.
    void load(const lctx_item & item) const {
        item.load_queries(host_, tile_, columns_, w_.block.rotated);
        lctx_round_for_scores(a_, columns_);
    }
    // The chunks of the list that lie in a far range.
    void attend_listed(int slot) {
        const lctx_segment & range = given_[slot];
        const int32_t *chunk = choices_.list(index_, tile_.head_kv), *end = chunk + choices_.tiles.n_shared;
        const int32_t size = a_.params.chunk_size;
        bool loaded = false;
        int n = 0;
        for (; range.row0 < range.row1 && chunk < end && *chunk >= 0; chunk++) {
            if (*chunk * size < range.row0 || *chunk * size >= range.row1) {
                continue;
            }
            if (!loaded) {
                load(item_of(slot));
                loaded = true;
            }
            n = add(cells_.cell(*chunk * size), cells_.cell((*chunk + 1) * size), n);
        }
        if (n > 0) {
            attend_rows(n);
        }
    }
    // Copy cells after the n rows that wait, and read them whenever a block is full; returns how many wait now.
    int add(int32_t cell, int32_t end, int n) {
        const int32_t unit = 1 << a_.cache.table.shift;
        while (cell < end) {
            const int32_t here = std::min({end, (cell / unit + 1) * unit, cell + LCTX_BLOCK - n});
            copy(a_.cache.k_pool, lctx_key_row(a_.cache, cell, tile_.head_kv, given_->seq), here - cell,
                 w_.k + n * a_.cache.k_pool.row_size);
            if (!lctx_values_in_keys(a_.cache)) {
                copy(a_.cache.v_pool, lctx_value_row(a_.cache, cell, tile_.head_kv, given_->seq), here - cell,
                     w_.v + n * a_.cache.v_pool.row_size);
            }
            n += here - cell, cell = here;
            if (n == LCTX_BLOCK) {
                attend_rows(n);
                n = 0;
            }
        }
        return n;
    }
    static void copy(const lctx_pool_args & pool, const char * from, int n, char * to) {
        memcpy(to, from, n * pool.row_size);
    }
    void attend_rows(int n) {
        const lctx_pool_args &k = a_.cache.k_pool, &v = a_.cache.v_pool;
        const char * values = lctx_values_in_keys(a_.cache) ? w_.k + (v.data - k.data) : w_.v;
        lctx_attend_rows(a_, columns_, {k.type, k.row_size, w_.k, nullptr}, {v.type, v.row_size, values, nullptr}, n,
                         states_, w_.block, [](float *, int, int) {});
    }
    // A run: each column up to its own row.
    void attend_run(int run) const {
        const lctx_item item = item_of(run);
        if (item.n_block() > 0) {
            load(item);
            lctx_attend_blocks(host_, columns_, item, 0, item.n_block(), states_, w_.block);
        }
    }

    const lctx_attend_args & a_;
    const lctx_choices choices_;
    const int32_t index_;
    const lctx_tile & tile_;
    const lctx_list_scratch & w_;
    const lctx_segment * given_;
    const lctx_cells cells_;
    const lctx_columns columns_;
    const lctx_states states_;
    lctx_attend_args host_;  // with what the host has written as segments
};

static LCTX_ALONE void lctx_attend_list(const lctx_attend_args & a, int64_t job, const lctx_list_scratch & w) {
    const int n_rep = a.n_head / a.n_head_kv, heads = lctx_list_heads(a), n_group = (int)lctx_ceil_div(n_rep, heads);
    const auto group = (int)(job % n_group), head_kv = (int)(job / n_group % a.n_head_kv),
               index = (int)(job / n_group / a.n_head_kv);
    const int head0 = group * heads;
    const lctx_tile tile(head_kv, head_kv * n_rep + head0, std::min(heads, n_rep - head0), a.choices().firsts()[index],
                         a.params.tiles.size);
    lctx_list_attention(a, index, tile, w).run();
}
