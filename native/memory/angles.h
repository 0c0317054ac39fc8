// Angles that the host needs: cos and sin of positions, as the kernels compute them.
#pragma once

#include "../ops/ops.h"

#include <vector>

// Frequency factors of a rotation: those that hold pairs still, else those of the model, else none.
std::vector<float> lctx_factors_of(const std::vector<float> & still, const ggml_tensor * freq_factors, int32_t n_pair);

// Means of cos and sin over positions, [n_dims]. factors: of frequencies, or empty.
std::vector<float> lctx_mean_angles(const lctx_rope & rope, const std::vector<float> & factors,
                                    const std::vector<int32_t> & positions);
