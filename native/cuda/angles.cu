// *angles*: cos and sin of positions, as ggml's RoPE computes them (YaRN: arXiv 2309.00071, section 3.2-3.4).
#include "ggml.h"
#include "kernels.h"

#include <cmath>

namespace {

constexpr int THREADS = 128;

struct settings {
    lctx_angles_args args;
    float theta_scale;
    float magnitude;
    float corr[2];

    explicit settings(const lctx_angles_args & a) : args(a) {
        const lctx_rope & rope = a.rope;
        theta_scale = powf(rope.freq_base, -2.0f / (float)rope.n_dims);
        magnitude = rope.attn_factor * (rope.ext_factor != 0.0f ? 1.0f + 0.1f * logf(1.0f / rope.freq_scale) : 1.0f);
        ggml_rope_yarn_corr_dims(rope.n_dims, rope.n_ctx_orig, rope.freq_base, rope.beta_fast, rope.beta_slow, corr);
    }
};

// 1 where a pair keeps its own frequency (extrapolation), 0 where it is interpolated.
__device__ float yarn_ramp(const settings & s, int pair) {
    const float y = lctx_div((float)pair - s.corr[0], fmaxf(0.001f, s.corr[1] - s.corr[0]));
    return 1.0f - fminf(1.0f, fmaxf(0.0f, y));
}

// A thread per row and pair. The angle is rounded as on the CPU: far out, one step of it is a lot.
__global__ void angles(settings s) {
    lctx_begin();
    lctx_let_next_begin();
    const lctx_rope & rope = s.args.rope;
    const int n_pair = rope.n_dims / 2;
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= s.args.n * n_pair) {
        return;
    }
    const int pair = (int)(i % n_pair);
    float theta = (float)s.args.pos[i / n_pair];
    for (int j = 0; j < pair; j++) {
        theta *= s.theta_scale;
    }
    const float extrapolated = s.args.freq_factors ? lctx_div(theta, s.args.freq_factors[pair]) : theta;
    float angle = rope.freq_scale * extrapolated;
    if (rope.ext_factor != 0.0f) {
        const float mix = yarn_ramp(s, pair) * rope.ext_factor;
        angle = lctx_add(lctx_mul(angle, 1.0f - mix), lctx_mul(extrapolated, mix));
    }
    // double: no compiler option makes these less exact
    s.args.dst[2 * i] = (float)cos((double)angle) * s.magnitude;
    s.args.dst[2 * i + 1] = (float)sin((double)angle) * s.magnitude;
}

}  // namespace

void lctx_cuda_angles(const lctx_cuda_queue & queue, const lctx_angles_args & args) {
    const int64_t n = args.n * (args.rope.n_dims / 2);
    lctx_launch(angles, dim3((unsigned)lctx_div_up(n, THREADS)), THREADS, 0, queue.stream, settings(args));
}
