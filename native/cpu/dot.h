// Products of four bytes in one step (dpbusd: AVX-512 VNNI, AVX-VNNI; sdot: ARMv8.2), and of matrices (smmla: i8mm).
//
// One factor is small: below 128 it is the same with a sign and without one. LCTX_DOT_SIGNED says which of both a
// larger one may have.
#pragma once

#include "vec.h"

#if defined(__AVX512VNNI__)
#define LCTX_HAS_DOT 1
#include <immintrin.h>
// In every lane: sum + the products of four bytes with four signed ones, exactly.
static inline lctx_vi lctx_vdot_bytes(lctx_vi sum, lctx_vi unsigned_bytes, lctx_vi signed_bytes) {
    return (lctx_vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define LCTX_HAS_DOT 1
#include <immintrin.h>
static inline lctx_vi lctx_vdot_bytes(lctx_vi sum, lctx_vi unsigned_bytes, lctx_vi signed_bytes) {
    return (lctx_vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define LCTX_HAS_DOT 1
#define LCTX_DOT_SIGNED 1
#include <arm_neon.h>
static inline lctx_vi lctx_vdot_bytes(lctx_vi sum, lctx_vi bytes, lctx_vi signed_bytes) {
    return (lctx_vi)vdotq_s32((int32x4_t)sum, (int8x16_t)bytes, (int8x16_t)signed_bytes);
}
// The same with the four bytes of one lane, which need no broadcast: that would take the units that multiply.
template <int LANE> static inline lctx_vi lctx_vdot_lane(lctx_vi sum, lctx_vi bytes_of_lanes, lctx_vi signed_bytes) {
    return (lctx_vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)signed_bytes, (int8x16_t)bytes_of_lanes, LANE);
}
#else
#define LCTX_HAS_DOT 0
#endif

#ifndef LCTX_DOT_SIGNED
#define LCTX_DOT_SIGNED 0
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8) && LCTX_DOT_SIGNED
#define LCTX_HAS_I8MM 1
// sum + the products of two rows of eight signed bytes with two others: lanes a0 b0, a0 b1, a1 b0, a1 b1.
static inline lctx_vi lctx_vmatmul(lctx_vi sum, lctx_vi a, lctx_vi b) {
    return (lctx_vi)vmmlaq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}

// For lctx_vpick: the lower or upper lanes of both in turn, and one half of each.
typedef std::integer_sequence<int, 0, 4, 1, 5> lctx_lower_in_turn;
typedef std::integer_sequence<int, 2, 6, 3, 7> lctx_upper_in_turn;
typedef std::integer_sequence<int, 0, 1, 4, 5> lctx_lower_halves;
typedef std::integer_sequence<int, 2, 3, 6, 7> lctx_upper_halves;
#else
#define LCTX_HAS_I8MM 0
#endif

#if LCTX_DOT_SIGNED
// f(lane) for every lane, a constant.
template <typename F, int... LANE> static inline void lctx_each_lane(F && f, std::integer_sequence<int, LANE...>) {
    (f(std::integral_constant<int, LANE>{}), ...);
}
#endif
