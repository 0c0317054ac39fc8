#include "emulate.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ucontext.h>

dim3 gridDim, blockIdx, blockDim, threadIdx;

namespace {

constexpr size_t STACK = 128 * 1024;
constexpr int WARP = 32;

enum wait { NOTHING, WARP_BARRIER, BLOCK_BARRIER, OVER };

struct copy {
    void * to;
    const void * from;
    int group;
};

struct fiber {
    std::unique_ptr<char[]> stack{new char[STACK]};
    jmp_buf at;
    wait waits = NOTHING;
    int n_exchange = 0;
    int group = 0;
    std::vector<copy> copies;  // on their way
};

// Holds the block of threads that runs now. One grid runs at a time: tests share this.
struct block {
    const std::function<void()> * kernel;
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<lctx_gift> gifts;  // [2][n_thread]
    std::vector<uint4> shared;
    int n_thread = 0;
    int now = 0;
    jmp_buf scheduler;
} blk;

std::mutex one_grid;

// What the threads of a grid did, and where it is written: a line of JSON per launch in the file that LCTX_EMULATED_LOG
// names, so that tests hold the work of kernels against formulas.
struct work {
    int64_t barriers = 0;  // of blocks
    int64_t copied = 0;    // bytes that went to shared memory on their way
    int64_t products = 0;  // of warps, of f16 matrices
    int64_t begins = 0;    // threads that called lctx_begin
};

work done;
thread_local std::string name;

void write_work(dim3 grid, int n_thread, size_t n_shared) {
    const char * path = getenv("LCTX_EMULATED_LOG");
    FILE * log = path ? fopen(path, "a") : nullptr;
    if (!log) {
        return;
    }
    fprintf(log, "{\"kernel\": \"%s\", \"blocks\": [%u, %u, %u], \"threads\": %d, \"shared\": %zu, ", name.c_str(),
            grid.x, grid.y, grid.z, n_thread, n_shared);
    fprintf(log, "\"barriers\": %lld, \"copied\": %lld, \"products\": %lld}\n", (long long)done.barriers,
            (long long)done.copied, (long long)done.products);
    fclose(log);
}

// One lane counts for its warp.
void count(int64_t & n) {
    n += blk.now % WARP == 0;
}

fiber & self() {
    return *blk.fibers[blk.now];
}

// Back to the scheduler until the barrier is reached by all it concerns.
void pause(wait why) {
    self().waits = why;
    if (_setjmp(self().at) == 0) {
        _longjmp(blk.scheduler, 1);
    }
}

void enter() {
    (*blk.kernel)();
    self().waits = OVER;
    _longjmp(blk.scheduler, 1);
}

// A new stack needs makecontext; afterwards jumps are enough.
void start(fiber & f) {
    static ucontext_t context, unused;
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack.get();
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    swapcontext(&unused, &context);
}

void run(int i, bool is_new) {
    blk.now = i;
    threadIdx = dim3((unsigned)i, 0, 0);
    if (_setjmp(blk.scheduler) == 0) {
        if (is_new) {
            start(*blk.fibers[i]);
        }
        _longjmp(blk.fibers[i]->at, 1);
    }
}

// Let threads [first, end) continue if they all wait for `why`.
bool release(int first, int end, wait why) {
    for (int i = first; i < end; i++) {
        if (blk.fibers[i]->waits != why) {
            return false;
        }
    }
    for (int i = first; i < end; i++) {
        blk.fibers[i]->waits = NOTHING;
    }
    return true;
}

bool release_any() {
    bool any = release(0, blk.n_thread, BLOCK_BARRIER);
    done.barriers += any;
    for (int first = 0; first < blk.n_thread; first += WARP) {
        any |= release(first, first + WARP, WARP_BARRIER);
    }
    return any;
}

void run_block(std::mt19937 & random) {
    std::vector<int> order(blk.n_thread);
    std::iota(order.begin(), order.end(), 0);
    memset((void *)blk.shared.data(), 0xff, blk.shared.size() * sizeof(uint4));
    memset((void *)blk.gifts.data(), 0xff, blk.gifts.size() * sizeof(lctx_gift));
    for (int i = 0; i < blk.n_thread; i++) {
        fiber & f = *blk.fibers[i];
        f.waits = NOTHING, f.n_exchange = 0, f.group = 0;
        f.copies.clear();
    }
    bool is_new = true;
    do {
        std::shuffle(order.begin(), order.end(), random);
        for (int i : order) {
            if (blk.fibers[i]->waits == NOTHING) {
                run(i, is_new);
            }
        }
        is_new = false;
    } while (release_any());
    for (int i = 0; i < blk.n_thread; i++) {
        GGML_ASSERT(blk.fibers[i]->waits == OVER && "threads of a block wait at different barriers");
        GGML_ASSERT(blk.fibers[i]->copies.empty() && "a copy was never waited for");
    }
}

// Element i of what a lane gave, as T.
template <typename T> T element(const lctx_gift & gift, int i) {
    T x;
    memcpy(&x, gift.bytes + i * sizeof(T), sizeof(T));
    return x;
}

// x of row `at` of matrix m, whose row address came from lane 8 m + at.
uint16_t matrix_element(const lctx_gift * rows, int m, int at, int x) {
    uint16_t half;
    memcpy(&half, (const char *)element<uintptr_t>(rows[8 * m + at], 0) + x * sizeof(half), sizeof(half));
    return half;
}

}  // namespace

size_t lctx_emulated_shared() {
    const char * kib = getenv("LCTX_EMULATED_SHARED");
    return (size_t)(kib ? atoi(kib) : 163) * 1024;
}

void lctx_emulated_name(const char * words) {
    name.assign(words, strcspn(words, "<,"));
}

void lctx_emulate(const std::function<void()> & kernel, dim3 grid, int n_thread, size_t n_shared) {
    GGML_ASSERT(n_thread % WARP == 0 && n_thread <= 1024 && grid.y < 65536 && grid.z < 65536);
    GGML_ASSERT(n_shared <= lctx_emulated_shared() && "a block asks for more shared memory than there is");
    const std::lock_guard<std::mutex> lock(one_grid);
    static std::mt19937 random(1);
    while ((int)blk.fibers.size() < n_thread) {
        blk.fibers.push_back(std::make_unique<fiber>());
    }
    done = {};
    blk.kernel = &kernel;
    blk.n_thread = n_thread;
    blk.gifts.resize(2 * (size_t)n_thread);
    blk.shared.resize((n_shared + sizeof(uint4) - 1) / sizeof(uint4));
    gridDim = grid;
    blockDim = dim3((unsigned)n_thread);
    std::vector<int64_t> order((size_t)grid.x * grid.y * grid.z);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t i : order) {
        blockIdx = dim3((unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y));
        run_block(random);
    }
    GGML_ASSERT(done.begins == (int64_t)order.size() * n_thread && "a kernel does not begin with lctx_begin");
    write_work(grid, n_thread, n_shared);
}

void lctx_begin() {
    done.begins++;
}

char * lctx_shared() {
    return (char *)blk.shared.data();
}

void __syncthreads() {
    pause(BLOCK_BARRIER);
}

// Two sets of gifts: a thread at the next exchange cannot overwrite what is still read, and no thread is two exchanges
// ahead.
const lctx_gift * lctx_exchange(const void * data, size_t size) {
    GGML_ASSERT(size <= sizeof(lctx_gift));
    lctx_gift * gifts = blk.gifts.data() + (self().n_exchange++ % 2) * blk.n_thread;
    if (size > 0) {
        memcpy(gifts[blk.now].bytes, data, size);
    }
    pause(WARP_BARRIER);
    return gifts + blk.now / WARP * WARP;
}

void lctx_copy_16_or_zeros(void * to, const void * from) {
    GGML_ASSERT((uintptr_t)to % 16 == 0 && (uintptr_t)from % 16 == 0);
    self().copies.push_back({to, from, self().group});
    done.copied += from ? 16 : 0;
}

void lctx_copy_16(void * to, const void * from) {
    GGML_ASSERT(from != nullptr);
    lctx_copy_16_or_zeros(to, from);
}

void lctx_copy_end_group() {
    self().group++;
}

void lctx_copy_wait_for(int n_group) {
    std::vector<copy> later;
    for (const copy & c : self().copies) {
        if (c.group < self().group - n_group) {
            c.from ? memcpy(c.to, c.from, 16) : memset(c.to, 0, 16);
        } else {
            later.push_back(c);
        }
    }
    self().copies = std::move(later);
}

void lctx_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    count(done.products);
    const uint32_t ab[] = {a[0], a[1], a[2], a[3], b0, b1};
    const lctx_gift * all = lctx_exchange(ab, sizeof(ab));
    const int g = blk.now % WARP / 4, t = blk.now % 4;
    // a[i] of lane 4 g + t: row g + 8 (i % 2), columns 2 t + 8 (i / 2), + 1; b[i]: rows 2 t + 8 i, + 1, column g
    const auto a_at = [&](int row, int k) {
        return lctx_from_half(element<uint16_t>(all[row % 8 * 4 + k % 8 / 2], 2 * (row / 8 + 2 * (k / 8)) + k % 2));
    };
    const auto b_at = [&](int k, int column) {
        return lctx_from_half(element<uint16_t>(all[column * 4 + k % 8 / 2], 8 + 2 * (k / 8) + k % 2));
    };
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) {
            c[i] += a_at(g + 8 * (i / 2), k) * b_at(k, 2 * t + i % 2);
        }
    }
}

void lctx_mma_halves(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float sums[4];
    for (int i = 0; i < 4; i++) {
        sums[i] = lctx_from_half((uint16_t)(c[i / 2] >> i % 2 * 16));
    }
    lctx_mma(sums, a, b0, b1);
    c[0] = lctx_pack(sums[0], sums[1]), c[1] = lctx_pack(sums[2], sums[3]);
}

void lctx_mma_bytes(int (&d)[4], const uint4 & a, uint32_t b0, uint32_t b1, const int (&c)[4]) {
    const uint32_t ab[] = {a.x, a.y, a.z, a.w, b0, b1};
    const lctx_gift * all = lctx_exchange(ab, sizeof(ab));
    const int g = blk.now % WARP / 4, t = blk.now % 4;
    int sum[4];
    for (int i = 0; i < 4; i++) {
        sum[i] = c[i];
        for (int k = 0; k < 32; k++) {
            const int lane = k % 16 / 4, half = k / 16, column = 2 * t + i % 2;
            sum[i] += element<int8_t>(all[4 * g + lane], 4 * (i / 2 + 2 * half) + k % 4) *
                      element<int8_t>(all[4 * column + lane], 4 * (4 + half) + k % 4);
        }
    }
    std::copy(sum, sum + 4, d);
}

void lctx_load_matrices(uint32_t (&r)[4], const void * row) {
    const lctx_gift * rows = lctx_exchange(&row, sizeof(row));
    const int g = blk.now % WARP / 4, t = blk.now % 4;
    for (int m = 0; m < 4; m++) {
        r[m] = matrix_element(rows, m, g, 2 * t) | (uint32_t)matrix_element(rows, m, g, 2 * t + 1) << 16;
    }
}

void lctx_load_transposed(uint32_t (&r)[4], const void * row) {
    const lctx_gift * rows = lctx_exchange(&row, sizeof(row));
    const int g = blk.now % WARP / 4, t = blk.now % 4;
    for (int m = 0; m < 4; m++) {
        r[m] = matrix_element(rows, m, 2 * t, g) | (uint32_t)matrix_element(rows, m, 2 * t + 1, g) << 16;
    }
}
