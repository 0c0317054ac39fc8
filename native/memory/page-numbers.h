// Numbers of pages: which are free, which are held, by how many sequences. The pool's tensors are the memory's
// business.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

class lctx_page_numbers {
  public:
    explicit lctx_page_numbers(int32_t n_total = 0) : n_total(n_total) {}

    // A free page with one owner; -1 when there is none. Of those freed before, the last first: its memory is still
    // there. Of cold ones the first.
    int32_t take();

    // One more owner; the page must not be written to then.
    void share(int32_t page) { pages[page].n_owner++; }

    // One owner less; free without any.
    void give_back(int32_t page);

    // The memory of all free pages but n_keep is not needed: f(first, end) for runs of free pages, which are cold then.
    // A run takes in up to n_reach neighbours on each side that were cold before: together they may fill what none of
    // them fills.
    void cool(int32_t n_keep, int32_t n_reach, const std::function<void(int32_t, int32_t)> & f);

    // Free pages that share an aligned run of n_run pages with one that is held: where a run is given back as a whole,
    // they are not.
    int32_t n_stuck(int32_t n_run) const;

    // Held pages leave the end: each goes to the first free page while there is one before it and n_keep more. f(from,
    // to) copies a page; false when it cannot, and then this page and all after it stay. Free pages that were moved
    // from are warm, and are to be cooled next.
    void pack(int32_t n_keep, const std::function<bool(int32_t, int32_t)> & f);

    int32_t n_owner(int32_t page) const { return pages[page].n_owner; }
    bool is_shared(int32_t page) const { return n_owner(page) > 1; }
    int32_t n_free() const { return n_total - n_held(); }
    int32_t n_held() const { return (int32_t)(pages.size() - warm.size() - cold.size()); }

  private:
    struct page {
        int32_t n_owner;
        bool is_cold;  // free, and its memory was given back
    };

    int32_t n_total;
    std::vector<page> pages;          // that were ever taken
    std::vector<int32_t> warm, cold;  // free ones; of cold ones the last first
};
