// *index*: the keys of some rows once more, in few bits a channel (../ops/index.h).
#include "index.h"

#include "ggml-cpu-impl.h"
#include "kernels.h"

#include <algorithm>

namespace {

// Per-thread scratch, laid out in the work buffer.
struct scratch {
    float * key;     // [n_pad]
    float * level;   // [n_pad]
    uint8_t * code;  // [n_pad], n_channel at least
    char * rows;     // [LCTX_PAGE_ROWS][row size] of a file

    static int32_t n_pad(const lctx_index_args & a) { return lctx_round_up(a.index.head_dim, LCTX_VL); }
    static size_t n_code(const lctx_index_args & a) {
        return GGML_PAD(std::max(n_pad(a), a.index.n_channel()), LCTX_CACHE_LINE);
    }
    static size_t size(const lctx_index_args & a) {
        const size_t n_file = a.file ? LCTX_PAGE_ROWS * a.cache.k_pool.row_size : 0;
        return GGML_PAD(2 * n_pad(a) * sizeof(float) + n_code(a) + n_file, LCTX_CACHE_LINE);
    }
    scratch(char * base, const lctx_index_args & a)
        : key((float *)base),
          level(key + n_pad(a)),
          code((uint8_t *)(level + n_pad(a))),
          rows((char *)code + n_code(a)) {
        std::fill(key + a.index.head_dim, key + n_pad(a), 0.0f);
    }
};

// Reads keys in turn; those of a file together with at most n_next that follow them in their page.
class key_reader {
  public:
    key_reader(const lctx_index_args & a, const scratch & w) : a_(a), w_(w) {}

    const char * key(int32_t cell, int32_t head, int32_t seq, int32_t n_next) {
        const char * at = lctx_key_row(a_.cache, cell, head, seq);
        if (!a_.file) {
            return at;
        }
        const size_t row_size = a_.cache.k_pool.row_size;
        if (at < first_ || at >= first_ + n_ * row_size) {
            first_ = at, n_ = std::min(LCTX_PAGE_ROWS - cell % LCTX_PAGE_ROWS, 1 + n_next);
            a_.file->read(first_, w_.rows, n_ * row_size);
        }
        return w_.rows + (at - first_);
    }

  private:
    const lctx_index_args & a_;
    const scratch & w_;
    const char * first_ = nullptr;
    int32_t n_ = 0;
};

// n_next: rows that this thread indexes after it.
void index_row(const lctx_index_args & a, const lctx_row & at, int32_t head, int32_t n_next, key_reader & keys,
               const scratch & w) {
    const lctx_cells cells(a.cache, head, at.seq);
    const int32_t cell = cells.cell(at.row);
    if (!cells.all() && cells.row(cell) != at.row) {
        return;  // it has left
    }
    lctx_unpack_rows(a.cache.k_pool.type, keys.key(cell, head, at.seq, n_next), a.cache.k_pool.row_size, 1,
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
    const int32_t step = args.file ? LCTX_PAGE_ROWS : 1;
    const int64_t n = lctx_div_up(args.n_rows, step) * args.n_head_kv;
    for (int64_t i = params->ith; i < n; i += params->nth) {
        const auto first = (int32_t)(i / args.n_head_kv) * step;
        const int32_t end = std::min(first + step, args.n_rows);
        key_reader keys(args, w);
        for (int32_t row = first; row < end; row++) {
            index_row(args, args.rows[row], (int32_t)(i % args.n_head_kv), end - row - 1, keys, w);
        }
    }
}
