#version 460
// *angles*: cos and sin of positions, as ggml's RoPE computes them (YaRN: arXiv 2309.00071, section 3.2-3.4). A thread per position and
// pair.
#include "common.glsl"
#include "exact.glsl"
layout(local_size_x = 64) in;
layout(push_constant, std430) uniform Args { LCTX_VK_ANGLES(LAST) } a;

// 1 where a pair keeps its own frequency (extrapolation), 0 where it is interpolated.
float yarn_ramp(int pair) {
    precise float y = divided(float(pair) - a.corr_low, max(0.001, a.corr_high - a.corr_low));
    return 1.0 - clamp(y, 0.0, 1.0);
}

float angle_of(int pos, int pair) {
    precise float theta = float(pos);
    for (int i = 0; i < pair; i++) {
        theta *= a.theta_scale;
    }
    const float extrapolated = a.freq_factors != 0 ? divided(theta, Floats(a.freq_factors).x[pair]) : theta;
    precise float angle = a.freq_scale * extrapolated;
    if (a.ext_factor != 0.0) {
        precise float mixed = yarn_ramp(pair) * a.ext_factor;
        angle = angle * (1.0 - mixed) + extrapolated * mixed;
    }
    return angle;
}

void main() {
    const uint n = uint(a.n) * uint(a.n_pair);
    for (uint i = gl_GlobalInvocationID.x; i < n; i += gl_NumWorkGroups.x * 64) {
        const vec2 cs = cos_sin(angle_of(Ints(a.pos).x[i / a.n_pair], int(i % a.n_pair))) * a.magnitude;
        Floats(a.dst).x[2 * i] = cs.x;
        Floats(a.dst).x[2 * i + 1] = cs.y;
    }
}
