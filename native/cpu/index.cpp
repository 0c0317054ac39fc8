// *index*: the keys of some rows once more, in few bits a channel (../ops/index.h).
#include "index.h"

#include "ggml-cpu-impl.h"
#include "kernels.h"

namespace {

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * key;     // [n_pad]
    float * level;   // [n_pad]
    uint8_t * code;  // [n_pad], n_channel at least

    static int32_t n_pad(const lctx_index_args & a) { return lctx_round_up(a.index.head_dim, LCTX_VL); }
    static size_t size(const lctx_index_args & a) {
        return GGML_PAD(2 * n_pad(a) * sizeof(float) + std::max(n_pad(a), a.index.n_channel()), LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_index_args & a)
        : key((float *)base), level(key + n_pad(a)), code((uint8_t *)(level + n_pad(a))) {
        std::fill(key + a.index.head_dim, key + n_pad(a), 0.0f);
    }
};

void index_row(const lctx_index_args & a, const lctx_row & at, int32_t head, const scratch & w) {
    const lctx_cells cells(a.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (!cells.all() && cells.row(cell) != at.row) {
        return;  // it has left
    }
    lctx_unpack_rows(a.cache.k_pool.type, lctx_key_row(a.cache, cell, head, at.seq), a.cache.k_pool.row_size, 1,
                     a.index.head_dim, w.key, a.index.head_dim);
    if (a.hadamard_k != a.index.hadamard()) {
        lctx_transform(w.key, a.index.head_dim, a.hadamard_k);
        lctx_transform(w.key, a.index.head_dim, a.index.hadamard());
    }
    const lctx_index_rows rows = {a.cache, head, at.seq};
    lctx_index_put(a.index, w.key, scratch::n_pad(a), cell % a.index.GROUP, rows.group(cell / a.index.GROUP), w.level,
                   w.code);
}

}  // namespace

size_t lctx_cpu_index_wsize(const lctx_index_args & args, int n_tasks) {
    return LCTX_CACHE_LINE + scratch::size(args) * n_tasks;
}

void lctx_cpu_index(const ggml_compute_params * params, const lctx_index_args & args) {
    char * base = (char *)GGML_PAD((uintptr_t)params->wdata, LCTX_CACHE_LINE);
    const scratch w(base + params->ith * scratch::size(args), args);
    const int64_t n = (int64_t)args.n_rows * args.n_head_kv;
    for (int64_t i = params->ith; i < n; i += params->nth) {
        index_row(args, args.rows[i / args.n_head_kv], (int32_t)(i % args.n_head_kv), w);
    }
}
