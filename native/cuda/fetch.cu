// *fetch*: bring the pages that the batch reads close, the least recently read ones making place. One block of threads per KV head decides,
// then one launch copies all pages of the layer; where they come from may be memory of the host that the device can read.
#include "../ops/cache.h"
#include "kernels.h"

namespace {

constexpr int THREADS = 128;

// What a head copies: jobs[head] = number, then (place, key) of each.
struct jobs {
    int32_t * data;
    int n_staged;

    LCTX_HD int64_t size() const { return 1 + 2 * (int64_t)n_staged; }
    LCTX_HD int32_t & n(int head) const { return data[head * size()]; }
    LCTX_HD int32_t * job(int head, int i) const { return data + head * size() + 1 + 2 * i; }
};

__device__ int32_t & entry(const lctx_fetch_args & a, int head_kv, int32_t key) {
    return a.table[key / a.n_page_max * a.all.table.seq_stride + head_kv * a.all.table.head_stride + key % a.n_page_max];
}

__device__ int32_t page_of(const lctx_fetch_args & a, int head_kv, int32_t key) {
    return lctx_page_of(a.all.table, key % a.n_page_max * LCTX_PAGE_ROWS, head_kv, key / a.n_page_max);
}

// The place that was not read for the longest time, the first of equals; -1 when all are read now. The lanes of a warp together.
__device__ int victim(const lctx_staging & r) {
    int64_t least = INT64_MAX;
    for (int place = lctx_lane(); place < r.n_staged; place += LCTX_WARP) {
        least = lctx_min(least, (int64_t)r.last_used()[place] << 32 | place);
    }
    least = lctx_warp_min(least);
    return (int32_t)(least >> 32) == r.clock() ? -1 : (int)(least & 0x7fffffff);
}

// Page `key` is wanted and not here: the lanes of a warp together.
__device__ void bring(const lctx_fetch_args & a, const jobs & out, const lctx_staging & r, int head_kv, int32_t key) {
    const int place = victim(r);
    if (lctx_lane() == 0 && place < 0) {
        entry(a, head_kv, key) = a.n_head_kv * a.n_staged + page_of(a, head_kv, key);
        r.n_far()++;
    } else if (lctx_lane() == 0) {
        if (r.keys()[place] >= 0) {
            entry(a, head_kv, r.keys()[place]) = -1;
        }
        entry(a, head_kv, key) = head_kv * a.n_staged + place;
        r.keys()[place] = key;
        r.last_used()[place] = r.clock();
        r.n_miss()++;
        int32_t * job = out.job(head_kv, out.n(head_kv)++);
        job[0] = place, job[1] = key;
    }
    lctx_sync_warp();
}

__global__ void decide(const lctx_fetch_args a, const jobs out) {
    const int head_kv = (int)blockIdx.x, n_word = (int)lctx_div_up((int64_t)a.n_seq * a.n_page_max, 32),
              n_choice = a.n_choice / a.n_head_kv;
    const lctx_staging r = {a.staging + head_kv * a.staging_stride, a.n_staged};
    auto * wanted = (unsigned *)lctx_shared();  // a bit for every key
    for (int i = (int)threadIdx.x; i < n_word; i += THREADS) {
        wanted[i] = 0;
    }
    if (threadIdx.x == 0) {
        r.clock()++;
        out.n(head_kv) = 0;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < (int64_t)a.n_tokens * n_choice * a.n_seg; i += THREADS) {
        const int64_t token = i / (n_choice * a.n_seg), at = i % (n_choice * a.n_seg);
        const lctx_segment s = a.segs[(token * a.n_choice + head_kv * n_choice) * a.n_seg + at];
        for (int block = s.row0 / LCTX_PAGE_ROWS; s.row0 < s.row1 && block * LCTX_PAGE_ROWS < s.row1; block++) {
            const int key = s.seq * a.n_page_max + block;
            atomicOr(&wanted[key / 32], 1u << key % 32);
        }
    }
    __syncthreads();
    for (int place = (int)threadIdx.x; place < r.n_staged; place += THREADS) {
        const int key = r.keys()[place];
        if (key >= 0 && (wanted[key / 32] >> key % 32 & 1)) {
            atomicAnd(&wanted[key / 32], ~(1u << key % 32));
            r.last_used()[place] = r.clock();
            atomicAdd(&r.n_hit(), 1);
        }
    }
    __syncthreads();
    if (lctx_warp() != 0) {
        return;
    }
    for (int word = 0; word < n_word; word++) {
        for (unsigned left = wanted[word]; left != 0; left &= left - 1) {
            bring(a, out, r, head_kv, word * 32 + lctx_first_bit(left));
        }
    }
}

__device__ void copy_page(const lctx_pool_args & from, size_t from_page, const lctx_pool_args & to, size_t to_page) {
    const size_t size = LCTX_PAGE_ROWS * from.row_size / sizeof(uint4);
    const uint4 * source = (const uint4 *)from.data + from_page * size;
    uint4 * target = (uint4 *)to.data + to_page * size;
    for (size_t i = threadIdx.x; i < size; i += blockDim.x) {
        target[i] = source[i];
    }
}

__global__ void copy(const lctx_fetch_args a, const jobs in) {
    const int head_kv = (int)blockIdx.y, index = (int)blockIdx.x / 2;
    if (index >= in.n(head_kv)) {
        return;
    }
    const int32_t * job = in.job(head_kv, index);
    const int32_t from = page_of(a, head_kv, job[1]), to = head_kv * a.n_staged + job[0];
    if (blockIdx.x % 2 == 0) {
        copy_page(a.all.k_pool, from, a.k_staged, to);
    } else {
        copy_page(a.all.v_pool, from, a.v_staged, to);
    }
}

}  // namespace

size_t lctx_cuda_fetch_wsize(const lctx_cuda_device &, const lctx_fetch_args & args) {
    return args.n_head_kv * jobs{nullptr, args.n_staged}.size() * sizeof(int32_t);
}

size_t lctx_cuda_fetch_shared(const lctx_fetch_args & args) {
    return lctx_div_up((int64_t)args.n_seq * args.n_page_max, 32) * sizeof(unsigned);
}

void lctx_cuda_fetch(const lctx_cuda_queue & queue, const lctx_fetch_args & args) {
    const jobs list = {(int32_t *)queue.work, args.n_staged};
    lctx_launch(decide, dim3(args.n_head_kv), THREADS, lctx_cuda_fetch_shared(args), queue.stream, args, list);
    lctx_launch(copy, dim3(2 * args.n_staged, args.n_head_kv), THREADS, 0, queue.stream, args, list);
}
