// Opens the devices on which the runs of single ops compute.
#include "run.h"

lctx_backend lctx_backend_of(const char * device, int32_t n_threads) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(device ? device : "CPU");
    if (!dev) {
        std::string names;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            names += std::string(i ? ", " : "") + ggml_backend_dev_name(ggml_backend_dev_get(i));
        }
        throw lctx_refusal("there is no device '" + std::string(device ? device : "CPU") + "', but: " + names);
    }
    const lctx_backend backend(ggml_backend_dev_init(dev, nullptr), ggml_backend_free);
    lctx_require(backend != nullptr, "the device could not be opened");
    if (lctx_on_cpu(backend)) {
        ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    }
    return backend;
}

lctx_graph lctx_graph_run::graph_of(const std::vector<ggml_tensor *> & nodes) const {
    lctx_graph g = {ggml_context_ptr(ggml_init({ggml_graph_overhead_custom(nodes.size(), false), nullptr, true})),
                    nullptr};
    g.graph = ggml_new_graph_custom(g.ctx.get(), nodes.size(), false);
    for (ggml_tensor * node : nodes) {
        if (!ggml_backend_supports_op(backend.get(), node)) {
            throw lctx_refusal(std::string(ggml_backend_name(backend.get())) + " cannot run " + ggml_op_desc(node) +
                               " with these shapes and types");
        }
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        ggml_graph_add_node(g.graph, node);
    }
    return g;
}

double lctx_graph_run::compute(const lctx_graph & graph) const {
    const auto t0 = std::chrono::steady_clock::now();
    lctx_require(ggml_backend_graph_compute(backend.get(), graph.graph) == GGML_STATUS_SUCCESS, "the graph failed");
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count();
}

size_t lctx_scratch::free_bytes() const {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend_.get()), &free, &total);
    return free;
}

uint64_t lctx_scratch::bytes(size_t tensors) const {
    const size_t now = free_bytes();
    return lctx_on_cpu(backend_) || now + tensors > free_ ? 0 : free_ - now - tensors;
}
