#include "roofline.h"

#include "../../cpu/gemm.h"
#include "../../weights/bytes.h"

namespace {

constexpr int K_DIM = 128;  // of one product: both factors fit into 32 KiB
constexpr int RN = 3;       // tile of RM rows and RN vectors, as large as the registers allow
constexpr int RM = LCTX_VL == 8 ? 4 : 8;

// The compiler must not know what the factors are, nor that nobody reads the result.
inline void forget(void * data) {
    asm volatile("" : : "r"(data) : "memory");
}

// Repeat a product of factors whose elements hold N numbers each. Returns operations.
template <int N, typename A, typename B, typename C, typename F> double repeat(int64_t n_product, F && product) {
    alignas(64) A a[K_DIM / N * RM] = {};
    alignas(64) B b[K_DIM / N * RN * LCTX_VL] = {};
    alignas(64) C c[RM * RN * LCTX_VL];
    for (int64_t i = 0; i < n_product; i++) {
        forget(a), forget(b);
        product(a, b, c);
        forget(c);
    }
    return 2.0 * RM * RN * LCTX_VL * K_DIM * (double)n_product;
}

template <int N, typename T> double repeat_tile(int64_t n_product) {
    return repeat<N, T, T, float>(n_product, [](const T * a, const T * b, float * c) {
        lctx_gemm_tile<RM, RN>(K_DIM / N, a, 1, RM, b, RN * LCTX_VL, lctx_rows_in_order{c, RN * LCTX_VL}, 0, 0, false);
    });
}

#if LCTX_HAS_BYTES
void product_i8(const int32_t * a, const int32_t * b, int32_t * c) {
    lctx_vi acc[RM][RN] = {};
    for (int k = 0; k < K_DIM / 4; k++) {
        lctx_vi bk[RN];
        memcpy(bk, b + k * RN * LCTX_VL, sizeof(bk));
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
    return repeat_tile<1, float>(n_product);
}

double lctx_cpu_gemm_bf16(int64_t n_product) {
#if LCTX_HAS_PAIRS
    return repeat_tile<2, lctx_pair>(n_product);
#else
    (void)n_product;
    return 0.0;
#endif
}

double lctx_cpu_gemm_i8(int64_t n_product) {
#if LCTX_HAS_BYTES
    return repeat<4, int32_t, int32_t, int32_t>(n_product, product_i8);
#else
    (void)n_product;
    return 0.0;
#endif
}
