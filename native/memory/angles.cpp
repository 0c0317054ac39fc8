#include "angles.h"

#include "../base/refusal.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

namespace {

// cos and sin of positions, [n][n_dims], as lctx_angles computes them on the CPU.
std::vector<float> angles_at(const lctx_rope & rope, const std::vector<float> & factors,
                             const std::vector<int32_t> & positions) {
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
        ggml_backend_tensor_set(given, factors.data(), 0, ggml_nbytes(given));
    }
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        throw lctx_refusal("angles could not be computed");
    }
    std::vector<float> values(ggml_nelements(angles));
    ggml_backend_tensor_get(angles, values.data(), 0, ggml_nbytes(angles));
    return values;
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

std::vector<float> lctx_mean_angles(const lctx_rope & rope, const std::vector<float> & factors,
                                    const std::vector<int32_t> & positions) {
    const std::vector<float> angles = angles_at(rope, factors, positions);
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
