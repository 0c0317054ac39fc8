// The index of rows that were written from elsewhere.
#include "../base/refusal.h"
#include "device-store.h"

#include "ggml-cpu.h"

#include <algorithm>

void lctx_device_store::index_rows(int32_t seq, int32_t first, int32_t end, int32_t n_threads) {
    constexpr int32_t MOST = 4096;  // rows of a graph
    if (!index || first >= end) {
        return;
    }
    wait();
    upload_table();
    const size_t n_tensor = 12 * layers_.size() + 1;
    const ggml_context_ptr own(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * rows = ggml_new_tensor_2d(own.get(), GGML_TYPE_I32, 4, std::min(MOST, end - first));
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(own.get(), buft));
    const ggml_backend_ptr cpu(is_host ? ggml_backend_cpu_init() : nullptr);
    if (!buffer || (is_host && !cpu)) {
        throw lctx_refusal(name() + " has no memory left to index rows");
    }
    if (cpu) {
        ggml_backend_cpu_set_n_threads(cpu.get(), n_threads);
    }
    for (int32_t from = first; from < end; from += MOST) {
        const int32_t n = std::min(MOST, end - from);
        std::vector<lctx_row> list(n);
        std::generate(list.begin(), list.end(), [&, row = from]() mutable { return lctx_row{row++, seq, 0, 0}; });
        ggml_backend_tensor_set(rows, list.data(), 0, list.size() * sizeof(lctx_row));
        const ggml_context_ptr ctx(ggml_init(
            {n_tensor * ggml_tensor_overhead() + ggml_graph_overhead_custom(layers_.size(), false), nullptr, true}));
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), layers_.size(), false);
        ggml_tensor * some = ggml_view_2d(ctx.get(), rows, 4, n, rows->nb[1], 0);
        for (const lctx_layer_heads & heads : layers_) {
            const lctx_layer l = layer(ctx.get(), heads);
            lctx_add_node(graph, lctx_index(ctx.get(), k_pool, l.table, some, l.held, index, shape_.chunks->key_bits(),
                                            shape_.hadamard.k));
        }
        if (ggml_backend_graph_compute(cpu ? cpu.get() : backend_, graph) != GGML_STATUS_SUCCESS) {
            throw lctx_refusal("rows on " + name() + " could not be indexed");
        }
        is_idle_ = true;
    }
}
