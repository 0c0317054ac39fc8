// The handles behind the C API.
#pragma once

#include "base/firewall.h"
#include "foreign/foreign.h"
#include "lctx.h"
#include "llama.h"
#include "memory/context-memory.h"
#include "mtp/mtp.h"
#include "overrides/overrides.h"
#include "rpc/rpc.h"
#include "trace/trace.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

struct lctx_model {
    llama_model * model = nullptr;
    const llama_vocab * vocab = nullptr;
    bool vocab_only = false;
    bool dry = false;    // nothing may be evaluated
    bool plain = false;  // weights are as in the file
    std::string error;
    std::vector<std::shared_ptr<lctx_rpc_server>> servers;
    lctx_overrides overrides;
};

struct lctx_context {
    const lctx_model * model = nullptr;  // dry: only for lctx_estimate
    llama_context * ctx = nullptr;
    lctx_context_memory * memory = nullptr;  // nullptr: llama.cpp's own cache
    uint32_t n_ctx = 0;                      // as asked, at most lctx_positions; llama.cpp pads it
    uint32_t n_batch = 0;                    // as asked, at most llama.cpp's: embeddings make that one larger
    std::string method, why;
    mutable std::string error;  // of the last call, those that change nothing included
    const volatile int32_t * abort_flag = nullptr;
    bool has_nan =
        false;  // rows of llama.cpp's own memory may be NaN, which later sequences would read in cells that are masked
    lctx_trace trace;
    lctx_foreign foreign;
    std::unique_ptr<lctx_mtp> mtp;  // nullptr: nothing is drafted by the model's own block
    // one batch of n_batch tokens, reused
    std::vector<llama_pos> pos;
    std::vector<int32_t> n_seq_id;
    std::vector<llama_seq_id> seq;
    std::vector<llama_seq_id *> seq_id;  // to the entries of seq
    std::vector<int8_t> output;
};

// Run f, which asks the memory of a context: LCTX_INVALID without a method, LCTX_FAILED when f throws.
template <typename F> int32_t lctx_ask(const lctx_context * ctx, F && f) {
    int32_t status = LCTX_FAILED;
    lctx_guard(&ctx->error, [&] {
        ctx->error.clear();
        if (!ctx->memory) {
            status = LCTX_INVALID;
            throw lctx_refusal("the context runs without a method");
        }
        f();
        status = LCTX_OK;
    });
    return status;
}

// Return what n_ctx stands for: 0 is the trained context, or what the method makes of it. Throws lctx_refusal for an
// unknown method.
uint32_t lctx_context_default_n_ctx(const lctx_model & model, const lctx_context_params & params,
                                    const std::string & method);
// llama.cpp rounds n_ctx up to a multiple of 256.
inline uint32_t lctx_padded_n_ctx(uint32_t n_ctx) {
    return (n_ctx + 255) / 256 * 256;
}
// Return how many positions a model has: those that it learned a vector for each, else any.
int32_t lctx_positions(const lctx_model & model);
// Open a context whose model is set; throws lctx_refusal.
void lctx_context_open(lctx_context * ctx, const lctx_context_params & params, const std::string & method);

// The architectures that CUDA kernels were compiled for: a JSON list, or null.
const char * lctx_cuda_architectures(void);

// For llama_model_params: the servers' devices, then the GPUs of this machine, then nullptr; empty without servers.
std::vector<ggml_backend_dev_t> lctx_model_devices(const std::vector<std::shared_ptr<lctx_rpc_server>> & servers);
