// The threads of the CPU backend: pools that graphs borrow, and barriers that give cores away. Instead of OpenMP, whose
// threads spin for as long as they wait, take cores from other processes and do not outlive a fork.
#include "ggml-cpu.h"
#include "native/hooks.h"
#include "native/platform/system.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace {

// A thread looks this long before it sleeps. For work, in ggml's unit of 128k looks: longer than what lies between two
// tokens. At a barrier, in looks: longer than most threads are apart, shorter than it takes to be woken.
constexpr uint32_t POLL = 1;
constexpr int N_LOOK = 2048;

struct pool {
    ggml_threadpool * threads;
    int n;
    bool is_lent;
};

ggml_threadpool * create(int n) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n);
    params.poll = POLL;
    return ggml_threadpool_new(&params);
}

// The pools of the process. They stay until it ends.
struct lender {
    std::mutex mutex;
    std::vector<pool> pools;

    // An idle pool of n threads, or a new one. Not one of more: those that have nothing to do would look for work all
    // the same, and take the cores of those that have.
    ggml_threadpool * lend(int n) {
        const std::lock_guard<std::mutex> lock(mutex);
        auto it = std::find_if(pools.begin(), pools.end(), [n](const pool & p) { return !p.is_lent && p.n == n; });
        if (it == pools.end()) {
            it = pools.insert(it, {create(n), n, false});
        }
        it->is_lent = true;
        return it->threads;
    }
    void take_back(const ggml_threadpool * threads) {
        const std::lock_guard<std::mutex> lock(mutex);
        for (pool & p : pools) {
            p.is_lent = p.is_lent && p.threads != threads;
        }
    }
};

lender & threads_of_process() {
    static lender * l = [] {
        // the threads of a process do not exist in its fork
        const auto lock = [] { threads_of_process().mutex.lock(); };
        const auto unlock = [] { threads_of_process().mutex.unlock(); };
        const auto forget = [] { threads_of_process().pools.clear(), threads_of_process().mutex.unlock(); };
        lctx_at_fork(lock, unlock, forget);
        return new lender;  // never deleted: threads may compute while the process ends
    }();
    return *l;
}

// No exception goes through ggml's C: without memory for a pool the process ends here, as it does without memory for a
// graph.
ggml_threadpool * lend(int n) noexcept {
    return threads_of_process().lend(n);
}

void take_back(const ggml_threadpool * threads) noexcept {
    threads_of_process().take_back(threads);
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

}  // namespace

ggml_threadpool * lctx_threads_begin(ggml_threadpool * own, int n) {
    return own ? own : lend(n);
}

void lctx_threads_end(ggml_threadpool * own, ggml_threadpool * used) {
    if (!own) {
        take_back(used);
    }
}

void lctx_barrier_wait(int * n_passed, int before) {
    const std::atomic_ref<int> passed(*n_passed);
    for (int i = 0; i < N_LOOK; i++) {
        if (passed.load(std::memory_order_relaxed) != before) {
            return;
        }
        relax();
    }
    passed.wait(before, std::memory_order_relaxed);
}

void lctx_barrier_open(int * n_passed) {
    std::atomic_ref<int>(*n_passed).notify_all();
}
