// *angles*: cos and sin of positions, as ggml's RoPE computes them (YaRN: arXiv 2309.00071, section 3.2-3.4).
#include "ggml-cpu-impl.h"
#include "kernels.h"

#include <algorithm>
#include <cmath>

namespace {

// 1 where a pair keeps its own frequency (extrapolation), 0 where it is interpolated.
float yarn_ramp(float low, float high, int32_t pair) {
    const float y = ((float)pair - low) / std::max(0.001f, high - low);
    return 1.0f - std::min(1.0f, std::max(0.0f, y));
}

void angles_of(float pos, const lctx_rope & rope, const float * freq_factors, const float corr[2], float * cs) {
    const float theta_scale = powf(rope.freq_base, -2.0f / (float)rope.n_dims);
    const float magnitude =
        rope.attn_factor * (rope.ext_factor != 0.0f ? 1.0f + 0.1f * logf(1.0f / rope.freq_scale) : 1.0f);
    float theta = pos;
    for (int32_t i = 0; i < rope.n_dims / 2; i++) {
        const float extrapolated = freq_factors ? theta / freq_factors[i] : theta;
        float angle = rope.freq_scale * extrapolated;
        if (rope.ext_factor != 0.0f) {
            const float mix = yarn_ramp(corr[0], corr[1], i) * rope.ext_factor;
            angle = angle * (1.0f - mix) + extrapolated * mix;
        }
        cs[2 * i] = cosf(angle) * magnitude;
        cs[2 * i + 1] = sinf(angle) * magnitude;
        theta *= theta_scale;
    }
}

}  // namespace

void lctx_cpu_angles(const ggml_compute_params * params, const lctx_angles_args & args) {
    float corr[2];
    ggml_rope_yarn_corr_dims(args.rope.n_dims, args.rope.n_ctx_orig, args.rope.freq_base, args.rope.beta_fast,
                             args.rope.beta_slow, corr);
    for (int64_t i = params->ith; i < args.n; i += params->nth) {
        angles_of((float)args.pos[i], args.rope, args.freq_factors, corr, args.dst + i * args.rope.n_dims);
    }
}
