#version 460
// The partial states of *attend* become rows, and rows of transformed values what they were. A workgroup per token and head.
#include "common.glsl"
#define THREADS 64
layout(local_size_x = THREADS) in;
layout(constant_id = 0) const int DIM_V = 64;
layout(constant_id = 1) const int HADAMARD_V = 0;
layout(push_constant, std430) uniform Args { LCTX_VK_MERGE(LAST) } a;
shared float buf[DIM_V];
const int N_DIMS = 0, ROPE_MODE = 0;
#include "rotate.glsl"

const float NONE = -1e30;
const int SIZE = DIM_V + 2;

// The sum of what is at `i` of all partial states, each times its weight.
float sum_of(Floats state, int i, float most) {
    float sum = 0.0;
    for (int split = 0; split < a.n_split; split++) {
        sum += state.x[split * SIZE + i] * exp(state.x[split * SIZE + DIM_V] - most);
    }
    return sum;
}

void merge(int row, int thread) {
    Floats state = Floats(a.states + uint64_t(row) * uint64_t(4 * a.n_split * SIZE));
    float most = NONE;
    for (int split = 0; split < a.n_split; split++) {
        most = max(most, state.x[split * SIZE + DIM_V]);
    }
    const float sum = sum_of(state, DIM_V + 1, most);
    for (int d = thread; d < DIM_V; d += THREADS) {
        buf[d] = sum != 0.0 ? sum_of(state, d, most) / sum : 0.0;
    }
    if (thread == 0 && a.lse != 0) {
        Floats(a.dst + uint64_t(a.n_row) * uint64_t(4 * DIM_V)).x[row] = sum != 0.0 ? most + log(sum) : uintBitsToFloat(0xff800000);
    }
}

void main() {
    const int thread = int(gl_LocalInvocationID.x);
    for (int row = int(gl_WorkGroupID.x); row < a.n_row; row += int(gl_NumWorkGroups.x)) {
        Floats dst = Floats(a.dst + uint64_t(row) * uint64_t(4 * DIM_V));
        if (a.n_split > 0) {
            merge(row, thread);
        } else {
            for (int d = thread; d < DIM_V; d += THREADS) {
                buf[d] = dst.x[d];
            }
        }
        transform(DIM_V, HADAMARD_V);
        for (int d = thread; d < DIM_V; d += THREADS) {
            dst.x[d] = buf[d] * root_of(HADAMARD_V);
        }
        barrier();
    }
}
