// Pages, their table, and the memory of rows.
#include "kv-store.h"

#include <algorithm>
#include <utility>

constexpr int32_t MOST_STUCK = 32;  // one of so many pages may be free and keep its memory

size_t lctx_kv_store::entry(int32_t seq, int32_t head, int32_t block) const {
    return ((size_t)seq * n_head + head) * table->ne[0] + block;
}

int32_t lctx_kv_store::page(int32_t seq, int32_t head, int32_t block) const {
    work_.n_table++;
    return table_[entry(seq, head, block)];
}

// The device need not know which pages were dropped: no row there is read again.
void lctx_kv_store::set_page(int32_t seq, int32_t head, int32_t block, int32_t page) {
    work_.n_table++;
    set_entry(entry(seq, head, block), page);
}

void lctx_kv_store::set_entry(size_t i, int32_t page) {
    table_[i] = page;
    if (!is_host && page >= 0) {
        changed_.push_back(i);
    }
}

// Entries that follow each other go together, and the same of heads that follow each other in one call. Graphs that run read what was
// there, those that follow what comes: the host does not wait.
void lctx_kv_store::upload_table() {
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
        ggml_backend_tensor_set_2d_async(backend_, table, table_ + first, first * size, len * size, n_head_alike, row * size, row * size);
        i += n_head_alike * len;
    }
    changed_.clear();
}

std::string lctx_kv_store::no_memory() const {
    return name() + " has no memory left for the KV cache: remove tokens, put fewer layers there, or use method=window";
}

bool lctx_kv_store::commit_page(int32_t page) {
    bool ok = true;
    for (const ggml_tensor * pool : paged()) {
        const size_t size = LCTX_PAGE_ROWS * pool->nb[1], from = at(pool) + page * size;
        ok = ok && (!commits() || arena_of(pool).commit(from, from + size));
    }
    return ok;
}

std::string lctx_kv_store::take_page(int32_t seq, int32_t head, int32_t block) {
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

std::string lctx_kv_store::own_page(int32_t seq, int32_t head, int32_t block) {
    const int32_t old = page(seq, head, block);
    if (old < 0 || !pages_.is_shared(old)) {
        return "";
    }
    const std::string why = take_page(seq, head, block);
    if (!why.empty()) {
        return why;
    }
    for (ggml_tensor * pool : paged()) {
        const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
        copy(pool, old * size, page(seq, head, block) * size, size);
    }
    pages_.give_back(old);
    return "";
}

void lctx_kv_store::share_pages(int32_t src, int32_t dst, int32_t head, int32_t n_block) {
    for (int32_t block = 0; block < n_block; block++) {
        const int32_t p = page(src, head, block);
        set_page(dst, head, block, p);
        if (p >= 0) {
            pages_.share(p);
        }
    }
}

void lctx_kv_store::drop_pages(int32_t seq, int32_t head, int32_t first, int32_t end) {
    for (int32_t block = first; block < end; block++) {
        const int32_t p = page(seq, head, block);
        if (p >= 0) {
            pages_.give_back(p);
            set_page(seq, head, block, -1);
        }
    }
}

// They are taken and given back in such an order that they are taken next.
std::string lctx_kv_store::promise_pages(int32_t n) {
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
void lctx_kv_store::pack_pages(int32_t n_keep) {
    std::vector<std::pair<int32_t, int32_t>> moves;  // in rising order of their first
    pages_.pack(n_keep, [&](int32_t from, int32_t to) {
        if (!commit_page(to)) {
            return false;
        }
        for (ggml_tensor * pool : paged()) {
            const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
            copy(pool, from * size, to * size, size);
        }
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

void lctx_kv_store::return_pages() {
    if (grain_ == 0) {
        return;
    }
    const size_t smallest = LCTX_PAGE_ROWS * std::min({k_pool->nb[1], v_pool->nb[1], index ? index->nb[1] : k_pool->nb[1]});
    const int32_t n_keep = std::max(n_head, n_promised_), n_run = (int32_t)((grain_ + smallest - 1) / smallest);
    if (n_run > 1 && !far_ && pages_.n_stuck(n_run) > n_keep + std::max(n_run, pages_.n_held() / MOST_STUCK)) {
        pack_pages(n_keep);
    }
    pages_.cool(n_keep, n_run, [&](int32_t first, int32_t end) {
        wait();
        for (const ggml_tensor * pool : paged()) {
            const size_t size = LCTX_PAGE_ROWS * pool->nb[1];
            arena_of(pool).give_back(at(pool) + first * size, at(pool) + end * size);
        }
    });
}

// f(from, end) for the bytes beside the pages that rows [n_from, n_to) of a sequence take, in whole pages of rows; false as soon as f is.
template <typename F> bool lctx_kv_store::each_row_range(int32_t seq, int32_t n_from, int32_t n_to, F && f) const {
    const auto whole = [&](int32_t n) { return std::min(lctx_kv_shape::n_block(n) * LCTX_PAGE_ROWS, shape_.n_ctx); };
    const auto committed = [&](const lctx_plane & plane, int32_t head, int32_t n) {
        const int32_t n_cell = n == 0 || plane.key != lctx_plane_key::cell ? 0 : std::max(0, this->n_cell(seq, head, n));
        return plane.committed(whole(n), whole(n_cell));
    };
    for (const lctx_plane & plane : planes_) {
        for (int32_t head = 0; plane.key != lctx_plane_key::page && head < plane.n_head; head++) {
            const int32_t from = committed(plane, head, n_from), to = committed(plane, head, n_to);
            if (from < to && !f(at(plane.tensor) + plane.offset(seq, head, from), at(plane.tensor) + plane.offset(seq, head, to))) {
                return false;
            }
        }
    }
    return true;
}

std::string lctx_kv_store::commit_rows(int32_t seq, int32_t n_now, int32_t n_then) {
    if (!commits()) {
        return "";
    }
    const bool ok = each_row_range(seq, n_now, n_then, [&](size_t from, size_t end) { return arena_->commit(from, end); });
    return ok ? "" : no_memory();
}

void lctx_kv_store::return_rows(int32_t seq, int32_t n_then, int32_t n_now) {
    if (grain_ == 0) {
        return;
    }
    wait();
    each_row_range(seq, n_then, n_now, [&](size_t from, size_t end) {
        arena_->give_back(from, end);
        return true;
    });
}

// ---- units that lie close ----

void lctx_kv_store::init_staging() {
    if (!staging) {
        return;
    }
    ggml_backend_tensor_memset(staging, 0xff, 0, ggml_nbytes(staging));
    ggml_backend_tensor_memset(staging_table, 0xff, 0, ggml_nbytes(staging_table));
    const int32_t header[lctx_staging::HEADER] = {};
    for (int32_t head = 0; head < n_head; head++) {
        ggml_backend_tensor_set(staging, header, head * staging->nb[1], sizeof(header));
    }
}

void lctx_kv_store::forget_staged(int32_t seq) {
    if (!staging) {
        return;
    }
    std::vector<int32_t> data(ggml_nelements(staging));
    read(staging, 0, data.data(), ggml_nbytes(staging));
    for (int32_t head = 0; head < n_head; head++) {
        const lctx_staging r = {&data[head * staging->ne[0]], shape_.n_staged};
        for (int32_t place = 0; place < r.n_staged; place++) {
            if (r.keys()[place] >= 0 && r.keys()[place] / staging_table->ne[0] == seq) {
                r.keys()[place] = r.last_used()[place] = -1;
            }
        }
    }
    write(staging, 0, data.data(), ggml_nbytes(staging));
    ggml_backend_tensor_memset(staging_table, 0xff, seq * staging_table->nb[2], staging_table->nb[2]);
}

lctx_offload_info lctx_kv_store::offload() {
    lctx_offload_info info = {};
    if (!staging) {
        return info;
    }
    std::vector<int32_t> data(ggml_nelements(staging));
    read(staging, 0, data.data(), ggml_nbytes(staging));
    for (int32_t head = 0; head < n_head; head++) {
        const lctx_staging r = {&data[head * staging->ne[0]], shape_.n_staged};
        info.n_hit += (uint32_t)r.n_hit(), info.n_miss += (uint32_t)r.n_miss(), info.n_far += (uint32_t)r.n_far();
    }
    info.device_bytes = bytes();
    info.unit_bytes = shape_.row_bytes() << shape_.unit_shift();
    info.n_staged = shape_.n_staged;
    return info;
}
