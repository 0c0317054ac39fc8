// Results of *attend*: states of a softmax, and the partial states of a tile that a second kernel merges.
#pragma once

#include "flash.h"
#include "kernels.h"

// Two dimensions of a state: scores are base 2, o is not divided by l yet.
struct lctx_attend_state {
    float m, l, o0, o1;
};

// Dimensions d and d + 1 of n states that become one. states: m, l, o of each, `stride` numbers apart. What is NaN in
// one is NaN in the result.
static __device__ inline lctx_attend_state lctx_merge_states(const float * states, int n, size_t stride, int d) {
    lctx_attend_state to = {-INFINITY, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < n; i++) {
        to.m = fmaxf(to.m, states[i * stride]);
    }
    for (int i = 0; i < n; i++) {
        const float * s = states + i * stride;
        const float factor = s[1] != 0.0f ? lctx_exp2(s[0] - to.m) : 0.0f;
        to.l += s[1] * factor, to.o0 += s[2 + d] * factor, to.o1 += s[3 + d] * factor;
    }
    return to;
}

struct lctx_partial_states {
    int n_split;
    float * data;  // [n_split][n_tokens * n_head][m, l, o of head_dim_v] with n_split > 1

    __host__ __device__ static size_t n_float(const lctx_attend_args & a) {
        return (size_t)a.n_tokens * a.n_head * (a.head_dim_v + 2);
    }
    // Bytes of work buffer.
    static size_t size(const lctx_attend_args & a, int n_split) {
        return n_split > 1 ? n_split * n_float(a) * sizeof(float) : 0;
    }
    __device__ float * of(const lctx_attend_args & a, int split, int token, int head) const {
        return data + split * n_float(a) + ((size_t)token * a.n_head + head) * (a.head_dim_v + 2);
    }
    // Dimensions d and d + 1 of a result: into the output, or a partial state that is merged later.
    __device__ void write(const lctx_attend_args & a, int split, int token, int head, int d,
                          const lctx_attend_state & s) const {
        if (d >= a.head_dim_v) {
            return;
        }
        if (n_split > 1) {
            float * to = of(a, split, token, head);
            to[2 + d] = s.o0, to[3 + d] = s.o1;
            if (d == 0) {
                to[0] = s.m, to[1] = s.l;
            }
            return;
        }
        const size_t at = (size_t)token * a.n_head + head;
        const float inverse = s.l != 0.0f ? 1.0f / s.l : 0.0f;
        a.dst[at * a.head_dim_v + d] = s.o0 * inverse, a.dst[at * a.head_dim_v + d + 1] = s.o1 * inverse;
        if (a.lse && d == 0) {
            a.lse[at] = s.l != 0.0f ? s.m * LCTX_LN_2 + logf(s.l) : -INFINITY;
        }
    }
};

// Parts of what `n_block` blocks of threads would read, so that there are about as many blocks for every multiprocessor
// as asked; no more than there are pages.
inline int lctx_cuda_splits(const lctx_cuda_device & device, const lctx_attend_args & a, int n_block,
                            int per_multiprocessor) {
    const int n_wanted = per_multiprocessor * device.n_multiprocessor / n_block;
    return lctx_max(1, lctx_min(n_wanted, (int)a.cache.table.head_stride));
}

// Merge the partial states, and transform back the output of values that were transformed.
void lctx_cuda_finish_attend(const lctx_cuda_queue & queue, const lctx_attend_args & args,
                             const lctx_partial_states & partials);
