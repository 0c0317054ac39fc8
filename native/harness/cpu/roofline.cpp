#include "roofline.h"

#include "../../cpu/bytes.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int K_DIM = 128;  // of one product: both factors fit into 32 KiB
constexpr int RN = 3;       // tile of RM rows and RN vectors, as large as the registers allow
constexpr int RM = LCTX_VL == 8 ? 4 : 8;

// The compiler must not know what the factors are, nor that nobody reads the result.
inline void forget(void * data) {
    asm volatile("" : : "r"(data) : "memory");
}

void product_f32(const float * a, const float * b, float * c) {
    lctx_vf acc[RM][RN] = {};
    for (int k = 0; k < K_DIM; k++) {
        lctx_vf bk[RN];
        for (int j = 0; j < RN; j++) {
            bk[j] = lctx_vload(b + (k * RN + j) * LCTX_VL);
        }
        for (int i = 0; i < RM; i++) {
            const lctx_vf ai = lctx_vset(a[k * RM + i]);
            for (int j = 0; j < RN; j++) {
                acc[i][j] += ai * bk[j];
            }
        }
    }
    memcpy(c, acc, sizeof(acc));
}

#if defined(__AVX512BF16__)
void product_bf16(const uint32_t * a, const uint16_t * b, float * c) {
    __m512 acc[RM][RN] = {};
    for (int k = 0; k < K_DIM / 2; k++) {
        __m512bh bk[RN];
        for (int j = 0; j < RN; j++) {
            bk[j] = (__m512bh)_mm512_loadu_si512(b + (k * RN + j) * 32);
        }
        for (int i = 0; i < RM; i++) {
            const auto ai = (__m512bh)_mm512_set1_epi32((int32_t)a[k * RM + i]);
            for (int j = 0; j < RN; j++) {
                acc[i][j] = _mm512_dpbf16_ps(acc[i][j], ai, bk[j]);
            }
        }
    }
    memcpy(c, acc, sizeof(acc));
}
#endif

#if LCTX_HAS_BYTES
void product_i8(const int32_t * a, const uint8_t * b, int32_t * c) {
    lctx_vi acc[RM][RN] = {};
    for (int k = 0; k < K_DIM / 4; k++) {
        lctx_vi bk[RN];
        memcpy(bk, b + k * sizeof(bk), sizeof(bk));
        for (int i = 0; i < RM; i++) {
            for (int j = 0; j < RN; j++) {
                acc[i][j] = lctx_vdot(acc[i][j], bk[j], a[k * RM + i]);
            }
        }
    }
    memcpy(c, acc, sizeof(acc));
}
#endif

}  // namespace

float lctx_cpu_read(const float * data, size_t n) {
    constexpr int N_SUM = 8;  // additions that wait for each other would be the limit
    lctx_vf sum[N_SUM] = {};
    for (size_t i = 0; i < n; i += (size_t)N_SUM * LCTX_VL) {
        for (int j = 0; j < N_SUM; j++) {
            sum[j] += lctx_vload(data + i + j * LCTX_VL);
        }
    }
    float total = 0.0f;
    for (int j = 0; j < N_SUM; j++) {
        total += lctx_vsum(sum[j]);
    }
    return total;
}

double lctx_cpu_gemm_f32(int64_t n_product) {
    alignas(64) float a[K_DIM * RM] = {}, b[K_DIM * RN * LCTX_VL] = {}, c[RM * RN * LCTX_VL];
    for (int64_t i = 0; i < n_product; i++) {
        forget(a), forget(b);
        product_f32(a, b, c);
        forget(c);
    }
    return 2.0 * RM * RN * LCTX_VL * K_DIM * (double)n_product;
}

double lctx_cpu_gemm_bf16(int64_t n_product) {
#if defined(__AVX512BF16__)
    alignas(64) uint32_t a[K_DIM / 2 * RM] = {};
    alignas(64) uint16_t b[K_DIM / 2 * RN * 32] = {};
    alignas(64) float c[RM * RN * LCTX_VL];
    for (int64_t i = 0; i < n_product; i++) {
        forget(a), forget(b);
        product_bf16(a, b, c);
        forget(c);
    }
    return 2.0 * RM * RN * LCTX_VL * K_DIM * (double)n_product;
#else
    (void)n_product;
    return 0.0;
#endif
}

double lctx_cpu_gemm_i8(int64_t n_product) {
#if LCTX_HAS_BYTES
    alignas(64) int32_t a[K_DIM / 4 * RM] = {};
    alignas(64) uint8_t b[K_DIM * RN * LCTX_VL] = {};
    alignas(64) int32_t c[RM * RN * LCTX_VL];
    for (int64_t i = 0; i < n_product; i++) {
        forget(a), forget(b);
        product_i8(a, b, c);
        forget(c);
    }
    return 2.0 * RM * RN * LCTX_VL * K_DIM * (double)n_product;
#else
    (void)n_product;
    return 0.0;
#endif
}
