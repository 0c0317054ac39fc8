// lctx_roofline_run: bandwidths and rate of matrix products. For bench.
#include "roofline.h"

#include "../platform/memory.h"
#include "cpu/roofline.h"

namespace {

constexpr size_t COLD_SIZES = 4, MEASURE_SIZES = 8;  // of the last-level cache
constexpr size_t READ_STEP = 256;                    // floats, as lctx_cpu_read wants them
constexpr size_t COPY_BYTES = 256 << 20;
constexpr int32_t N_RUN = 8, N_COPY = 4, N_COPY_RUN = 3;
constexpr int64_t N_PRODUCT = 100000;  // tens of milliseconds

template <double (*F)(int64_t)> void multiply(ggml_tensor * dst, int ith, int, void *) {
    ((float *)dst->data)[ith] = (float)F(N_PRODUCT);
}

// Operations per second of all threads together; 0 when there is no such product.
template <double (*F)(int64_t)> double gemm_rate(int32_t n_threads) {
    lctx_graph_run g(lctx_backend_of(nullptr, n_threads), 8);
    ggml_tensor * done = ggml_custom_4d(g.ctx.get(), GGML_TYPE_F32, n_threads, 1, 1, 1, nullptr, 0, multiply<F>,
                                        GGML_N_TASKS_MAX, nullptr);
    g.allocate();
    const std::vector<double> us = g.times(g.graph_of({done}), N_RUN, [] {});
    return F(0) == 0.0 && F(1) == 0.0 ? 0.0
                                      : n_threads * F(1) * N_PRODUCT / (*std::min_element(us.begin(), us.end()) * 1e-6);
}

// Bytes per second, read and written.
double copy_rate(const lctx_backend & backend) {
    lctx_graph_run g(backend, 8);
    ggml_tensor * from = g.tensor(GGML_TYPE_F32, COPY_BYTES / sizeof(float));
    ggml_tensor * to = g.tensor(GGML_TYPE_F32, COPY_BYTES / sizeof(float));
    ggml_tensor * copied = ggml_cpy(g.ctx.get(), from, to);
    g.allocate();
    ggml_backend_tensor_memset(from, 0, 0, COPY_BYTES);  // on the CPU, what was never written is one page of zeros
    const std::vector<ggml_tensor *> nodes(N_COPY, copied);
    const std::vector<double> us = g.times(g.graph_of(nodes), N_COPY_RUN, [] {});
    return 2.0 * N_COPY * COPY_BYTES / (*std::min_element(us.begin(), us.end()) * 1e-6);
}

void run(lctx_roofline_args & args) {
    lctx_require(args.n_threads > 0, "n_threads must be positive");
    args.copy_bandwidth = copy_rate(lctx_backend_of(args.device, args.n_threads));
    if (args.device) {
        args.cache_bytes = 0;
        args.read_bandwidth = args.gemm_f32 = args.gemm_bf16 = 0.0;
        return;
    }
    args.cache_bytes = lctx_cache_bytes();
    lctx_stream stream(args.n_threads, MEASURE_SIZES * args.cache_bytes);
    const std::vector<double> us = stream.run(N_RUN);
    args.read_bandwidth = (double)(MEASURE_SIZES * args.cache_bytes) / (*std::min_element(us.begin(), us.end()) * 1e-6);
    args.gemm_f32 = gemm_rate<lctx_cpu_gemm_f32>(args.n_threads);
    args.gemm_bf16 = gemm_rate<lctx_cpu_gemm_bf16>(args.n_threads);
}

}  // namespace

size_t lctx_cache_bytes() {
    const size_t most = lctx_largest_cache();
    lctx_require(most > 0, "the size of the last-level cache is unknown: the system does not say");
    return most;
}

lctx_stream::lctx_stream(int32_t n_threads, size_t n_bytes)
    : data_(n_bytes / sizeof(float) / (READ_STEP * n_threads) * READ_STEP * n_threads, 1.0f),
      g_(lctx_backend_of(nullptr, n_threads), 8) {
    ggml_tensor * sums =
        ggml_custom_4d(g_.ctx.get(), GGML_TYPE_F32, n_threads, 1, 1, 1, nullptr, 0, read, GGML_N_TASKS_MAX, this);
    g_.allocate();
    graph_ = g_.graph_of({sums});
}

std::vector<double> lctx_stream::run(int32_t n) {
    return g_.times(graph_, n, [] {});
}

void lctx_stream::read(ggml_tensor * dst, int ith, int nth, void * self) {
    const std::vector<float> & data = ((lctx_stream *)self)->data_;
    const size_t n = data.size() / nth;
    ((float *)dst->data)[ith] = lctx_cpu_read(data.data() + ith * n, n);
}

lctx_cooler::lctx_cooler(const lctx_op_args & a) {
    if (a.cold) {
        lctx_require(!a.device, "cold is for the CPU: on another device many layers do the same");
        stream_ = std::make_unique<lctx_stream>(a.n_threads, COLD_SIZES * lctx_cache_bytes());
    }
}

void lctx_cooler::operator()() {
    if (stream_) {
        stream_->run(1);
    }
}

void lctx_time_attend(lctx_op_args & a, const lctx_graph_run & g, const std::vector<ggml_tensor *> & nodes) {
    lctx_cooler cool(a);
    std::vector<double> us = g.times(g.graph_of(nodes), std::max(1, a.n_repeat), cool);
    for (double & time : us) {
        time /= (double)nodes.size();
    }
    a.attend_us = *std::min_element(us.begin(), us.end());
    if (a.times) {
        std::copy(us.begin(), us.end(), a.times);
    }
}

int32_t lctx_roofline_run(lctx_roofline_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
