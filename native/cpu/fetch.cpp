// *fetch*: bring the pages that the batch reads close, the least recently read ones making place.
#include "../ops/cache.h"
#include "ggml-cpu-impl.h"
#include "kernels.h"

#include <algorithm>

namespace {

// Pages of a head that the batch reads, by key.
size_t n_key(const lctx_fetch_args & a) {
    return (size_t)a.n_seq * a.n_page_max;
}

void mark_pages(const lctx_fetch_args & a, int head_kv, char * wanted) {
    const int n_choice = a.n_choice / a.n_head_kv;
    std::fill_n(wanted, n_key(a), 0);
    for (int token = 0; token < a.n_tokens; token++) {
        const lctx_segment * segs = a.segs + ((int64_t)token * a.n_choice + head_kv * n_choice) * a.n_seg;
        for (int i = 0; i < n_choice * a.n_seg; i++) {
            for (int block = segs[i].row0 / LCTX_PAGE_ROWS; block * LCTX_PAGE_ROWS < segs[i].row1 && segs[i].row0 < segs[i].row1; block++) {
                wanted[(size_t)segs[i].seq * a.n_page_max + block] = 1;
            }
        }
    }
}

// The place that was not read for the longest time, or -1 when all are read now.
int victim(const lctx_staging & r) {
    const int place = (int)(std::min_element(r.last_used(), r.last_used() + r.n_staged) - r.last_used());
    return r.last_used()[place] == r.clock() ? -1 : place;
}

void copy_page(const lctx_pool_args & from, size_t from_page, const lctx_pool_args & to, size_t to_page) {
    const size_t size = LCTX_PAGE_ROWS * from.row_size;
    memcpy(to.data + to_page * size, from.data + from_page * size, size);
}

void fetch_head(const lctx_fetch_args & a, int head_kv, char * wanted) {
    const lctx_staging r = {a.staging + head_kv * a.staging_stride, a.n_staged};
    const auto entry = [&](int32_t key) -> int32_t & {
        return a.table[key / a.n_page_max * a.all.table.seq_stride + head_kv * a.all.table.head_stride + key % a.n_page_max];
    };
    mark_pages(a, head_kv, wanted);
    r.clock()++;
    for (int place = 0; place < r.n_staged; place++) {
        const int32_t key = r.keys()[place];
        if (key >= 0 && wanted[key]) {
            wanted[key] = 0;
            r.last_used()[place] = r.clock();
            r.n_hit()++;
        }
    }
    for (int32_t key = 0; key < (int32_t)n_key(a); key++) {
        if (!wanted[key]) {
            continue;
        }
        const int32_t page = lctx_page_of(a.all.table, key % a.n_page_max * LCTX_PAGE_ROWS, head_kv, key / a.n_page_max);
        const int place = victim(r);
        if (place < 0) {
            entry(key) = a.n_head_kv * a.n_staged + page;
            r.n_far()++;
            continue;
        }
        if (r.keys()[place] >= 0) {
            entry(r.keys()[place]) = -1;
        }
        const int32_t to = head_kv * a.n_staged + place;
        entry(key) = to;
        r.keys()[place] = key;
        r.last_used()[place] = r.clock();
        r.n_miss()++;
        copy_page(a.all.k_pool, page, a.k_staged, to);
        copy_page(a.all.v_pool, page, a.v_staged, to);
    }
}

}  // namespace

size_t lctx_cpu_fetch_wsize(const lctx_fetch_args & args, int n_tasks) {
    return n_key(args) * n_tasks;
}

void lctx_cpu_fetch(const ggml_compute_params * params, const lctx_fetch_args & args) {
    for (int head_kv = params->ith; head_kv < args.n_head_kv; head_kv += params->nth) {
        fetch_head(args, head_kv, (char *)params->wdata + params->ith * n_key(args));
    }
}
