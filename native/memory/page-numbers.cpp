#include "page-numbers.h"

#include <algorithm>
#include <cstddef>
#include <functional>

int32_t lctx_page_numbers::take() {
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
    return page;
}

void lctx_page_numbers::give_back(int32_t page) {
    if (--pages[page].n_owner == 0) {
        warm.push_back(page);
    }
}

void lctx_page_numbers::cool(int32_t n_keep, int32_t n_reach, const std::function<void(int32_t, int32_t)> & f) {
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
    const auto n_before = (std::ptrdiff_t)cold.size();
    cold.insert(cold.end(), fresh.rbegin(), fresh.rend());
    std::inplace_merge(cold.begin(), cold.begin() + n_before, cold.end(), std::greater<>());
}

int32_t lctx_page_numbers::n_stuck(int32_t n_run) const {
    const auto n_all = (int32_t)pages.size();
    int32_t n = 0;
    for (int32_t first = 0; first < n_all; first += n_run) {
        const int32_t end = std::min(n_all, first + n_run);
        const auto n_free = (int32_t)std::count_if(pages.begin() + first, pages.begin() + end,
                                                   [](const page & p) { return p.n_owner == 0; });
        n += n_free < end - first ? n_free : 0;
    }
    return n;
}

void lctx_page_numbers::pack(int32_t n_keep, const std::function<bool(int32_t, int32_t)> & f) {
    const auto n_all = (int32_t)pages.size();
    int32_t to = 0;
    for (int32_t from = std::min(n_all, n_held() + n_keep); from < n_all; from++) {
        if (pages[from].n_owner == 0) {
            continue;
        }
        while (pages[to].n_owner > 0) {
            to++;
        }
        if (!f(from, to)) {
            break;
        }
        pages[to] = pages[from];
        pages[from] = {0, false};
    }
    warm.clear();
    cold.clear();
    for (int32_t page = n_all - 1; page >= 0; page--) {
        if (pages[page].n_owner == 0) {
            (pages[page].is_cold ? cold : warm).push_back(page);
        }
    }
}
