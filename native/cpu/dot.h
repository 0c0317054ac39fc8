// Products of four bytes in one step (dpbusd: AVX-512 VNNI, AVX-VNNI).
#pragma once

#include "vec.h"

#if defined(__AVX512VNNI__)
#define LCTX_HAS_DOT 1
#include <immintrin.h>
// In every lane: sum + the products of four unsigned bytes with four signed ones, exactly.
static inline lctx_vi lctx_vdot_bytes(lctx_vi sum, lctx_vi unsigned_bytes, lctx_vi signed_bytes) {
    return (lctx_vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define LCTX_HAS_DOT 1
#include <immintrin.h>
static inline lctx_vi lctx_vdot_bytes(lctx_vi sum, lctx_vi unsigned_bytes, lctx_vi signed_bytes) {
    return (lctx_vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
}
#else
#define LCTX_HAS_DOT 0
#endif
