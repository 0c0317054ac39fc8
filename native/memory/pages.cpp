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

void lctx_pages::cool(int32_t n_keep, int32_t n_reach, const std::function<void(int32_t, int32_t)> & f) {
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
    const auto is_cold = [&](int32_t page) { return page >= 0 && page < (int32_t)pages.size() && pages[page].is_cold; };
    for (size_t i = 0; i < fresh.size();) {
        int32_t first = fresh[i], end = first;
        for (; i < fresh.size() && fresh[i] == end; i++) {
            end++;
        }
        for (int32_t n = 0; n < n_reach && is_cold(first - 1); n++) {
            first--;
        }
        for (int32_t n = 0; n < n_reach && is_cold(end); n++) {
            end++;
        }
        f(first, end);
    }
    cold.insert(cold.end(), fresh.begin(), fresh.end());
}
