#include "pages.h"

int32_t lctx_pages::take() {
    int32_t page = -1;
    if (!free_list.empty()) {
        page = free_list.back();
        free_list.pop_back();
        n_owner[page] = 1;
    } else if (n_touched() < n_total) {
        page = n_touched();
        n_owner.push_back(1);
    }
    return page;
}

void lctx_pages::give_back(int32_t page) {
    if (--n_owner[page] == 0) {
        free_list.push_back(page);
    }
}
