// What the patches call, and nothing else. Each call site in llama.cpp and ggml is one or two lines; see patches/README.md.
#pragma once

#include <stddef.h>

struct ggml_compute_params;
struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// Internal to the library, although lctx.map exports lctx_*.
#define LCTX_INTERNAL __attribute__((visibility("hidden")))

// Run the LCTX node dst; called by every thread of the CPU backend.
LCTX_INTERNAL void lctx_cpu_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of work buffer that lctx_cpu_forward needs for dst with n_tasks threads.
LCTX_INTERNAL size_t lctx_cpu_wsize(const struct ggml_tensor * dst, int n_tasks);

#ifdef __cplusplus
}

// The same of the CUDA backend: start the kernels of dst in the stream of ctx; whether a device can run op, whose sources need not have
// memory yet.
struct ggml_backend_cuda_context;
LCTX_INTERNAL void lctx_cuda_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
LCTX_INTERNAL bool lctx_cuda_supported(int device, const ggml_tensor * op);

struct llama_cparams;
struct llama_memory_i;
struct llama_memory_params;
struct llama_model;
struct llm_graph_context;
class llm_graph_input_attn_kv;

// The memory of the method that is pending for this thread (lctx_context_create) or named by LCTX_METHOD.
// nullptr: no method, llama.cpp goes on as always. Throws std::runtime_error with the reason when it cannot be served.
llama_memory_i * lctx_create_memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams);

// The graph input of our memory, or nullptr when the context runs on another memory.
llm_graph_input_attn_kv * lctx_build_attn_inp(const llm_graph_context & graph);

// The attention of one layer through our memory, or nullptr when inp is not ours. Same arguments as build_attn.
ggml_tensor * lctx_build_attn(const llm_graph_context & graph, llm_graph_input_attn_kv * inp, ggml_tensor * wo, ggml_tensor * wo_b,
                              ggml_tensor * wo_s, ggml_tensor * q_cur, ggml_tensor * k_cur, ggml_tensor * v_cur, ggml_tensor * kq_b,
                              ggml_tensor * sinks, float kq_scale, int il);
#endif
