// The patches call these functions, and nothing else. Each call site in llama.cpp and ggml is one or two lines; see
// patches/README.md.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
#endif

struct ggml_compute_params;
struct ggml_tensor;
struct ggml_threadpool;

#ifdef __cplusplus
extern "C" {
#endif

// Internal to the library, although lctx.map exports lctx_*.
#define LCTX_INTERNAL __attribute__((visibility("hidden")))

// Run the LCTX node dst; called by every thread of the CPU backend.
LCTX_INTERNAL void lctx_cpu_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// Bytes of work buffer that lctx_cpu_forward needs for dst with n_tasks threads.
LCTX_INTERNAL size_t lctx_cpu_wsize(const struct ggml_tensor * dst, int n_tasks);

// A graph begins with n threads, on its own pool or, where that is NULL, a borrowed one, which is returned.
LCTX_INTERNAL struct ggml_threadpool * lctx_threads_begin(struct ggml_threadpool * own, int n);
LCTX_INTERNAL void lctx_threads_end(struct ggml_threadpool * own, struct ggml_threadpool * used);

// Wait at a barrier while *n_passed is `before`, and wake those who do.
LCTX_INTERNAL void lctx_barrier_wait(int * n_passed, int before);
LCTX_INTERNAL void lctx_barrier_open(int * n_passed);

#ifdef __cplusplus
}

// A step of the search for what a grammar allows, over n elements; throws when the thread's grammar has spent its
// budget.
LCTX_INTERNAL void lctx_grammar_step(size_t n);

// Split the pieces of a text, whose lengths are given, by an expression of a vocabulary, and return the lengths of what
// comes of it: matches, and what is between them. Texts are bytes, of which those above 127 stand for classes of
// characters, or code points. Throws std::runtime_error for an expression that is not known.
LCTX_INTERNAL std::vector<size_t> lctx_split(const std::string & text, const std::string & expression,
                                             const std::vector<size_t> & lengths);
LCTX_INTERNAL std::vector<size_t> lctx_split(const std::wstring & text, const std::wstring & expression,
                                             const std::vector<size_t> & lengths);

// The CUDA backend calls these: start the kernels of dst in the stream of ctx; return whether a device can run op,
// whose sources need not have memory yet.
struct ggml_backend_cuda_context;
LCTX_INTERNAL void lctx_cuda_forward(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
LCTX_INTERNAL bool lctx_cuda_supported(int device, const ggml_tensor * op);

// The Vulkan backend calls these: record the kernels of dst into the command buffer of sub.
struct ggml_backend_vk_context;
struct vk_context_struct;
struct vk_device_struct;
LCTX_INTERNAL void lctx_vk_forward(ggml_backend_vk_context * ctx, const std::shared_ptr<vk_context_struct> & sub,
                                   ggml_tensor * dst);
LCTX_INTERNAL bool lctx_vk_supported(const std::shared_ptr<vk_device_struct> & device, const ggml_tensor * op);

struct llama_cparams;
struct llama_memory_i;
struct llama_memory_params;
struct llama_model;
struct llm_graph_context;
class llama_kv_cache_iswa_context;
class llama_memory_hybrid_context;
class llama_memory_hybrid_iswa_context;
class llm_graph_input_attn_k;
class llm_graph_input_attn_kv;
class llm_graph_input_attn_kv_iswa;
class llm_graph_input_i;
class llm_graph_input_mem_hybrid;
class llm_graph_input_mem_hybrid_iswa;
class llm_graph_input_mem_hybrid_k;
class llm_graph_input_rs;

// The memory of a context is about to be made. Where a method is pending for this thread (lctx_context_create) or named
// by LCTX_METHOD, our cache claims the layers with full attention. Throws lctx_refusal with the reason when the model
// cannot be served.
void lctx_memory_begin(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams);
// Cells that one of llama.cpp's own caches needs: few where it keeps no layer and is not asked for positions.
uint32_t lctx_claim_cells(const llama_model & model, uint32_t n_cell);
// True when the cache need not hold layer il: our cache has claimed it. source: the layer whose rows it reads, itself
// or an earlier one.
bool lctx_claim_layer(uint32_t il, int32_t source, int swa_type);
// Return the memory that the context gets: ours and what stays llama.cpp's, or the memory as it came when there is no
// method. Takes ownership.
llama_memory_i * lctx_memory_end(const llama_model & model, const llama_memory_params & params,
                                 const llama_cparams & cparams, llama_memory_i * memory);

// The graph input of our cache, or nullptr when the context runs on another memory; _k: of models with latent
// attention.
llm_graph_input_attn_kv * lctx_build_attn_inp(const llm_graph_context & graph);
llm_graph_input_attn_k * lctx_build_attn_inp_k(const llm_graph_context & graph);

// llama.cpp's inputs; where our cache is used in addition to its memory, they have ours too.
std::unique_ptr<llm_graph_input_attn_kv_iswa> lctx_iswa_input(const llm_graph_context & graph,
                                                              const llama_kv_cache_iswa_context * mctx);
std::unique_ptr<llm_graph_input_mem_hybrid> lctx_hybrid_input(const llm_graph_context & graph,
                                                              std::unique_ptr<llm_graph_input_attn_kv> attn,
                                                              std::unique_ptr<llm_graph_input_rs> rs,
                                                              const llama_memory_hybrid_context * mctx);
std::unique_ptr<llm_graph_input_mem_hybrid_k> lctx_hybrid_k_input(const llm_graph_context & graph,
                                                                  std::unique_ptr<llm_graph_input_attn_k> attn,
                                                                  std::unique_ptr<llm_graph_input_rs> rs,
                                                                  const llama_memory_hybrid_context * mctx);
std::unique_ptr<llm_graph_input_mem_hybrid_iswa> lctx_hybrid_iswa_input(
    const llm_graph_context & graph, std::unique_ptr<llm_graph_input_attn_kv_iswa> attn,
    std::unique_ptr<llm_graph_input_rs> rs, const llama_memory_hybrid_iswa_context * mctx);

// The attention of one layer through our cache, or nullptr when inp or the layer is not ours. Same arguments as
// build_attn.
ggml_tensor * lctx_build_attn(const llm_graph_context & graph, llm_graph_input_i * inp, ggml_tensor * wo,
                              ggml_tensor * wo_b, ggml_tensor * wo_s, ggml_tensor * q_cur, ggml_tensor * k_cur,
                              ggml_tensor * v_cur, ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                              float kq_scale, int il);
#endif
