#include "places.h"

#include "../methods/method.h"
#include "ggml-cpu.h"

#include <cstring>

namespace {

// One factor per pair, or none.
std::vector<float> factors_of(const std::vector<float> & still, const ggml_tensor * freq_factors, int32_t n_pair) {
    if (!still.empty() || !freq_factors) {
        return still;
    }
    std::vector<float> factors(n_pair);
    ggml_backend_tensor_get(freq_factors, factors.data(), 0, factors.size() * sizeof(float));
    return factors;
}

}  // namespace

ggml_tensor * lctx_places::table(const lctx_kv_store & store, const lctx_rope & rope, const std::vector<float> & still,
                                 const ggml_tensor * freq_factors) {
    for (const entry & e : entries_) {
        if (e.store == &store && memcmp(&e.rope, &rope, sizeof(rope)) == 0 && e.still == still && e.freq_factors == freq_factors) {
            return e.table;
        }
    }
    entry e = {&store,  rope,   still, freq_factors, ggml_context_ptr(ggml_init({2 * ggml_tensor_overhead(), nullptr, true})),
               nullptr, nullptr};
    e.table = ggml_new_tensor_2d(e.ctx.get(), GGML_TYPE_F32, rope.n_dims, n_);
    ggml_set_name(e.table, "lctx_places");
    e.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(e.ctx.get(), store.buft));
    if (!e.buffer) {
        throw lctx_refusal(store.name() + " has no memory for the angles of " + std::to_string(n_) + " places; use larger chunks");
    }
    if (!dry_) {
        const std::vector<float> angles = compute(rope, factors_of(still, freq_factors, rope.n_dims / 2));
        ggml_backend_tensor_set(e.table, angles.data(), 0, ggml_nbytes(e.table));
    }
    entries_.push_back(std::move(e));
    return entries_.back().table;
}

size_t lctx_places::bytes(ggml_backend_buffer_type_t buft) const {
    size_t n = 0;
    for (const entry & e : entries_) {
        n += e.store->buft == buft ? ggml_nbytes(e.table) : 0;
    }
    return n;
}

// On the CPU, wherever they go.
std::vector<float> lctx_places::compute(const lctx_rope & rope, const std::vector<float> & factors) const {
    const ggml_context_ptr ctx(ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    ggml_tensor * pos = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, n_);
    ggml_tensor * given = factors.empty() ? nullptr : ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, rope.n_dims / 2);
    ggml_tensor * angles = lctx_angles(ctx.get(), pos, given, rope);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, angles);
    const ggml_backend_ptr backend(ggml_backend_cpu_init());
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buffer) {
        throw lctx_refusal("no memory for the angles of " + std::to_string(n_) + " places; use larger chunks");
    }
    std::vector<int32_t> positions(n_);
    for (int32_t i = 0; i < n_; i++) {
        positions[i] = i * chunk_size_;
    }
    ggml_backend_tensor_set(pos, positions.data(), 0, ggml_nbytes(pos));
    if (given) {
        ggml_backend_tensor_set(given, factors.data(), 0, ggml_nbytes(given));
    }
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        throw lctx_refusal("the angles of places could not be computed");
    }
    std::vector<float> values(ggml_nelements(angles));
    ggml_backend_tensor_get(angles, values.data(), 0, ggml_nbytes(angles));
    return values;
}
