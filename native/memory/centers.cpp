#include "centers.h"

#include "../base/refusal.h"
#include "angles.h"

namespace {

// Positions over which the bias is averaged: longer texts differ in channels that turn slowly, shorter ones in hardly
// any.
constexpr int32_t FARTHEST = 8192, STEP = 8;

std::vector<int32_t> averaged_positions() {
    std::vector<int32_t> positions;
    for (int32_t p = 0; p < FARTHEST; p += STEP) {
        positions.push_back(p);
    }
    return positions;
}

// A bias of heads of head_dim channels, rotated by means of cos and sin, [n_dims].
std::vector<float> rotated_bias(const std::vector<float> & bias, int32_t head_dim, const std::vector<float> & mean,
                                int32_t mode) {
    const int32_t n_dims = (int32_t)mean.size(), half = n_dims / 2;
    const bool neox = mode == GGML_ROPE_TYPE_NEOX;
    std::vector<float> rotated = bias;  // channels from n_dims on stay
    for (size_t head = 0; head < bias.size(); head += head_dim) {
        for (int32_t pair = 0; pair < half; pair++) {
            const size_t first = head + (neox ? pair : 2 * pair), second = neox ? first + half : first + 1;
            const float c = mean[2 * pair], s = mean[2 * pair + 1];
            rotated[first] = bias[first] * c - bias[second] * s;
            rotated[second] = bias[first] * s + bias[second] * c;
        }
    }
    return rotated;
}

}  // namespace

ggml_tensor * lctx_centers::of(const lctx_device_store & store, int32_t il, const ggml_tensor * bias, int32_t head_dim,
                               const lctx_rope & rope, const std::vector<float> & still,
                               const ggml_tensor * freq_factors) {
    const auto known = entries_.find(il);
    if (known != entries_.end()) {
        return known->second.center;
    }
    entry e = {&store, nullptr, ggml_context_ptr(ggml_init({ggml_tensor_overhead(), nullptr, true})), nullptr};
    e.center = ggml_new_tensor_2d(e.ctx.get(), GGML_TYPE_F32, head_dim, ggml_nelements(bias) / head_dim);
    ggml_set_name(e.center, "lctx_center_keys");
    e.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(e.ctx.get(), store.buft));
    if (!e.buffer) {
        throw lctx_refusal(store.name() + " has no memory for the mean of the keys' bias");
    }
    if (!dry_) {
        std::vector<float> values(ggml_nelements(bias));
        ggml_backend_tensor_get(bias, values.data(), 0, ggml_nbytes(bias));
        const std::vector<float> factors = lctx_factors_of(still, freq_factors, rope.n_dims / 2);
        const std::vector<float> center =
            rotated_bias(values, head_dim, lctx_mean_angles(rope, factors, averaged_positions()), rope.mode);
        ggml_backend_tensor_set(e.center, center.data(), 0, ggml_nbytes(e.center));
    }
    return entries_.emplace(il, std::move(e)).first->second.center;
}

size_t lctx_centers::bytes(const lctx_device_store & store) const {
    size_t n = 0;
    for (const auto & [il, e] : entries_) {
        n += e.store == &store ? ggml_nbytes(e.center) : 0;
    }
    return n;
}
