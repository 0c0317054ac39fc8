// Lets all threads of a workgroup know something together. All of them call, and see the result. The kernel defines
// THREADS.
shared float reduced[THREADS];

void reduce(float x, bool is_sum) {
    const int thread = int(gl_LocalInvocationID.x);
    barrier();  // what was reduced before has been read
    reduced[thread] = x;
    for (int half_n = THREADS / 2; half_n > 0; half_n /= 2) {
        barrier();
        if (thread < half_n) {
            const float other = reduced[thread + half_n];
            reduced[thread] = is_sum ? reduced[thread] + other : max(reduced[thread], other);
        }
    }
    barrier();
}

float total(float x) {
    reduce(x, true);
    return reduced[0];
}

float largest(float x) {
    reduce(x, false);
    return reduced[0];
}

// The sum over the threads before this one.
int sum_before(int n) {
    barrier();
    reduced[gl_LocalInvocationID.x] = float(n);
    barrier();
    float sum = 0.0;
    for (int i = 0; i < int(gl_LocalInvocationID.x); i++) {
        sum += reduced[i];
    }
    return int(sum);
}
