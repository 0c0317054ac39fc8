#include "roofline.h"

#include "../../cpu/gemm.h"

namespace {

constexpr int K_DIM = 128;  // of one product: both factors fit into 32 KiB
constexpr int RN = 3;       // tile of RM rows and RN vectors, as large as the registers allow
constexpr int RM = LCTX_VL == 8 ? 4 : 8;

// The compiler must not know what the factors are, nor that the result is never read.
inline void forget(void * data) {
    asm volatile("" : : "r"(data) : "memory");
}

// Repeat a product of factors whose elements hold N numbers each. Returns operations.
template <int N, typename T> double repeat(int64_t n_product) {
    alignas(64) T a[K_DIM / N * RM] = {};
    alignas(64) T b[K_DIM / N * RN * LCTX_VL] = {};
    alignas(64) float c[RM * RN * LCTX_VL];
    for (int64_t i = 0; i < n_product; i++) {
        forget(a), forget(b);
        lctx_gemm_tile<RM, RN>(K_DIM / N, a, 1, RM, b, RN * LCTX_VL, lctx_rows_in_order{c, RN * LCTX_VL}, 0, 0, false);
        forget(c);
    }
    return 2.0 * RM * RN * LCTX_VL * K_DIM * (double)n_product;
}

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
    return repeat<1, float>(n_product);
}

double lctx_cpu_gemm_bf16(int64_t n_product) {
#if LCTX_HAS_PAIRS
    return repeat<2, lctx_pair>(n_product);
#else
    (void)n_product;
    return 0.0;
#endif
}
