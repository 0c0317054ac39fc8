// The sub-ops of GGML_OP_LCTX: parameters and constructors. The sub-op is op_params[0].
//
// One page is LCTX_PAGE_ROWS rows of one layer and KV head; page i is the rows [i*64, i*64 + 64) of the K and V pools.
// A row number counts the tokens of a sequence from 0. Its cell is its index among the rows that the head still holds:
// the row number itself when nothing is evicted. A cell's page is table[cell / 64].
#pragma once

#include "choices.h"
#include "ggml.h"
#include "hadamard.h"
#include "index.h"
#include "retain.h"
#include "staging.h"

#include <cstdint>
#include <vector>

constexpr int LCTX_PAGE_SHIFT = 6;
constexpr int LCTX_PAGE_ROWS = 1 << LCTX_PAGE_SHIFT;

// Rows are staged (staging.h) in units of 1 << shift: a chunk where chunks divide a page, else a page.
LCTX_HD constexpr int32_t lctx_unit_shift(int32_t chunk_size) {
    int32_t shift = LCTX_PAGE_SHIFT;
    while (LCTX_PAGE_ROWS % chunk_size == 0 && 1 << shift > chunk_size) {
        shift--;
    }
    return shift;
}

enum lctx_op : int32_t {
    LCTX_OP_ANGLES,
    LCTX_OP_STORE,
    LCTX_OP_ATTEND,
    LCTX_OP_SUMMARIZE,
    LCTX_OP_SELECT,
    LCTX_OP_VOTE,
    LCTX_OP_EVICT,
    LCTX_OP_FETCH,
    LCTX_OP_INDEX,
};

// RoPE as ggml's op_params give it; NORM or NEOX.
struct lctx_rope {
    int32_t mode;
    int32_t n_dims;
    int32_t n_ctx_orig;
    float freq_base;
    float freq_scale;
    float ext_factor;
    float attn_factor;
    float beta_fast;
    float beta_slow;
};

// op_params of the sub-ops; at most 64 bytes.
struct lctx_angles_params {
    lctx_op op;
    lctx_rope rope;
};

struct lctx_store_params {
    lctx_op op;
    int32_t rope_mode;
    lctx_score score;      // of the votes for the rows, when heads evict
    int32_t staged_chunk;  // > 0: the pools are staged units of chunks of this size, and other rows are left out
    lctx_hadamard hadamard;
    int32_t left;  // 1: the rows are left to a sub-op that follows (lctx_leave_rows)
};

struct lctx_index_params {
    lctx_op op;
    int32_t bits;
    int32_t hadamard_k;  // of the stored keys
    int32_t left;        // as of *store*
};

struct lctx_attend_params {
    lctx_op op;
    int32_t rope_mode;
    float scale;
    float softcap;       // 0: none
    uint32_t near_mask;  // bit s: segment s reads its keys from the near ring
    int16_t lse;         // 1: the LSE of every query and head follows the output
    int16_t fixed;       // 1: the sums of a query do not depend on what else is computed (fixed.h)
    int32_t chunk_size;  // 0: segments of any rows, the same for all heads; else every head has its own, each inside
                         // one chunk, but
    int32_t n_run;       // the first n_run of them, which may be any rows
    lctx_tiles tiles;    // tokens that share their chunks
    lctx_hadamard hadamard;
    int32_t writes;  // 1: the rows of its *store* are left to it
};

struct lctx_summarize_params {
    lctx_op op;
    int32_t rope_mode;
    float scale;
    float softcap;
    int32_t chunk_size;
    lctx_representation representation;
    int32_t
        key_pairs;  // 1: the file has the rows of Wk in the order of rotated pairs, those of Wv as they were trained
    lctx_hadamard hadamard;
};

struct lctx_select_params {
    lctx_op op;
    float scale;  // of the attention
    int32_t rope_mode;
    lctx_chunks chunks;
    int32_t n_tile;      // of the ubatch
    uint32_t near_mask;  // as in lctx_attend_params: those runs are not in the index
};

// Place of `held` among the sources of *attend*, which *vote* takes over.
constexpr int LCTX_ATTEND_HELD = 7;

struct lctx_vote_params {
    lctx_op op;
    lctx_retain retain;
};

struct lctx_evict_params {
    lctx_op op;
    lctx_retain retain;
    int32_t chunk_size;  // > 0: rows of the open chunk stay, and a chunk without rows loses its summary
    int32_t index_bits;  // of the index, where there is one
};

struct lctx_fetch_params {
    lctx_op op;
    int32_t n_staged;    // staged units of a head
    int32_t chunk_size;  // every segment is inside one chunk, but
    int32_t n_run;       // the first n_run of a list, which may be any rows
    lctx_tiles tiles;
    int32_t n_tokens;
};

// True for the types that K and V rows can have: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl.
bool lctx_is_kv_type(int32_t type);

// One token of the batch, as *store* sees it.
struct lctx_row {
    int32_t row;  // row in its sequence
    int32_t seq;
    int32_t angle;       // row of the angle table for the key's storage position
    int32_t near_angle;  // the same for the near ring
};

// One token of the batch, as *summarize* sees it.
struct lctx_chunk_row {
    int32_t row;
    int32_t seq;
    int32_t
        open;  // row of the open-chunk ring for its query: written when >= 0, else ~open is where its chunk was begun
    int32_t angle;  // row of the angle table for its offset in its chunk, where its key is stored
};

// One token of the batch, as *vote* sees it.
struct lctx_voter {
    int32_t row;
    int32_t seq;
    int32_t votes;      // 1: its query votes
    int32_t undo_from;  // row with which the ubatch begins in its sequence, when anybody of it votes: scores are kept
                        // first; else -1
};

// cos and sin of n positions, one pair per rotated pair of dimensions, the magnitude included.
//   pos:          I32 [n]
//   freq_factors: F32 [n_dims/2] or NULL
//   result:       F32 [n_dims, n]   (cos, sin, cos, sin, ...)
ggml_tensor * lctx_angles(ggml_context * ctx, ggml_tensor * pos, ggml_tensor * freq_factors, const lctx_rope & rope);

// Rotate the keys of the batch to their storage positions, transform K and V, convert, and write rows.
//   k:       F32 [head_dim_k, n_head_kv, n_tokens]   not rotated
//   v:       F32 [head_dim_v, n_head_kv, n_tokens]
//   k_pool:  any KV type [head_dim_k, n_rows_total];  v_pool: [head_dim_v, n_rows_total]
//   table:   I32 [n_page_max, n_head_kv, n_seq]      pages of this layer
//   rows:    I32 [4, n_tokens]                       lctx_row
//   angles:  F32 [n_dims, *]
//   near:    as k_pool [head_dim_k, near_rows, n_head_kv, n_seq] or NULL: keys once more, in row % near_rows
//   held:    I32 [lctx_held::size, n_head_kv, n_seq], or a view of these heads in a larger one (lctx_held says where
//   what is), or NULL:
//            heads evict, the new rows are written down there
//   center:  F32 [head_dim_k, n_head_kv] or NULL: subtracted from keys after they are rotated; not with near
//   staged_chunk: > 0: the pools are the staged units of chunks of this size and the table is theirs: other rows are
//   left out result:  view of k_pool; what reads the pools takes it as its source
ggml_tensor * lctx_store(ggml_context * ctx, ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_pool,
                         ggml_tensor * v_pool, ggml_tensor * table, ggml_tensor * rows, ggml_tensor * angles,
                         ggml_tensor * near, ggml_tensor * held, ggml_tensor * center, int32_t rope_mode,
                         lctx_score score, lctx_hadamard hadamard, int32_t staged_chunk = 0);

// Write keys once more, as stored, in few bits a channel. Of a row that a head does not hold nothing is written.
//   k:       result of lctx_store; table, rows, held: as there
//   index:   I8 [lctx_index_shape::row_size, n_rows_total]
//   result:  view of index
ggml_tensor * lctx_index(ggml_context * ctx, ggml_tensor * k, ggml_tensor * table, ggml_tensor * rows,
                         ggml_tensor * held, ggml_tensor * index, int32_t bits, int32_t hadamard_k);

// Leave the rows of *store*, which `from` is or indexes, to `to`: a device may write them in one launch with it, others
// write them where they are asked to. Nothing that is computed before `to` may read them. `to` is the *index* of a
// *store*; or for a single token the *select* by an *index* that they are left to, or else the *attend* of a *store*.
void lctx_leave_rows(ggml_tensor * from, ggml_tensor * to);

// Attention of every query over its segments.
//   q:       F32 [head_dim_k, n_head, n_tokens]      not rotated
//   k:       result of lctx_store; v_pool, table, angles, near, held: as there
//   segs:    I32 [4, n_seg, n_tokens]                lctx_segment
//            result of lctx_select with params.chunk_size > 0; params.tiles: those of select
//   result:  F32 [n_head*head_dim_v*n_tokens] as [head_dim_v, n_head, n_tokens], then with lse: [n_head, n_tokens]
// A query without any row gives 0 and LSE -inf.
// With staged units table is the result of lctx_fetch, segs are those that it saw, and heads do not evict; k and v_pool
// are its k_transit and v_transit where the pools are in a file.
ggml_tensor * lctx_attend(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v_pool,
                          ggml_tensor * table, ggml_tensor * segs, ggml_tensor * angles, ggml_tensor * near,
                          ggml_tensor * held, const lctx_attend_params & params, ggml_tensor * k_staged = nullptr,
                          ggml_tensor * v_staged = nullptr);

// Summaries of the chunks that the batch completes; the queries of chunks that stay open are kept.
//   q:       F32 [head_dim_k, n_head, n_tokens]      not rotated
//   k:       result of lctx_store; v_pool, table, angles, held: as there
//   rows:    I32 [4, n_tokens]                       lctx_chunk_row
//   summaries:    lctx_summary_type [summary_dim, n_chunk_max, n_summary, n_seq]   n_summary is n_head by attention,
//   else n_head_kv
//            (summaries.h)
//   open:    F32 [head_dim_k, 2*chunk_size, n_head, n_seq], queries as q; NULL unless by attention
//   result:  view of summaries
ggml_tensor * lctx_summarize(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v_pool,
                             ggml_tensor * table, ggml_tensor * rows, ggml_tensor * angles, ggml_tensor * held,
                             ggml_tensor * summaries, ggml_tensor * open, const lctx_summarize_params & params);

// List what every query reads: its runs, then the best of the chunks in its far ranges, ascending; unused segments are
// empty.
//   q:        F32 [head_dim_k, n_head, n_tokens]      not rotated
//   compared: result of lctx_summarize, or by keys of lctx_index
//   rows:     I32 [4, n_tokens]                       lctx_row
//   segs:     I32 [4, n_given, n_tokens]              lctx_segment: runs, then far ranges, which begin and end with
//   chunks angles, table, held: as for lctx_store tiles:    I32 [n_tile]                            first token of each
//   tile, ascending; NULL: none result:   I32 [4, n_segment, n_choice, n_unit]    lctx_choices; n_choice is n_head_kv
//   by group, else n_head; n_unit is n_tokens
//             without tiles
ggml_tensor * lctx_select(ggml_context * ctx, ggml_tensor * q, ggml_tensor * compared, ggml_tensor * rows,
                          ggml_tensor * segs, ggml_tensor * angles, ggml_tensor * table, ggml_tensor * held,
                          ggml_tensor * tiles, const lctx_chunks & chunks, float scale, int32_t rope_mode,
                          uint32_t near_mask);
// The chunks that a token and head of the ubatch read, in whole or in part: ascending, each once. data: of that result.
std::vector<int32_t> lctx_chunks_read(const ggml_tensor * selected, const int32_t * data, int32_t token, int32_t head);
// The tiles of that result, for its readers.
lctx_tiles lctx_tiles_of(const ggml_tensor * selected);

// The queries of the batch vote for the rows they have read: scores of all rows that are held, or of those whose fate
// is open (lctx_retain::is_open).
//   attended: result of lctx_attend with lse; the queries, rows and segments are its own
//   voters:   I32 [4, n_tokens]                      lctx_voter
//   result:   view of held
ggml_tensor * lctx_vote(ggml_context * ctx, ggml_tensor * attended, ggml_tensor * voters, const lctx_retain & retain);

// Rows without enough votes leave; the others move up, K and V as stored.
//   k_pool, v_pool, table, held: as for lctx_store
//   due:     I32 [n_seq]   the row after which each sequence evicts; < 0: it does not
//   budgets: I32 [n_head_kv, n_seq]   rows that each head keeps at most, where the rule has a budget; NULL: that of the
//   rule summaries:    as for lctx_summarize, or NULL: a chunk that has lost its last row is NaN then, which no query
//   chooses index:   as for lctx_index, or NULL: its rows move with those of K result:  view of held
ggml_tensor * lctx_evict(ggml_context * ctx, ggml_tensor * k_pool, ggml_tensor * v_pool, ggml_tensor * table,
                         ggml_tensor * held, ggml_tensor * due, ggml_tensor * budgets, ggml_tensor * summaries,
                         ggml_tensor * index, const lctx_retain & retain, int32_t chunk_size, int32_t index_bits);

// Bring the units that the batch reads close, where there is room: those that are worth less make it (staging.h).
//   segs:       result of lctx_select; chunk_size, n_run, tiles: as of lctx_attend_params; n_tokens: of the ubatch
//   k:          result of lctx_store into the pool of all pages; v_pool, table: as there
//   k_staged: as k_pool [head_dim_k, n_head_kv*n_staged << shift]: head h has the units from h*n_staged on; v_staged
//   likewise staging:   I32 [lctx_staging::size, n_head_kv] staging_table: I32 as table, for units: a staged one, or
//   the number of staged units + the unit of the pool; -1: not known result:     view of staging_table
//   k_transit, v_transit: where the pools are in a file, as k_staged for units that find no room there, which the table
//   numbers behind the staged ones; else NULL. They hold them until the next fetch.
ggml_tensor * lctx_fetch(ggml_context * ctx, ggml_tensor * segs, ggml_tensor * k, ggml_tensor * v_pool,
                         ggml_tensor * table, ggml_tensor * k_staged, ggml_tensor * v_staged, ggml_tensor * staging,
                         ggml_tensor * staging_table, ggml_tensor * k_transit, ggml_tensor * v_transit,
                         int32_t chunk_size, int32_t n_run, const lctx_tiles & tiles, int32_t n_tokens);
