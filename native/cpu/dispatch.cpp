// From ggml nodes to the CPU kernels.
#include "../hooks.h"
#include "../ops/nodes.h"

#include "ggml-cpu-impl.h"
#include "kernels.h"

#ifdef LCTX_EMULATE
#include "../cuda/dispatch.h"

#include <cstdlib>

// Few multiprocessors, yet enough to split the work.
static lctx_cuda_device emulated() {
    return {4, lctx_emulated_shared()};
}

static constexpr size_t EMULATED_ALIGN = 256;

// For tests, which say so in the environment: the CUDA kernels in place of these.
static bool is_emulated(const ggml_tensor * dst) {
    return getenv("LCTX_EMULATE_CUDA") && !lctx_cuda_refusal(emulated(), dst);
}
#endif

void lctx_cpu_forward(const ggml_compute_params * params, ggml_tensor * dst) {
#ifdef LCTX_EMULATE
    if (is_emulated(dst)) {
        if (params->ith == 0) {
            lctx_cuda_run({emulated(), nullptr, (char *)GGML_PAD((uintptr_t)params->wdata, EMULATED_ALIGN)}, dst);
        }
        return;
    }
#endif
    switch ((lctx_op)dst->op_params[0]) {
        case LCTX_OP_ANGLES:    return lctx_cpu_angles(params, lctx_angles_args_of(dst));
        case LCTX_OP_STORE:     return lctx_cpu_store(params, lctx_store_args_of(dst));
        case LCTX_OP_ATTEND:    return lctx_cpu_attend(params, lctx_attend_args_of(dst));
        case LCTX_OP_SUMMARIZE: return lctx_cpu_summarize(params, lctx_summarize_args_of(dst));
        case LCTX_OP_SELECT:    return lctx_cpu_select(params, lctx_select_args_of(dst));
        case LCTX_OP_VOTE:      return lctx_cpu_vote(params, lctx_vote_args_of(dst));
        case LCTX_OP_EVICT:     return lctx_cpu_evict(params, lctx_evict_args_of(dst));
        case LCTX_OP_FETCH:     return lctx_cpu_fetch(params, lctx_fetch_args_of(dst));
        case LCTX_OP_INDEX:     return lctx_cpu_index(params, lctx_index_args_of(dst));
    }
    GGML_ABORT("unknown LCTX sub-op %d", dst->op_params[0]);
}

size_t lctx_cpu_wsize(const ggml_tensor * dst, int n_tasks) {
#ifdef LCTX_EMULATE
    if (is_emulated(dst)) {
        return lctx_cuda_wsize(emulated(), dst) + EMULATED_ALIGN;
    }
#endif
    switch ((lctx_op)dst->op_params[0]) {
        case LCTX_OP_ANGLES:    return 0;
        case LCTX_OP_STORE:     return lctx_cpu_store_wsize(lctx_store_args_of(dst), n_tasks);
        case LCTX_OP_ATTEND:    return lctx_cpu_attend_wsize(lctx_attend_args_of(dst), n_tasks);
        case LCTX_OP_SUMMARIZE: return lctx_cpu_summarize_wsize(lctx_summarize_args_of(dst), n_tasks);
        case LCTX_OP_SELECT:    return lctx_cpu_select_wsize(lctx_select_args_of(dst), n_tasks);
        case LCTX_OP_VOTE:      return lctx_cpu_vote_wsize(lctx_vote_args_of(dst), n_tasks);
        case LCTX_OP_EVICT:     return lctx_cpu_evict_wsize(lctx_evict_args_of(dst), n_tasks);
        case LCTX_OP_FETCH:     return lctx_cpu_fetch_wsize(lctx_fetch_args_of(dst), n_tasks);
        case LCTX_OP_INDEX:     return lctx_cpu_index_wsize(lctx_index_args_of(dst), n_tasks);
    }
    return 0;
}
