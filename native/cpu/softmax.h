// Online softmax over blocks of keys for many queries at once: scores are [key][column], one column per (token, head).
// State of a column after the blocks seen so far: m = largest score, l = sum of exp(s - m), o = sum of exp(s - m) * v.
// Source: Milakov and Gimelshein, arXiv 1805.02867; merging two states as in FlashDecoding.
#pragma once

#include "vec.h"

#include <cmath>

// Scores to weights exp(s - m_new), in place; updates m and l and gives the factor by which o must be scaled.
// scores: [n_key][n_col], n_col a multiple of LCTX_VL. Returns false when every factor is 1.
static inline bool lctx_softmax_block(float * scores, int n_key, int n_col, float * m, float * l, float * factor) {
    bool rescale = false;
    for (int c = 0; c < n_col; c += LCTX_VL) {
        const lctx_vf m_old = lctx_vload(m + c);
        lctx_vf m_new = m_old;
        for (int k = 0; k < n_key; k++) {
            m_new = lctx_vmax(m_new, lctx_vload(scores + k * n_col + c));
        }
        // a column without any key so far has m = -inf; 0 keeps the exponents defined
        const lctx_vf base = m_new == lctx_vset(-INFINITY) ? lctx_vset(0.0f) : m_new;
        lctx_vf sums[LCTX_VL] = {};  // in the order of lctx_vsum
        for (int k = 0; k < n_key; k += LCTX_VL) {
            for (int i = 0; i < LCTX_VL && k + i < n_key; i++) {
                float * at = scores + (k + i) * n_col + c;
                const lctx_vf p = lctx_vexp(lctx_vload(at) - base);
                lctx_vstore(at, p);
                sums[i] += p;
            }
        }
        for (int half = LCTX_VL / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; i++) {
                sums[i] += sums[i + half];
            }
        }
        const lctx_vf f = lctx_vexp(m_old - base);
        lctx_vstore(m + c, m_new);
        lctx_vstore(l + c, lctx_vload(l + c) * f + sums[0]);
        lctx_vstore(factor + c, f);
        for (int i = 0; i < LCTX_VL; i++) {
            rescale |= f[i] != 1.0f;
        }
    }
    return rescale;
}

// Add the state (m1, l1, o1) to (m, l, o).
static inline void lctx_softmax_merge(float & m, float & l, float * o, float m1, float l1, const float * o1, int dim) {
    if (l1 == 0.0f) {
        return;
    }
    const float m_new = m1 > m ? m1 : m;
    const float f = l == 0.0f ? 0.0f : expf(m - m_new);
    const float f1 = expf(m1 - m_new);
    for (int i = 0; i < dim; i++) {
        o[i] = o[i] * f + o1[i] * f1;
    }
    l = l * f + l1 * f1;
    m = m_new;
}
