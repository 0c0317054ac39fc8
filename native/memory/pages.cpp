#include "pages.h"

#include <algorithm>

int32_t lctx_pages::take() {
    int32_t page = -1;
    for (std::vector<int32_t> * list : {&warm, &cold}) {
        if (page < 0 && !list->empty()) {
            page = list->back();
            list->pop_back();
            pages[page] = {1, false};
        }
    }
    if (page < 0 && (int32_t)pages.size() < n_total) {
        page = (int32_t)pages.size();
        pages.push_back({1, false});
    }
    peak = std::max(peak, n_held());
    return page;
}

void lctx_pages::give_back(int32_t page) {
    if (--pages[page].n_owner == 0) {
        warm.push_back(page);
    }
}

void lctx_pages::cool(int32_t n_keep, const std::function<void(int32_t, int32_t)> & f) {
    if ((int32_t)warm.size() <= n_keep) {
        return;
    }
    // the oldest go: what is taken next was freed last
    std::vector<int32_t> fresh(warm.begin(), warm.end() - n_keep);
    warm.erase(warm.begin(), warm.end() - n_keep);
    std::sort(fresh.begin(), fresh.end());
    for (int32_t page : fresh) {
        pages[page].is_cold = true;
    }
    // a run takes in the cold neighbours: together they may fill what none of them fills
    for (int32_t first : fresh) {
        if (first > 0 && pages[first - 1].is_cold && std::binary_search(fresh.begin(), fresh.end(), first - 1)) {
            continue;  // inside the run before
        }
        int32_t end = first + 1;
        first -= first > 0 && pages[first - 1].is_cold;
        while (end < (int32_t)pages.size() && pages[end].is_cold) {
            end++;
        }
        f(first, end);
    }
    cold.insert(cold.end(), fresh.begin(), fresh.end());
}
