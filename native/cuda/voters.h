// Finds who votes in *vote*: runs of tokens of one sequence, and what a KV head of that sequence holds.
#pragma once

#include "../ops/cache.h"
#include "device.h"

// Tokens [first, end) of one sequence.
struct lctx_run {
    int32_t first, end;
};

// The first token of [first, end) with f, else end; the whole warp calls and gets it.
template <typename F> __device__ int lctx_find_token(int first, int end, F && f) {
    for (; first < end; first += LCTX_WARP) {
        const int token = first + lctx_lane(), found = lctx_warp_min(token < end && f(token) ? token : end);
        if (found < end) {
            return found;
        }
    }
    return end;
}

// f(run) for the runs of the batch, in order.
template <typename F> __device__ void lctx_each_run(const lctx_voter * voters, int n_tokens, F && f) {
    for (lctx_run r = {0, 0}; r.first < n_tokens; r.first = r.end) {
        const int32_t seq = voters[r.first].seq;
        r.end = lctx_find_token(r.first, n_tokens, [&](int token) { return voters[token].seq != seq; });
        f(r);
    }
}

// One KV head of the sequence of a run.
struct lctx_voted {
    int32_t head_kv, seq, border;
    lctx_held held;
    int32_t n_held;

    __device__ lctx_voted(const lctx_vote_args & v, const lctx_run & r, int head_kv)
        : head_kv(head_kv),
          seq(v.voters[r.first].seq),
          border(v.retain.border(v.voters[r.first].row)),  // of all tokens: no ubatch crosses one
          held(lctx_cells(v.attend.cache, head_kv, seq).held),
          n_held(held.cell(v.voters[r.end - 1].row) + 1) {}
};
