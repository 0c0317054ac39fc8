// *fetch*: bring the units that the batch reads close, those that were read in fewer of the last batches making room.
// One block of threads per KV head decides, then one launch copies all units of the layer; where they come from may be
// memory of the host that the device can read.
#include "../ops/cache.h"
#include "expand.h"
#include "kernels.h"

namespace {

constexpr int THREADS = 128;

// Lists what a head copies: jobs[head] = number, then (frame, key) of each.
struct jobs {
    int32_t * data;
    int n_staged;

    LCTX_HD int64_t size() const { return 1 + 2 * (int64_t)n_staged; }
    LCTX_HD int32_t & n(int head) const { return data[head * size()]; }
    LCTX_HD int32_t * job(int head, int i) const { return data + head * size() + 1 + 2 * i; }
};

struct bits {
    unsigned * words;

    LCTX_HD static int n_word(int n) { return (int)lctx_div_up(n, 32); }
    __device__ bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
    __device__ void add(int i) const { atomicOr(&words[i / 32], 1u << i % 32); }
    // n of them, which are in one word.
    __device__ void remove(int i, int n) const { atomicAnd(&words[i / 32], ~(((1u << n) - 1) << i % 32)); }
};

struct head {
    const lctx_fetch_args & a;
    const jobs & out;
    int index;
    lctx_staging r;
    bits pages;  // that runs read
    bits units;  // that are read in addition to these
    bits found;  // of these pages
    int * sums;  // of lctx_block_scan
};

__device__ void mark(const head & h) {
    const lctx_fetch_args & a = h.a;
    const int n_choice = a.n_choice / a.n_head_kv;
    for (int64_t i = threadIdx.x; i < (int64_t)a.n_tokens * n_choice * a.n_seg; i += THREADS) {
        const int64_t token = i / (n_choice * a.n_seg), at = i % (n_choice * a.n_seg);
        const lctx_segment s = a.segs[(token * a.n_choice + h.index * n_choice) * a.n_seg + at];
        const bool is_run = at % a.n_seg < a.params.n_run;
        const int shift = is_run ? LCTX_PAGE_SHIFT : a.shift(), n = is_run ? a.n_page_max : a.n_page_max * a.of_page();
        for (int x = s.row0 >> shift; s.row0 < s.row1 && x <= (s.row1 - 1) >> shift; x++) {
            (is_run ? h.pages : h.units).add(s.seq * n + x);
        }
    }
    __syncthreads();
    for (int page = (int)threadIdx.x; page < a.n_seq * a.n_page_max; page += THREADS) {
        if (h.pages.has(page)) {
            h.units.remove(page * a.of_page(), a.of_page());
        }
    }
    __syncthreads();
}

// Find what is there already: it stays, and is not wanted any more. Units of a page that lie apart come again with it.
__device__ void find(const head & h) {
    const int n = h.a.of_page();
    for (int key = (int)threadIdx.x; key < h.a.n_key(); key += THREADS) {
        if (h.pages.has(key / n) || h.units.has(key)) {
            h.r.read(key);
        }
    }
    __syncthreads();
    for (int frame = (int)threadIdx.x * n; frame < h.r.n_staged; frame += THREADS * n) {
        const int page = h.r.has_page(frame, n) ? h.r.keys()[frame] / n : -1;
        const bool all = page >= 0 && h.pages.has(page);
        for (int i = frame; i < frame + n; i++) {
            const int key = h.r.keys()[i];
            if (!all && key >= 0 && h.pages.has(key / n)) {
                h.a.forget(h.index, key);
            } else if (all || (key >= 0 && h.units.has(key))) {
                h.units.remove(key, 1);
                atomicAdd(&h.r.n_hit(), 1);
            }
        }
        if (all) {
            h.found.add(page);
        }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < bits::n_word(h.a.n_seq * h.a.n_page_max); i += THREADS) {
        h.pages.words[i] &= ~h.found.words[i];
    }
    __syncthreads();
}

// put(number, i) for the i of n for which is(i), numbered from `first` on; returns the number that follows. All threads
// call.
template <typename Is, typename Put> __device__ int compact(const head & h, int n, int first, Is && is, Put && put) {
    for (int i0 = 0; i0 < n; i0 += THREADS) {
        const int i = i0 + (int)threadIdx.x;
        const bool goes = i < n && is(i);
        int all;
        const int at = lctx_block_scan(goes, h.sums, all);
        if (goes) {
            put(first + at, i);
        }
        first += all;
    }
    return first;
}

template <typename Is> __device__ int count(const head & h, int n, Is && is) {
    int mine = 0, all;
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        mine += is(i);
    }
    lctx_block_scan(mine, h.sums, all);
    return all;
}

// The same of what is in some bits, which are few.
template <typename F> __device__ void each_bit(unsigned word, int first, F && f) {
    for (; word != 0; word &= word - 1) {
        f(first + __popc((word & (~word + 1)) - 1));
    }
}

template <typename Is> __device__ int count(const head & h, const bits & of, int n, Is && is) {
    int mine = 0, all;
    for (int i = (int)threadIdx.x; i < bits::n_word(n); i += THREADS) {
        each_bit(of.words[i], 32 * i, [&](int x) { mine += is(x); });
    }
    lctx_block_scan(mine, h.sums, all);
    return all;
}

template <typename Is, typename Put>
__device__ int compact(const head & h, const bits & of, int n, int first, Is && is, Put && put) {
    for (int i0 = 0; i0 < bits::n_word(n); i0 += THREADS) {
        const int i = i0 + (int)threadIdx.x;
        const unsigned word = i < bits::n_word(n) ? of.words[i] : 0;
        int mine = 0, all;
        each_bit(word, 32 * i, [&](int x) { mine += is(x); });
        int at = first + lctx_block_scan(mine, h.sums, all);
        each_bit(word, 32 * i, [&](int x) {
            if (is(x)) {
                put(at++, x);
            }
        });
        first += all;
    }
    return first;
}

// Return the least x of [-1, most] for which is(x), which holds from there on, or `most`. All threads call.
template <typename Is> __device__ int first_of(int most, Is && is) {
    int least = -1;
    while (least < most) {
        const int middle = least + (most - least) / 2;
        const bool holds = is(middle);
        most = holds ? middle : most, least = holds ? least : middle + 1;
    }
    return least;
}

// What is missing, `step` units at a time, and the frames that may be left for it.
struct exchange {
    const head & h;
    const bits & missing;
    int step;

    __device__ int n_key() const { return h.a.n_key() / step; }
    __device__ int n_group() const { return h.r.n_staged / step; }
    __device__ int worth(int i) const { return step > 1 ? lctx_staging::MOST_WORTH : h.r.worth(i); }
    __device__ int worth_of_frames(int i) const { return h.r.worth_of_frames(i * step, step); }
    // Of those missing, how many are worth x or more, and how many groups of frames x or less, but are not read now.
    __device__ int n_missing(int x) const {
        return count(h, missing, n_key(), [&](int i) { return worth(i) >= x; });
    }
    __device__ int n_frames(int x) const {
        x = lctx_min(x, lctx_staging::MOST_WORTH - 1);
        return count(h, n_group(), [&](int i) { return worth_of_frames(i) <= x; });
    }
    // Return how many come: the worthiest of those missing take the frames that are worth least while these are not
    // worth more. The number is greatest where as many want to come as may.
    __device__ int n_coming() const {
        const int x = first_of(lctx_staging::MOST_WORTH, [&](int x) { return n_frames(x) >= n_missing(x); });
        const int at = lctx_min(n_frames(x), n_missing(x));
        return x >= 0 ? lctx_max(at, lctx_min(n_frames(x - 1), n_missing(x - 1))) : at;
    }
    // As jobs from number `base` on: the n groups of frames that are worth least.
    __device__ void choose_frames(int base, int n) const {
        const int x = first_of(lctx_staging::MOST_WORTH, [&](int x) { return n_frames(x) >= n; });
        const auto put = [&](int at, int i) {
            for (int unit = 0; at < n && unit < step; unit++) {
                h.out.job(h.index, base + at * step + unit)[0] = i * step + unit;
            }
        };
        const int less = compact(h, n_group(), 0, [&](int i) { return worth_of_frames(i) < x; }, put);
        compact(h, n_group(), less, [&](int i) { return worth_of_frames(i) == x; }, put);
    }
    // And the n worthiest of those missing; the others are read where they are.
    __device__ void choose_missing(int base, int n) const {
        const int x = first_of(lctx_staging::MOST_WORTH, [&](int x) { return n_missing(x + 1) < n; });
        const auto put = [&](int at, int i) {
            for (int unit = 0; unit < step; unit++) {
                const int key = i * step + unit;
                if (at < n) {
                    h.out.job(h.index, base + at * step + unit)[1] = key;
                } else {
                    h.a.forget(h.index, key);
                    h.a.entry(h.index, key) = h.a.far_unit(h.index, key);
                }
            }
        };
        const int more = compact(h, missing, n_key(), 0, [&](int i) { return worth(i) > x; }, put);
        const int equal = compact(h, missing, n_key(), more, [&](int i) { return worth(i) == x; }, put);
        compact(h, missing, n_key(), equal, [&](int i) { return worth(i) < x; }, put);
    }
};

// The jobs from number `base` on: who was there goes, then the others come.
__device__ void settle(const head & h, int base, int n) {
    const lctx_fetch_args & a = h.a;
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        const int32_t * job = h.out.job(h.index, base + i);
        const int32_t there = h.r.keys()[job[0]];
        if (there >= 0) {
            a.forget(h.index, there);
        }
        a.forget(h.index, job[1]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        const int32_t * job = h.out.job(h.index, base + i);
        a.entry(h.index, job[1]) = a.near_unit(h.index, job[0]);
        h.r.keys()[job[0]] = job[1];
    }
}

// Bring what is missing, `step` units at a time; all threads call.
__device__ void bring(const head & h, const bits & missing, int step) {
    const exchange e = {h, missing, step};
    const int base = h.out.n(h.index), n_missing = e.n_missing(0);
    if (n_missing == 0) {
        return;
    }
    const int n = e.n_coming();
    if (n > 0) {
        e.choose_frames(base, n);
    }
    e.choose_missing(base, n);
    __syncthreads();
    settle(h, base, n * step);
    if (threadIdx.x == 0) {
        h.out.n(h.index) += n * step;
        h.r.n_miss() += n * step;
        h.r.n_far() += (n_missing - n) * step;
    }
    __syncthreads();
}

__global__ void decide(const lctx_fetch_args a, const jobs out) {
    lctx_begin();
    __shared__ int sums[LCTX_WARP];
    const int index = (int)blockIdx.x, n_page = bits::n_word(a.n_seq * a.n_page_max), n_unit = bits::n_word(a.n_key()),
              n_word = 2 * n_page + n_unit;
    auto * words = (unsigned *)lctx_shared();
    const head h = {a, out, index, a.staging_of(index), {words}, {words + n_page}, {words + n_page + n_unit}, sums};
    for (int i = (int)threadIdx.x; i < n_word; i += THREADS) {
        words[i] = 0;
    }
    if (threadIdx.x == 0) {
        h.r.clock()++;
        out.n(index) = 0;
    }
    __syncthreads();
    mark(h);
    find(h);
    bring(h, h.pages, a.of_page());
    bring(h, h.units, 1);
}

__device__ void copy_unit(const lctx_pool_args & from, size_t from_unit, const lctx_pool_args & to, size_t to_unit,
                          int shift) {
    const size_t size = (from.row_size << shift) / sizeof(uint4);
    const uint4 * source = (const uint4 *)from.data + from_unit * size;
    uint4 * target = (uint4 *)to.data + to_unit * size;
    for (size_t i = threadIdx.x; i < size; i += blockDim.x) {
        target[i] = source[i];
    }
}

__global__ void copy(const lctx_fetch_args a, const jobs in) {
    lctx_begin();
    const int index = (int)blockIdx.y, number = (int)blockIdx.x / 2;
    if (number >= in.n(index)) {
        return;
    }
    const int32_t * job = in.job(index, number);
    const int32_t from = a.pool_unit(index, job[1]), to = a.near_unit(index, job[0]);
    if (blockIdx.x % 2 == 0) {
        copy_unit(a.all.k_pool, from, a.k_staged, to, a.shift());
    } else {
        copy_unit(a.all.v_pool, from, a.v_staged, to, a.shift());
    }
}

}  // namespace

size_t lctx_cuda_fetch_wsize(const lctx_cuda_device &, const lctx_fetch_args & args) {
    return lctx_expanded_size(args) + args.n_head_kv * jobs{nullptr, args.params.n_staged}.size() * sizeof(int32_t);
}

size_t lctx_cuda_fetch_shared(const lctx_fetch_args & args) {
    return (2 * bits::n_word(args.n_seq * args.n_page_max) + bits::n_word(args.n_key())) * sizeof(unsigned);
}

void lctx_cuda_fetch(const lctx_cuda_queue & queue, const lctx_fetch_args & args) {
    if (args.params.tiles.n_tile > 0) {
        return lctx_cuda_run_expanded(queue, args, lctx_cuda_fetch);
    }
    const jobs list = {(int32_t *)queue.work, args.params.n_staged};
    lctx_launch(decide, dim3(args.n_head_kv), THREADS, lctx_cuda_fetch_shared(args), queue.stream, args, list);
    lctx_launch(copy, dim3(2 * args.params.n_staged, args.n_head_kv), THREADS, 0, queue.stream, args, list);
}
