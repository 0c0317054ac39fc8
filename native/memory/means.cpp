#include "means.h"

#include "../refusal.h"

#include "ggml-cpu.h"

#include <cstring>

namespace {

void set(ggml_tensor * t, const std::vector<float> & values) {
    ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

}  // namespace

std::vector<float> lctx_factors_of(const std::vector<float> & still, const ggml_tensor * freq_factors, int32_t n_pair) {
    if (!still.empty() || !freq_factors) {
        return still;
    }
    std::vector<float> factors(n_pair);
    ggml_backend_tensor_get(freq_factors, factors.data(), 0, factors.size() * sizeof(float));
    return factors;
}

std::vector<float> lctx_angles_at(const lctx_rope & rope, const std::vector<float> & factors, const std::vector<int32_t> & positions) {
    const ggml_context_ptr ctx(ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    ggml_tensor * pos = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, (int64_t)positions.size());
    ggml_tensor * given = factors.empty() ? nullptr : ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, rope.n_dims / 2);
    ggml_tensor * angles = lctx_angles(ctx.get(), pos, given, rope);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, angles);
    const ggml_backend_ptr backend(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend.get(), 1);
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buffer) {
        throw lctx_refusal("no memory for the angles of " + std::to_string(positions.size()) + " positions");
    }
    ggml_backend_tensor_set(pos, positions.data(), 0, ggml_nbytes(pos));
    if (given) {
        set(given, factors);
    }
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        throw lctx_refusal("angles could not be computed");
    }
    std::vector<float> values(ggml_nelements(angles));
    ggml_backend_tensor_get(angles, values.data(), 0, ggml_nbytes(angles));
    return values;
}

std::vector<float> lctx_mean_angles(const lctx_rope & rope, const std::vector<float> & factors, const std::vector<int32_t> & positions) {
    const std::vector<float> angles = lctx_angles_at(rope, factors, positions);
    std::vector<float> means(rope.n_dims);
    for (size_t i = 0; i < means.size(); i++) {
        double sum = 0.0;
        for (size_t row = 0; row < positions.size(); row++) {
            sum += angles[row * means.size() + i];
        }
        means[i] = (float)(sum / (double)positions.size());
    }
    return means;
}

std::vector<float> lctx_mean_ahead(const lctx_rope & rope, const std::vector<float> & factors) {
    constexpr int32_t FARTHEST = 65536;
    std::vector<int32_t> distances;
    for (int32_t d = 1; d <= FARTHEST; d *= 2) {
        distances.push_back(d);
    }
    return lctx_mean_angles(rope, factors, distances);
}

ggml_tensor * lctx_means::of(const lctx_kv_store & store, const lctx_rope & rope, const std::vector<float> & still,
                             const ggml_tensor * freq_factors) {
    for (const entry & e : entries_) {
        if (e.store == &store && memcmp(&e.rope, &rope, sizeof(rope)) == 0 && e.still == still && e.freq_factors == freq_factors) {
            return e.ahead;
        }
    }
    entry e = {&store, rope, still, freq_factors, nullptr, ggml_context_ptr(ggml_init({ggml_tensor_overhead(), nullptr, true})), nullptr};
    e.ahead = ggml_new_tensor_1d(e.ctx.get(), GGML_TYPE_F32, rope.n_dims);
    ggml_set_name(e.ahead, "lctx_ahead");
    e.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(e.ctx.get(), store.buft));
    if (!e.buffer) {
        throw lctx_refusal(store.name() + " has no memory for the angles of mean queries");
    }
    if (!dry_) {
        set(e.ahead, lctx_mean_ahead(rope, lctx_factors_of(still, freq_factors, rope.n_dims / 2)));
    }
    entries_.push_back(std::move(e));
    return entries_.back().ahead;
}

size_t lctx_means::bytes(ggml_backend_buffer_type_t buft) const {
    size_t n = 0;
    for (const entry & e : entries_) {
        n += e.store->buft == buft ? ggml_nbytes(e.ahead) : 0;
    }
    return n;
}
