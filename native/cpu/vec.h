// Float vectors of the machine's width through compiler vector extensions (GCC, Clang): exp and small matrix products.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int LCTX_VL = 16;
#elif defined(__AVX__)
constexpr int LCTX_VL = 8;
#else
constexpr int LCTX_VL = 4;
#endif

typedef float lctx_vf __attribute__((vector_size(LCTX_VL * 4)));
typedef int32_t lctx_vi __attribute__((vector_size(LCTX_VL * 4)));

static inline lctx_vf lctx_vload(const float * p) {
    lctx_vf v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void lctx_vstore(float * p, lctx_vf v) {
    memcpy(p, &v, sizeof(v));
}

static inline lctx_vf lctx_vset(float x) {
    return x - lctx_vf{};  // a plain broadcast: x - 0 is x for every x, 0 + x is not
}

// v, loaded once: GCC reads what several products share from memory for each of them, and then loads are the limit.
static inline lctx_vf lctx_vkeep(lctx_vf v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
    return v;
}

static inline lctx_vf lctx_vmax(lctx_vf a, lctx_vf b) {
    return b > a ? b : a;
}

// Lanes of a (0 .. their number - 1) and b (from there on), in any order. M: integers as wide as the lanes.
template <typename M = lctx_vi, typename V, int... LANE>
static inline V lctx_vpick(V a, V b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, LANE...);
#else
    return __builtin_shuffle(a, b, M{LANE...});
#endif
}

typedef std::make_integer_sequence<int, LCTX_VL> lctx_lanes;

// Lane i ^ W at lane i.
template <int W, int... I> static inline lctx_vf lctx_vswap(lctx_vf v, std::integer_sequence<int, I...>) {
    return lctx_vpick(v, v, std::integer_sequence<int, (I ^ W)...>{});
}

// Sum and maximum of the lanes.
template <int W = LCTX_VL / 2> static inline float lctx_vsum(lctx_vf v) {
    v += lctx_vswap<W>(v, lctx_lanes{});
    if constexpr (W > 1) {
        return lctx_vsum<W / 2>(v);
    } else {
        return v[0];
    }
}

template <int W = LCTX_VL / 2> static inline float lctx_vtop(lctx_vf v) {
    v = lctx_vmax(v, lctx_vswap<W>(v, lctx_lanes{}));
    if constexpr (W > 1) {
        return lctx_vtop<W / 2>(v);
    } else {
        return v[0];
    }
}

// One step of lctx_vsums: lanes i with bit W clear become a[i] + a[i ^ W], the others b[i] + b[i ^ W].
template <int W, int... I> static inline lctx_vf lctx_vfold(lctx_vf a, lctx_vf b, std::integer_sequence<int, I...>) {
    const lctx_vf own = lctx_vpick(a, b, std::integer_sequence<int, (I & W ? I + LCTX_VL : I)...>{});
    const lctx_vf other = lctx_vpick(a, b, std::integer_sequence<int, (I & W ? I - W + LCTX_VL : I + W)...>{});
    return own + other;
}

// Lane i: the sum of the lanes of v[i]. v: [LCTX_VL], overwritten.
template <int W = LCTX_VL / 2> static inline __attribute__((always_inline)) lctx_vf lctx_vsums(lctx_vf * v) {
    for (int j = 0; j < W; j++) {
        v[j] = lctx_vfold<W>(v[j], v[j + W], lctx_lanes{});
    }
    if constexpr (W > 1) {
        return lctx_vsums<W / 2>(v);
    } else {
        return v[0];
    }
}

// One step of lctx_vtranspose: swap the upper lanes of a with the lower ones of b, in groups of W.
template <int W, int... I>
static inline void lctx_vexchange(lctx_vf & a, lctx_vf & b, std::integer_sequence<int, I...>) {
    const lctx_vf low = lctx_vpick(a, b, std::integer_sequence<int, (I & W ? I - W + LCTX_VL : I)...>{});
    b = lctx_vpick(a, b, std::integer_sequence<int, (I & W ? I + LCTX_VL : I + W)...>{});
    a = low;
}

// Swap lane i of v[j] and lane j of v[i]. v: [LCTX_VL].
template <int W = LCTX_VL / 2> static inline __attribute__((always_inline)) void lctx_vtranspose(lctx_vf * v) {
    for (int j = 0; j < LCTX_VL; j++) {
        if (!(j & W)) {
            lctx_vexchange<W>(v[j], v[j + W], lctx_lanes{});
        }
    }
    if constexpr (W > 1) {
        lctx_vtranspose<W / 2>(v);
    }
}

// exp(x) to about 1e-7 relative; 0 below -87, where float ends; NaN stays NaN.
// exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, the latter as its Taylor polynomial.
static inline lctx_vf lctx_vexp(lctx_vf x) {
    const lctx_vf round_bias = lctx_vset(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const lctx_vf clamped = lctx_vmax(x, lctx_vset(-87.0f));
    const lctx_vf shifted = clamped * 1.44269504f + round_bias;
    const lctx_vf n = shifted - round_bias;
    const lctx_vf r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
    lctx_vf p = lctx_vset(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    lctx_vi bits;
    memcpy(&bits, &shifted, sizeof(bits));
    const lctx_vi two_n_bits = ((bits & 0x7fffff) - 0x400000 + 127) << 23;
    lctx_vf two_n;
    memcpy(&two_n, &two_n_bits, sizeof(two_n));
    return x < lctx_vset(-87.0f) ? lctx_vset(0.0f) : p * two_n;
}

// log(exp(x) + exp(y)) to about 2e-7 absolute; NaN when one of them is.
// log(1 + t) = 2 atanh(z) with z = t / (2 + t) <= 1/3, by its series.
static inline lctx_vf lctx_vlog_sum(lctx_vf x, lctx_vf y) {
    const lctx_vf t = lctx_vexp(x > y ? y - x : x - y), z = t / (t + 2.0f), zz = z * z;
    lctx_vf p = lctx_vset(1.0f / 13.0f);
    p = p * zz + 1.0f / 11.0f;
    p = p * zz + 1.0f / 9.0f;
    p = p * zz + 1.0f / 7.0f;
    p = p * zz + 1.0f / 5.0f;
    p = p * zz + 1.0f / 3.0f;
    p = p * zz + 1.0f;
    return (x > y ? x : y) + 2.0f * z * p;
}

// With 16 registers a kernel must have them to itself: inlined into its caller, GCC spills its accumulators.
#if defined(__AVX512F__)
#define LCTX_KERNEL inline
#else
#define LCTX_KERNEL __attribute__((noinline))
#endif

// A caller of products that stays by itself: inlined into all of its own callers, it spills what its loops need at
// every step.
#define LCTX_ALONE __attribute__((noinline, unused))
