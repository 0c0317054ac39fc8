#include "dispatch.h"

#include "../ops/nodes.h"
#include "hadamard.h"

// head_dim of the tensor-core kernels: whole vectors.
static bool fits(int64_t head_dim) {
    return head_dim % 8 == 0 && head_dim <= LCTX_CUDA_MOST_DIM;
}

const char * lctx_cuda_refusal(const lctx_cuda_device & device, const ggml_tensor * node) {
    switch ((lctx_op)node->op_params[0]) {
        case LCTX_OP_ATTEND:
        case LCTX_OP_VOTE:   {
            const lctx_attend_args a = lctx_attend_args_of(node);
            return fits(a.head_dim_k) && fits(a.head_dim_v) ? nullptr : "head_dim must be a multiple of 8 and at most 576";
        }
        case LCTX_OP_CENTER: return node->src[0]->ne[0] % 8 == 0 ? nullptr : "head_dim must be a multiple of 8";
        case LCTX_OP_STORE:  {
            const lctx_hadamard h = lctx_store_args_of(node).params.hadamard;
            return lctx_max(h.k, h.v) <= LCTX_MOST_BLOCK ? nullptr : "channels that are transformed together must be 512 at most";
        }
        case LCTX_OP_SUMMARIZE:
        case LCTX_OP_SELECT:    {
            const bool is_select = node->op_params[0] == LCTX_OP_SELECT;
            if (is_select && lctx_cuda_select_shared(lctx_select_args_of(node)) > device.max_shared) {
                return "there are more chunks, or more channels of heads that choose together, than fit into the shared memory of the GPU";
            }
            return node->src[0]->ne[0] % 8 == 0 ? nullptr : "head_dim must be a multiple of 8";
        }
        default: return nullptr;
    }
}

size_t lctx_cuda_wsize(const lctx_cuda_device & device, const ggml_tensor * node) {
    switch ((lctx_op)node->op_params[0]) {
        case LCTX_OP_ANGLES:
        case LCTX_OP_STORE:     return 0;
        case LCTX_OP_ATTEND:    return lctx_cuda_attend_wsize(device, lctx_attend_args_of(node));
        case LCTX_OP_SUMMARIZE: return lctx_cuda_summarize_wsize(device, lctx_summarize_args_of(node));
        case LCTX_OP_SELECT:    return lctx_cuda_select_wsize(device, lctx_select_args_of(node));
        case LCTX_OP_VOTE:      return lctx_cuda_vote_wsize(device, lctx_vote_args_of(node));
        case LCTX_OP_CENTER:    return lctx_cuda_center_wsize(device, lctx_center_args_of(node));
        case LCTX_OP_EVICT:     return lctx_cuda_evict_wsize(device, lctx_evict_args_of(node));
        case LCTX_OP_FETCH:     return lctx_cuda_fetch_wsize(device, lctx_fetch_args_of(node));
    }
    return 0;
}

void lctx_cuda_run(const lctx_cuda_queue & queue, ggml_tensor * node) {
    switch ((lctx_op)node->op_params[0]) {
        case LCTX_OP_ANGLES:    return lctx_cuda_angles(queue, lctx_angles_args_of(node));
        case LCTX_OP_STORE:     return lctx_cuda_store(queue, lctx_store_args_of(node));
        case LCTX_OP_ATTEND:    return lctx_cuda_attend(queue, lctx_attend_args_of(node));
        case LCTX_OP_SUMMARIZE: return lctx_cuda_summarize(queue, lctx_summarize_args_of(node));
        case LCTX_OP_SELECT:    return lctx_cuda_select(queue, lctx_select_args_of(node));
        case LCTX_OP_VOTE:      return lctx_cuda_vote(queue, lctx_vote_args_of(node));
        case LCTX_OP_CENTER:    return lctx_cuda_center(queue, lctx_center_args_of(node));
        case LCTX_OP_EVICT:     return lctx_cuda_evict(queue, lctx_evict_args_of(node));
        case LCTX_OP_FETCH:     return lctx_cuda_fetch(queue, lctx_fetch_args_of(node));
    }
}
