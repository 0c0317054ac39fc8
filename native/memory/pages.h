// Numbers of pages: which are free, which are held, by how many sequences. The pool's tensors are the memory's business.
#pragma once

#include <cstdint>
#include <vector>

class lctx_pages {
  public:
    explicit lctx_pages(int32_t n_total = 0) : n_total(n_total) {}

    // A free page with one owner, the one freed last first so that touched memory is used again; -1 when there is none.
    int32_t take();

    // One more owner; nobody may write to the page then.
    void share(int32_t page) { n_owner[page]++; }

    // One owner less; free without any.
    void give_back(int32_t page);

    bool is_shared(int32_t page) const { return n_owner[page] > 1; }
    int32_t n_free() const { return n_total - n_held(); }
    int32_t n_held() const { return n_touched() - (int32_t)free_list.size(); }
    int32_t n_touched() const { return (int32_t)n_owner.size(); }

  private:
    int32_t n_total;
    std::vector<int32_t> n_owner;  // of every page that was ever taken
    std::vector<int32_t> free_list;
};
