#include "emulate.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <map>
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

// What a lane has of a product of a group of warps.
struct product {
    float * d;
    int n_sum;
    lctx_gift a[WARP];  // of all lanes
    uint64_t b;         // descriptor
    bool transposed, adds;
    int group;
    uint64_t read;  // a sum over the numbers that b had when it began
};

struct fiber {
    std::unique_ptr<char[]> stack{new char[STACK]};
    jmp_buf at;
    wait waits = NOTHING;
    int n_exchange = 0;
    int group = 0;
    std::vector<copy> copies;  // on their way
    int product_group = 0;
    std::vector<product> products;               // on their way
    std::map<float *, std::vector<float>> sums;  // of these
    bool begins = false;                         // products may follow
    bool is_seen = true;                         // by products: copies that arrived
};

// Holds the block of threads that runs now. One grid runs at a time: tests share this.
struct block {
    const std::function<void()> * kernel;
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<lctx_gift> gifts;  // [2][n_thread]
    std::vector<uint4> shared;
    int n_thread = 0;
    int now = 0;
    bool is_seen = true;  // by products: copies that arrived before a barrier
    jmp_buf scheduler;
} blk;

std::mutex one_grid;

// What the threads of a grid did, and where it is written: a line of JSON per launch in the file that LCTX_EMULATED_LOG
// names, so that tests hold the work of kernels against formulas.
struct work {
    int64_t barriers = 0;  // of blocks
    int64_t copied = 0;    // bytes that went to shared memory on their way
    int64_t products = 0;  // of warps, of f16 matrices
    int64_t grouped = 0;   // of these, those of groups of warps
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
    fprintf(log, "\"barriers\": %lld, \"copied\": %lld, \"products\": %lld, \"grouped\": %lld}\n",
            (long long)done.barriers, (long long)done.copied, (long long)done.products, (long long)done.grouped);
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
        f.product_group = 0, f.begins = false, f.is_seen = true;
    }
    blk.is_seen = true;
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
        GGML_ASSERT(blk.fibers[i]->products.empty() && "a product was never waited for");
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

// Element (row, k) of a left factor of 16 x 16 numbers: a[i] of lane 4 g + t has row g + 8 (i % 2), columns 2 t + 8 (i
// / 2), + 1.
float left_element(const lctx_gift * all, int row, int k) {
    return lctx_from_half(element<uint16_t>(all[row % 8 * 4 + k % 8 / 2], 2 * (row / 8 + 2 * (k / 8)) + k % 2));
}

// Element (k, column) of a right factor that a descriptor tells. Its layout is a swizzle of 128 bytes, by addresses of
// shared memory: of eight rows of 128 bytes that begin at a multiple of 1024, row i has unit j of 16 bytes at j ^ i.
uint16_t described_element(uint64_t b, bool transposed, int k, int column) {
    constexpr int PANEL = 64, EIGHT = 8, ROW = 128, UNIT = 16;
    const auto field = [&](int bit) { return (uint32_t)(b >> bit & 0x3fff) * 16; };
    const uint32_t first = field(0), next_panel = field(16), next_eight = field(32);
    const uint32_t plain = transposed ? column / PANEL * next_panel + k / EIGHT * next_eight + k % EIGHT * ROW +
                                            column % PANEL * (int)sizeof(uint16_t)
                                      : column / EIGHT * next_eight + column % EIGHT * ROW + k * sizeof(uint16_t);
    const uint32_t at = (first + plain) ^ (first + plain) / ROW % EIGHT * UNIT;
    GGML_ASSERT(at + sizeof(uint16_t) <= blk.shared.size() * sizeof(uint4) && "a product reads beyond shared memory");
    uint16_t half;
    memcpy(&half, (const char *)blk.shared.data() + at, sizeof(half));
    return half;
}

uint64_t read_by(const product & p) {
    uint64_t sum = 0;
    for (int k = 0; k < 16; k++) {
        for (int column = 0; column < 2 * p.n_sum; column++) {
            sum = sum * 31 + described_element(p.b, p.transposed, k, column);
        }
    }
    return sum;
}

void multiply(const product & p, std::vector<float> & sums) {
    const int g = blk.now % WARP / 4, t = blk.now % 4;
    for (int i = 0; i < p.n_sum; i++) {
        float sum = p.adds ? sums[i] : 0.0f;
        for (int k = 0; k < 16; k++) {
            sum += left_element(p.a, g + 8 * (i % 4 / 2), k) *
                   lctx_from_half(described_element(p.b, p.transposed, k, i / 4 * 8 + 2 * t + i % 2));
        }
        sums[i] = sum;
    }
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

char * lctx_shared_panels() {
    return lctx_shared();
}

void __syncthreads() {
    blk.is_seen = blk.is_seen && self().is_seen;
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
            self().is_seen = false;
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
    // b[i] of lane 4 g + t: rows 2 t + 8 i, + 1, column g
    const auto b_at = [&](int k, int column) {
        return lctx_from_half(element<uint16_t>(all[column * 4 + k % 8 / 2], 8 + 2 * (k / 8) + k % 2));
    };
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) {
            c[i] += left_element(all, g + 8 * (i / 2), k) * b_at(k, 2 * t + i % 2);
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

uint32_t lctx_shared_address(const void * at) {
    const size_t address = (size_t)((const char *)at - (const char *)blk.shared.data());
    GGML_ASSERT(address < blk.shared.size() * sizeof(uint4));
    return (uint32_t)address;
}

void lctx_group_begin() {
    self().begins = true;
}

void lctx_group_end() {
    self().product_group++;
}

void lctx_group_sees_copies() {
    self().is_seen = true;
}

void lctx_group_mma_of(float * d, int n_sum, const uint32_t (&a)[4], uint64_t b, bool transposed, bool adds) {
    constexpr int PER_PRODUCT = 4;  // sums that a lane has of one of 16 x 8
    GGML_ASSERT(self().begins && "a product does not know what registers have");
    GGML_ASSERT(blk.is_seen && self().is_seen && "a product does not see what was copied");
    GGML_ASSERT(b >> 62 == 1 && (b >> 49 & 7) == 0 && "a descriptor of another layout");
    product p = {d, n_sum, {}, b, transposed, adds, self().product_group, 0};
    const lctx_gift * all = lctx_exchange(a, sizeof(a));
    std::copy(all, all + WARP, p.a);
    if (blk.now % WARP == 0) {
        done.products += n_sum / PER_PRODUCT, done.grouped += n_sum / PER_PRODUCT;
        p.read = read_by(p);
    }
    self().sums.try_emplace(d, d, d + n_sum);
    std::fill_n(d, n_sum, NAN);
    self().products.push_back(p);
}

void lctx_group_wait_for(int n_group) {
    fiber & f = self();
    std::vector<product> later;
    for (const product & p : f.products) {
        if (p.group < f.product_group - n_group) {
            GGML_ASSERT((blk.now % WARP != 0 || p.read == read_by(p)) && "a tile changed while a product read it");
            multiply(p, f.sums.at(p.d));
        } else {
            later.push_back(p);
        }
    }
    f.products = std::move(later);
    f.begins = false;
    for (auto sums = f.sums.begin(); sums != f.sums.end();) {
        const auto is_on_its_way = [&](const product & p) { return p.d == sums->first; };
        if (std::none_of(f.products.begin(), f.products.end(), is_on_its_way)) {
            std::copy(sums->second.begin(), sums->second.end(), sums->first);
            sums = f.sums.erase(sums);
        } else {
            ++sums;
        }
    }
}
