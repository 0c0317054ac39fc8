// Functions that host and GPU share.
#pragma once

#ifdef __CUDACC__
#define LCTX_HD __host__ __device__
#else
#define LCTX_HD
#endif

template <typename T> LCTX_HD constexpr T lctx_min(T a, T b) {
    return b < a ? b : a;
}

template <typename T> LCTX_HD constexpr T lctx_max(T a, T b) {
    return a < b ? b : a;
}

LCTX_HD constexpr long long lctx_div_up(long long a, long long b) {
    return (a + b - 1) / b;
}
