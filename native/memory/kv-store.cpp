// Tensors, memory, and what goes between host and device.
#include "kv-store.h"

#include "../methods/method.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t LANDING = 8 << 20;  // bytes that go to a device together

// Pages of all heads, whose numbers are int32, as are those of staged units and those of the pool together.
int32_t n_page(const lctx_kv_shape & shape, int32_t n_head) {
    const int64_t n = (int64_t)shape.n_page_head * n_head, n_unit = shape.n_staged > 0 ? n * shape.of_page() + shape.n_staged * n_head : n;
    if (std::max(n, n_unit) > INT32_MAX) {
        throw lctx_refusal("n_ctx and n_seq_max make " + std::to_string(n) + " pages of K and V, at most " + std::to_string(INT32_MAX) +
                           " have numbers; lower them");
    }
    return (int32_t)n;
}

}  // namespace

lctx_kv_store::lctx_kv_store(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, const lctx_kv_shape & shape,
                             const std::vector<lctx_layer_heads> & layers, lctx_work & work)
    : dev(dev),
      buft(buft),
      is_host(buft == ggml_backend_cpu_buffer_type()),
      n_head(layers.back().first + layers.back().n),
      n_query_head(layers.back().first_query + layers.back().n_query),
      shape_(shape),
      layers_(layers),
      work_(work),
      pages_(n_page(shape, n_head)),
      gone_((size_t)shape.n_seq * n_head) {
    ctx_.reset(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
    const auto tensor = [&](const char * name, ggml_type type, int64_t n0, int64_t n1, int64_t n2 = 1, int64_t n3 = 1) {
        ggml_tensor * t = ggml_new_tensor_4d(ctx_.get(), type, n0, n1, n2, n3);
        ggml_set_name(t, name);
        return t;
    };
    const int64_t n_row = (int64_t)shape.n_page_head * n_head * LCTX_PAGE_ROWS;
    k_pool = tensor("lctx_k_pool", shape.type_k, shape.head_dim_k, n_row);
    if (shape.v_offset < 0) {
        v_pool = tensor("lctx_v_pool", shape.type_v, shape.head_dim_v, n_row);
    } else {
        v_pool = ggml_view_2d(ctx_.get(), k_pool, shape.head_dim_v, n_row, k_pool->nb[1], ggml_row_size(shape.type_k, shape.v_offset));
    }
    table = tensor("lctx_table", GGML_TYPE_I32, lctx_kv_shape::n_block(shape.n_ctx), n_head, shape.n_seq);
    if (shape.n_staged > 0) {
        const int64_t n_staged = (int64_t)n_head * shape.n_staged << shape.unit_shift();
        k_staged = tensor("lctx_k_staged", shape.type_k, shape.head_dim_k, n_staged);
        v_staged = tensor("lctx_v_staged", shape.type_v, shape.head_dim_v, n_staged);
        staging = tensor("lctx_staging", GGML_TYPE_I32, lctx_staging::size(shape.n_staged), n_head);
        staging_table = tensor("lctx_staging_table", GGML_TYPE_I32, table->ne[0] * shape.of_page(), n_head, shape.n_seq);
    }
    if (shape.near_rows > 0) {
        near = tensor("lctx_near", shape.type_k, shape.head_dim_k, shape.near_rows, n_head, shape.n_seq);
    }
    const lctx_chunks * c = shape.chunks;
    if (c && c->by_keys()) {
        index = tensor("lctx_index", GGML_TYPE_I8, (int64_t)shape.index_bytes(), n_row);
    } else if (c) {
        summaries =
            tensor("lctx_summaries", lctx_summary_type(c->representation, shape.head_dim_k, shape.type_k), c->summary_dim(shape.head_dim_k),
                   std::max(1, shape.n_complete(shape.n_ctx)), c->by_attention() ? n_query_head : n_head, shape.n_seq);
        if (c->by_attention()) {
            open = tensor("lctx_open", GGML_TYPE_F32, shape.head_dim_k, 2 * c->chunk_size, n_query_head, shape.n_seq);
        }
    }
    if (!is_host) {
        landing_ = tensor("lctx_landing", GGML_TYPE_I8, LANDING, 1);
    }
    if (shape.retain) {
        held = tensor("lctx_held", GGML_TYPE_I32, lctx_held::size(shape.n_ctx), n_head, shape.n_seq);
        due_ = tensor("lctx_due", GGML_TYPE_I32, shape.n_seq, 1);
        counts_ = tensor("lctx_counts", GGML_TYPE_I32, 1, n_head, shape.n_seq);
        budgets_ = shape.retain->own_budgets() ? tensor("lctx_budgets", GGML_TYPE_I32, n_head, shape.n_seq) : nullptr;
        budget_.assign(budgets_ ? gone_.size() : 0, shape.retain->budget);
    }
    list_planes();
}

// A plane is a line here.
void lctx_kv_store::list_planes() {
    using key = lctx_plane_key;
    using saved = lctx_plane_saved;
    using values = lctx_plane_values;
    const auto pages = [&](ggml_tensor * t, saved when, uint64_t lctx_sizes::*counted_as) {
        planes_.push_back({t, t->nb[1], 0, 0, 0, key::page, false, n_head, 0, 1, false, when, values::finite, counted_as});
    };
    // a tensor [*, entries, heads, n_seq]
    const auto heads = [&](ggml_tensor * t, key of, bool by_query, int32_t rows_each, saved when, values are) {
        const auto n = (int32_t)t->ne[2], n_entry = (int32_t)t->ne[1];
        planes_.push_back({t, t->nb[1], 0, t->nb[2], t->nb[3], of, by_query, n, n_entry, rows_each, of == key::query, when, are,
                           of == key::ring ? &lctx_sizes::near : &lctx_sizes::chunks});
    };
    // one of the lists of cells
    const auto cells = [&](int32_t i, values are) {
        const size_t of_head = lctx_held::PLANES * shape_.n_ctx * sizeof(int32_t);
        planes_.push_back({held, sizeof(int32_t), held_offset(0, 0, i), of_head, n_head * of_head, key::cell, false, n_head, shape_.n_ctx,
                           1, false, saved::in_states, are, &lctx_sizes::other});
    };
    const int32_t chunk_size = shape_.chunks ? shape_.chunks->chunk_size : 1;
    const bool by_query = shape_.chunks && shape_.chunks->by_attention();
    pages(k_pool, saved::in_parts, &lctx_sizes::k);
    if (shape_.v_offset < 0) {
        pages(v_pool, saved::in_parts, &lctx_sizes::v);
    }
    if (index) {
        pages(index, saved::never, &lctx_sizes::chunks);  // it is made again from K
    }
    if (near) {
        heads(near, key::ring, false, 1, saved::in_parts, values::finite);
    }
    if (held) {
        cells(0, values::rows), cells(1, values::scores), cells(2, values::undo);
    }
    if (summaries) {
        heads(summaries, key::chunk, by_query, chunk_size, saved::in_parts, values::any);
    }
    if (open) {
        heads(open, key::query, by_query, chunk_size, saved::in_states, values::any);
    }
}

std::vector<const lctx_plane *> lctx_kv_store::row_planes() const {
    std::vector<const lctx_plane *> found;
    for (const lctx_plane & plane : planes_) {
        if (plane.key == lctx_plane_key::page && plane.saved != lctx_plane_saved::never) {
            found.push_back(&plane);
        }
    }
    return found;
}

std::vector<ggml_tensor *> lctx_kv_store::paged() const {
    std::vector<ggml_tensor *> found;
    for (const lctx_plane & plane : planes_) {
        if (plane.key == lctx_plane_key::page) {
            found.push_back(plane.tensor);
        }
    }
    return found;
}

uint64_t lctx_kv_store::n_entry(const lctx_plane & plane, const std::vector<int32_t> & n_pos) const {
    uint64_t n = 0;
    for (int32_t seq = 0; seq < shape_.n_seq; seq++) {
        if (plane.key == lctx_plane_key::cell) {
            for (int32_t head = 0; head < n_head; head++) {
                n += plane.used(n_pos[seq], n_cell(seq, head, n_pos[seq]));
            }
        } else {
            n += (uint64_t)plane.n_head * plane.used(n_pos[seq], 0);
        }
    }
    return n;
}

size_t lctx_kv_store::bytes() const {
    size_t n = 0;
    each_tensor([&](const ggml_tensor * t) { n += ggml_nbytes(t); });
    return n - far_bytes();
}

size_t lctx_kv_store::far_bytes() const {
    return k_staged ? ggml_nbytes(k_pool) + ggml_nbytes(v_pool) : 0;
}

lctx_sizes lctx_kv_store::sizes(int32_t n_cell) const {
    const uint64_t n_row = (uint64_t)shape_.n_seq * n_head * lctx_kv_shape::n_block(n_cell) * LCTX_PAGE_ROWS;
    lctx_sizes s = {};
    s.other = bytes() + far_bytes();
    for (const lctx_plane & plane : planes_) {
        const uint64_t all = ggml_nbytes(plane.tensor);
        if (plane.key == lctx_plane_key::cell) {  // counted with its tensor; only cells that are held have memory
            s.other -= grain_ == 0 ? 0 : (uint64_t)shape_.n_seq * n_head * (shape_.n_ctx - n_cell) * plane.entry_size;
        } else {
            s.other -= all;
            s.*plane.counted_as +=
                plane.key == lctx_plane_key::page && grain_ > 0 ? std::min<uint64_t>(all, n_row * plane.entry_size) : all;
        }
    }
    return s;
}

std::string lctx_kv_store::name() const {
    return std::string(ggml_backend_dev_name(dev)) + " (" + ggml_backend_dev_description(dev) + ")";
}

// Every tensor begins with a grain of its own.
size_t lctx_kv_store::padded(const ggml_tensor * t) const {
    return GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), std::max(grain_, ggml_backend_buft_get_alignment(buft)));
}

size_t lctx_kv_store::at(const ggml_tensor * t) const {
    return (char *)t->data - (char *)ggml_backend_buffer_get_base(arena_of(t).buffer());
}

bool lctx_kv_store::allocate(bool dry) {
    if (dry) {
        dry_.reset(ggml_backend_buft_alloc_buffer(buft, 0));
        each_tensor([&](ggml_tensor * t) { t->buffer = dry_.get(); });
        v_pool->buffer = dry_.get();
        return dry_ != nullptr;
    }
    size_t size = 0;
    each_tensor([&](const ggml_tensor * t) { size += padded(t); });
    const size_t far_size = k_staged ? padded(k_pool) + padded(v_pool) : 0;
    arena_ = lctx_arena_create(buft, size - far_size, shape_.shrinks);
    far_ = far_size > 0 ? lctx_arena_create_far(buft, far_size) : nullptr;
    if (!arena_ || (far_size > 0 && !far_)) {
        return false;
    }
    char * data[] = {(char *)ggml_backend_buffer_get_base(arena_->buffer()),
                     far_ ? (char *)ggml_backend_buffer_get_base(far_->buffer()) : nullptr};
    each_tensor([&](ggml_tensor * t) {
        ggml_backend_tensor_alloc(arena_of(t).buffer(), t, data[is_far(t)]);
        data[is_far(t)] += padded(t);
    });
    if (v_pool->view_src) {
        ggml_backend_view_init(v_pool);
    }
    bool ok = true;
    for (const ggml_tensor * t : {table, due_, budgets_, counts_, k_staged, v_staged, staging, staging_table}) {
        ok = ok && (!t || arena_->commit(at(t), at(t) + ggml_nbytes(t)));
    }
    ok = ok && (!held || arena_->commit(at(held), at(held) + held_offset(0, 0, 0)));  // the headers
    const size_t n_entry = ggml_nelements(table);
    copy_.resize(is_host ? 0 : n_entry);
    table_ = is_host ? (int32_t *)table->data : copy_.data();
    if (ok) {
        std::fill_n(table_, n_entry, -1);
        init_staging();
    }
    return ok;
}

void lctx_kv_store::attach(ggml_backend_sched_t sched) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == dev) {
            backend_ = backend;
        }
    }
    if (!backend_) {
        throw lctx_refusal("the context has no backend for " + name() + ", where layers of its model are");
    }
}

lctx_layer lctx_kv_store::layer(ggml_context * ctx, const lctx_layer_heads & heads) const {
    // heads of the layer in a tensor [*, *, heads, n_seq]
    const auto rows = [&](ggml_tensor * t, int64_t first, int64_t n) {
        return t ? ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n, t->ne[3], t->nb[1], t->nb[2], t->nb[3], first * t->nb[2]) : nullptr;
    };
    // the same in a tensor [*, heads, n_seq]
    const auto lists = [&](ggml_tensor * t) {
        return t ? ggml_view_3d(ctx, t, t->ne[0], heads.n, t->ne[2], t->nb[1], t->nb[2], heads.first * t->nb[1]) : nullptr;
    };
    // the second dimension [first, first + n) of a tensor with two
    const auto each = [&](ggml_tensor * t, int64_t first, int64_t n) {
        return t ? ggml_view_2d(ctx, t, t->ne[0], n, t->nb[1], first * t->nb[1]) : nullptr;
    };
    // the staged units of the heads
    const auto units = [&](ggml_tensor * t) {
        const int64_t n_row = t ? (int64_t)shape_.n_staged << shape_.unit_shift() : 0;
        return each(t, heads.first * n_row, heads.n * n_row);
    };
    const bool by_query = shape_.chunks && shape_.chunks->by_attention();
    return {k_pool,
            v_pool,
            lists(table),
            index,
            rows(near, heads.first, heads.n),
            rows(summaries, by_query ? heads.first_query : heads.first, by_query ? heads.n_query : heads.n),
            rows(open, heads.first_query, heads.n_query),
            lists(held),
            units(k_staged),
            units(v_staged),
            each(staging, heads.first, heads.n),
            lists(staging_table),
            shape_.hadamard};
}

// ---- host and device ----

void lctx_kv_store::wait() {
    run_copies();
    if (!is_host && !is_idle_) {
        ggml_backend_synchronize(backend_);
        work_.n_wait++;
        is_idle_ = true;
    }
}

void lctx_kv_store::begin_graph() {
    run_copies();
    upload_table();
    is_idle_ = false;
}

void lctx_kv_store::read(const ggml_tensor * t, size_t offset, void * data, size_t size) {
    wait();
    ggml_backend_tensor_get(t, data, offset, size);
}

void lctx_kv_store::write(ggml_tensor * t, size_t offset, const void * data, size_t size) {
    wait();
    work_.n_sent += !is_host;
    ggml_backend_tensor_set(t, data, offset, size);
}

void lctx_kv_store::land(ggml_tensor * t, size_t offset, const void * data, size_t size) {
    constexpr size_t MOST = LANDING;
    if (!landing_ || !backend_ || is_far(t) || size == 0 || size > MOST || !arena_->commit(at(landing_), at(landing_) + MOST)) {
        return write(t, offset, data, size);
    }
    if (landed_.size() + size > MOST) {
        run_copies();
    }
    copies_.push_back({at(landing_) + landed_.size(), at(t) + offset, size});
    landed_.insert(landed_.end(), (const uint8_t *)data, (const uint8_t *)data + size);
}

void lctx_kv_store::copy(ggml_tensor * t, size_t from, size_t to, size_t size) {
    if (is_host || is_far(t)) {
        wait();
        memcpy((char *)t->data + to, (const char *)t->data + from, size);
        return;
    }
    if (size > 0) {
        copies_.push_back({at(t) + from, at(t) + to, size});
    }
}

void lctx_add_node(ggml_cgraph * graph, ggml_tensor * node) {
    const auto place = [](ggml_tensor * t) {
        if (t && t->view_src && !t->buffer) {
            ggml_backend_view_init(t);
        }
    };
    std::for_each(std::begin(node->src), std::end(node->src), place);
    place(node);
    node->flags |= GGML_TENSOR_FLAG_COMPUTE;
    ggml_graph_add_node(graph, node);
}

// One graph for many copies: the device does not answer each of them.
void lctx_kv_store::run_copies() {
    constexpr size_t MOST = 4096;
    if (!landed_.empty()) {
        ggml_backend_tensor_set(landing_, landed_.data(), 0, landed_.size());
        work_.n_sent++;
        landed_.clear();
    }
    char * base = copies_.empty() ? nullptr : (char *)ggml_backend_buffer_get_base(arena_->buffer());
    for (size_t first = 0; first < copies_.size(); first += MOST) {
        const size_t n = std::min(MOST, copies_.size() - first);
        const ggml_context_ptr ctx(ggml_init({3 * n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr, true}));
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), n, false);
        for (size_t i = first; i < first + n; i++) {
            const auto bytes = [&](size_t offset) {
                ggml_tensor * t = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, (int64_t)copies_[i].size);
                ggml_backend_tensor_alloc(arena_->buffer(), t, base + offset);
                return t;
            };
            ggml_tensor * from = bytes(copies_[i].from);
            lctx_add_node(graph, ggml_cpy(ctx.get(), from, bytes(copies_[i].to)));
        }
        if (ggml_backend_graph_compute(backend_, graph) != GGML_STATUS_SUCCESS) {
            throw lctx_refusal("copies of rows on " + name() + " failed");
        }
        is_idle_ = true;
    }
    copies_.clear();
}
