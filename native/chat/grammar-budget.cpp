#include "grammar-budget.h"

#include "../hooks.h"
#include "grammar.h"

#include <time.h>

#include <algorithm>

namespace {

constexpr double MOST = 1.0;                      // seconds that a token can take
constexpr double REFILL = 0.25;                   // seconds that every token gives back
constexpr size_t MAX_ELEMENTS = (size_t)1 << 25;  // 256 MiB of parser stacks
constexpr size_t LOOK = 4096;

thread_local lctx_grammar_budget * current = nullptr;

// Of this thread's work: a machine that is busy with something else makes no grammar fail.
double now() {
    timespec time = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

}  // namespace

lctx_grammar_budget::use::use(lctx_grammar_budget & budget) : outer(current) {
    current = &budget;
    budget.begun = now();
    budget.n_elements = budget.n_unseen = 0;
}

lctx_grammar_budget::use::~use() {
    current->left -= now() - current->begun;
    current = outer;
}

void lctx_grammar_budget::refill() {
    left = std::min(MOST, left + REFILL);
}

void lctx_grammar_budget::spend(size_t n) {
    n_elements += n + 1;
    n_unseen += n + 1;
    if (n_elements > MAX_ELEMENTS) {
        throw lctx_grammar_slow("the grammar is too ambiguous: what may come next takes too much memory to find out");
    }
    if (n_unseen > LOOK) {
        n_unseen = 0;
        if (now() - begun > left) {
            throw lctx_grammar_slow(
                "the grammar is too ambiguous: what may come next takes more than a second to find out");
        }
    }
}

void lctx_grammar_step(size_t n) {
    if (current) {
        current->spend(n);
    }
}
