// From ggml nodes to the CPU kernels.
#include "../base/backend.h"
#include "../hooks.h"
#include "../ops/nodes.h"

#include "ggml-cpu-impl.h"
#include "kernels.h"

static const lctx_kernels * registered = nullptr;

void lctx_cpu_use(const lctx_kernels * kernels) {
    registered = kernels;
}

static bool is_taken(const ggml_tensor * node) {
    return registered && registered->takes(node);
}

void lctx_cpu_forward(const ggml_compute_params * params, ggml_tensor * dst) {
    if (is_taken(dst)) {
        if (params->ith == 0) {
            registered->run(dst, params->wdata);
        }
        return;
    }
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
    if (is_taken(dst)) {
        return registered->wsize(dst);
    }
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
