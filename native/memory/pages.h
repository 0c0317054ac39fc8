// Numbers of pages: which are free, how many are held. The pool's tensors are the memory's business.
#pragma once

#include <cstdint>
#include <vector>

class lctx_pages {
  public:
    explicit lctx_pages(int32_t n_total = 0) : n_total(n_total) {}

    // A free page, the one freed last first so that touched memory is used again; -1 when there is none.
    int32_t take();

    void give_back(int32_t page);

    int32_t n_free() const { return n_total - n_held(); }
    int32_t n_held() const { return n_fresh - (int32_t)free_list.size(); }
    int32_t n_touched() const { return n_fresh; }

  private:
    int32_t n_total;
    int32_t n_fresh = 0;  // pages that were ever taken are 0 .. n_fresh - 1
    std::vector<int32_t> free_list;
};
