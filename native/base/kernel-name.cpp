#include "kernel-name.h"

#include "ggml-cpu.h"

#include <cstring>

// The kernels are compiled with the flags of ggml-cpu.
static const char * cpu_kernel_name() {
    return ggml_cpu_has_avx512()        ? "AVX512"
           : ggml_cpu_has_avx2()        ? "AVX2"
           : ggml_cpu_has_avx()         ? "AVX"
           : ggml_cpu_has_matmul_int8() ? "NEON with dot products, i8mm"
           : ggml_cpu_has_dotprod()     ? "NEON with dot products"
           : ggml_cpu_has_neon()        ? "NEON"
                                        : "128-bit vectors";
}

std::string lctx_kernel_name(ggml_backend_dev_t dev) {
    const char * backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
    return strcmp(backend, "CPU") == 0 ? cpu_kernel_name() : strcmp(backend, "CUDA") == 0 ? "mma" : backend;
}
