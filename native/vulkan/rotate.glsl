// Rows in `buf` and how they turn. The kernel defines N_DIMS, ROPE_MODE, THREADS, and buf[].
const int NEOX = 2;

// Element d of a row of floats, turned by the angles at `cs`.
float rotated(uint64_t row, int d, uint64_t cs) {
    const float x = Floats(row).x[d];
    if (d >= N_DIMS) {
        return x;
    }
    const int n_pair = N_DIMS / 2, pair = ROPE_MODE == NEOX ? d % n_pair : d / 2;
    const bool is_first = ROPE_MODE == NEOX ? d < n_pair : d % 2 == 0;
    const int step = ROPE_MODE == NEOX ? n_pair : 1;
    const float other = Floats(row).x[is_first ? d + step : d - step];
    const float c = Floats(cs).x[2 * pair], s = Floats(cs).x[2 * pair + 1];
    return is_first ? x * c - other * s : other * s + x * c;
}

// 1 / sqrt(block) of a power of two, exact where it is one.
float root_of(int block) {
    float root = 1.0;
    for (; block > 1; block /= 4) {
        root *= block == 2 ? 0.70710678118654752 : 0.5;
    }
    return root;
}

// The Hadamard transform of n elements of buf in blocks, without the factor root_of(block); 0: none. All threads call, and see the result.
void transform(int n, int block) {
    for (int step = 1; step < block; step *= 2) {
        barrier();
        for (int i = int(gl_LocalInvocationID.x); i < n / 2; i += THREADS) {
            const int at = i / step * 2 * step + i % step;
            const float a = buf[at], b = buf[at + step];
            buf[at] = a + b;
            buf[at + step] = a - b;
        }
    }
    barrier();
}
