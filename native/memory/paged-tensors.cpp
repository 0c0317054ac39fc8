#include "paged-tensors.h"

#include "../ops/ops.h"

#include <algorithm>
#include <utility>

constexpr int32_t MOST_STUCK = 32;  // one free page per this many held ones may keep its memory

ggml_tensor * lctx_paged_tensors::add_pool(const char * name, ggml_type type, int64_t n) {
    pools_.push_back(add(name, type, n, (int64_t)n_page_ * LCTX_PAGE_ROWS));
    return pools_.back();
}

void lctx_paged_tensors::clear_table() {
    const size_t n_entry = ggml_nelements(table);
    copy_.resize(is_host ? 0 : n_entry);
    table_ = is_host ? (int32_t *)table->data : copy_.data();
    std::fill_n(table_, n_entry, -1);
}

size_t lctx_paged_tensors::entry(int32_t seq, int32_t head, int32_t block) const {
    return ((size_t)seq * n_head + head) * table->ne[0] + block;
}

int32_t lctx_paged_tensors::page(int32_t seq, int32_t head, int32_t block) const {
    work_.n_table++;
    return table_[entry(seq, head, block)];
}

// The device need not know which pages were dropped: no row there is read again.
void lctx_paged_tensors::set_page(int32_t seq, int32_t head, int32_t block, int32_t page) {
    work_.n_table++;
    set_entry(entry(seq, head, block), page);
}

void lctx_paged_tensors::set_entry(size_t i, int32_t page) {
    table_[i] = page;
    if (!is_host && page >= 0) {
        changed_.push_back(i);
    }
}

// Entries that follow each other go together, and the same of heads that follow each other in one call. Graphs that run
// read what was there, those that follow what comes: the host does not wait.
void lctx_paged_tensors::upload_table() {
    if (changed_.empty()) {
        return;
    }
    is_idle_ = false;
    std::sort(changed_.begin(), changed_.end());
    changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
    const size_t n = changed_.size(), row = table->ne[0], size = sizeof(int32_t);
    for (size_t i = 0; i < n;) {
        const size_t first = changed_[i];
        size_t len = 1, n_head_alike = 1;
        while (i + len < n && changed_[i + len] == first + len) {
            len++;
        }
        const auto is_alike = [&](size_t from, size_t begin) {
            return from + len <= n && changed_[from] == begin && changed_[from + len - 1] == begin + len - 1;
        };
        while (is_alike(i + n_head_alike * len, first + n_head_alike * row)) {
            n_head_alike++;
        }
        ggml_backend_tensor_set_2d_async(backend_, table, table_ + first, first * size, len * size, n_head_alike,
                                         row * size, row * size);
        i += n_head_alike * len;
    }
    changed_.clear();
}

bool lctx_paged_tensors::commit_page(int32_t page) {
    bool ok = true;
    for (const ggml_tensor * pool : pools_) {
        const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
        ok = ok && (!commits() || commit(pool, page * size, (page + 1) * size));
    }
    return ok;
}

void lctx_paged_tensors::copy_page(int32_t from, int32_t to) {
    for (ggml_tensor * pool : pools_) {
        const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
        copy(pool, from * size, to * size, size);
    }
}

std::string lctx_paged_tensors::take_page(int32_t seq, int32_t head, int32_t block) {
    const int32_t fresh = pages_.take();
    if (fresh < 0) {
        return "the page pool is empty";
    }
    if (!commit_page(fresh)) {
        pages_.give_back(fresh);
        return no_memory();
    }
    n_promised_ = std::max(0, n_promised_ - 1);
    set_page(seq, head, block, fresh);
    return "";
}

std::string lctx_paged_tensors::own_page(int32_t seq, int32_t head, int32_t block) {
    const int32_t old = page(seq, head, block);
    if (old < 0 || !pages_.is_shared(old)) {
        return "";
    }
    const std::string why = take_page(seq, head, block);
    if (!why.empty()) {
        return why;
    }
    copy_page(old, page(seq, head, block));
    pages_.give_back(old);
    return "";
}

void lctx_paged_tensors::share_pages(int32_t src, int32_t dst, int32_t head, int32_t n_block) {
    for (int32_t block = 0; block < n_block; block++) {
        const int32_t p = page(src, head, block);
        set_page(dst, head, block, p);
        if (p >= 0) {
            pages_.share(p);
        }
    }
}

void lctx_paged_tensors::drop_pages(int32_t seq, int32_t head, int32_t first, int32_t end) {
    for (int32_t block = first; block < end; block++) {
        const int32_t p = page(seq, head, block);
        if (p >= 0) {
            pages_.give_back(p);
            set_page(seq, head, block, -1);
        }
    }
}

// They are taken and given back in such an order that they are taken next.
std::string lctx_paged_tensors::promise_pages(int32_t n) {
    bool ok = true;
    std::vector<int32_t> taken;
    for (int32_t page = 0; ok && (int32_t)taken.size() < n && (page = pages_.take()) >= 0;) {
        taken.push_back(page);
        ok = commit_page(page);
    }
    n_promised_ = ok ? n : 0;
    std::for_each(taken.rbegin(), taken.rend(), [&](int32_t p) { pages_.give_back(p); });
    return ok ? "" : no_memory();
}

// A shared page moves for all its readers.
void lctx_paged_tensors::pack_pages(int32_t n_keep) {
    std::vector<std::pair<int32_t, int32_t>> moves;  // in rising order of their first
    pages_.pack(n_keep, [&](int32_t from, int32_t to) {
        if (!commit_page(to)) {
            return false;
        }
        copy_page(from, to);
        moves.emplace_back(from, to);
        return true;
    });
    for (size_t i = 0; !moves.empty() && i < (size_t)ggml_nelements(table); i++) {
        const auto move = std::lower_bound(moves.begin(), moves.end(), std::make_pair(table_[i], 0));
        if (move != moves.end() && move->first == table_[i]) {
            set_entry(i, move->second);
        }
    }
}

void lctx_paged_tensors::return_pages() {
    if (grain_ == 0) {
        return;
    }
    const auto smaller = [](const ggml_tensor * a, const ggml_tensor * b) { return a->nb[1] < b->nb[1]; };
    const size_t smallest = LCTX_PAGE_ROWS * (*std::min_element(pools_.begin(), pools_.end(), smaller))->nb[1];
    const int32_t n_keep = std::max(n_head, n_promised_), n_run = (int32_t)((grain_ + smallest - 1) / smallest);
    if (n_run > 1 && far_bytes() == 0 &&
        pages_.n_stuck(n_run) > n_keep + std::max(n_run, pages_.n_held() / MOST_STUCK)) {
        pack_pages(n_keep);
    }
    pages_.cool(n_keep, n_run, [&](int32_t first, int32_t end) {
        wait();
        for (const ggml_tensor * pool : pools_) {
            const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
            give_back(pool, first * size, end * size);
        }
    });
}

void lctx_paged_tensors::begin_graph() {
    run_copies();
    upload_table();
    is_idle_ = false;
}
