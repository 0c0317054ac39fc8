#include "pages.h"

int32_t lctx_pages::take() {
    if (!free_list.empty()) {
        const int32_t page = free_list.back();
        free_list.pop_back();
        return page;
    }
    return n_fresh < n_total ? n_fresh++ : -1;
}

void lctx_pages::give_back(int32_t page) {
    free_list.push_back(page);
}
