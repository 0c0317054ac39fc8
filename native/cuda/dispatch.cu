#include "dispatch.h"

#include "../ops/nodes.h"
#include "decode.h"
#include "hadamard.h"

// head_dim of the tensor-core kernels: whole vectors.
static bool fits(int64_t head_dim) {
    return head_dim % 8 == 0 && head_dim <= LCTX_CUDA_MOST_DIM;
}
constexpr const char * WHY_IT_DOES_NOT_FIT = "head_dim must be a multiple of 8 and at most 576";

static const char * why_not_dim(int64_t head_dim) {
    return head_dim % 8 == 0 ? nullptr : "head_dim must be a multiple of 8";
}

static const char * why_not_hadamard(int32_t block) {
    return block <= LCTX_MOST_HADAMARD ? nullptr : "channels that are transformed together must be 512 at most";
}

static const char * why_not_index(const lctx_index_shape & index) {
    return fits(index.head_dim) ? why_not_hadamard(index.hadamard()) : WHY_IT_DOES_NOT_FIT;
}

// Of *summarize* and *select*.
static const char * why_not_chunks(lctx_representation representation, int64_t head_dim) {
    const bool by_attention = representation == LCTX_REPRESENT_ATTENTION;
    return by_attention ? "representation=attention, the paper's, is computed on the CPU only" : why_not_dim(head_dim);
}

static const char * why_not_select(const lctx_select_args & a) {
    if (a.chunks.has_tiles() && !fits(a.head_dim)) {
        return WHY_IT_DOES_NOT_FIT;
    }
    return a.chunks.by_keys() ? why_not_index(a.index) : why_not_chunks(a.chunks.representation, a.head_dim);
}

// Rows that are left to a sub-op that follows are written in its launches; a *store* keeps them where that might be
// refused.
static bool leaves_rows(const ggml_tensor * node) {
    if (node->op != GGML_OP_LCTX) {
        return false;
    }
    if (node->op_params[0] == LCTX_OP_STORE) {
        const lctx_store_args a = lctx_store_args_of(node);
        return a.params.left && fits(a.head_dim_v) && !why_not_index({1, a.head_dim_k});
    }
    return node->op_params[0] == LCTX_OP_INDEX && lctx_params_of<lctx_index_params>(node).left &&
           leaves_rows(node->src[0]);
}

// Rows that a *store* leaves, with their index where that is what follows.
static lctx_new_rows rows_left(const ggml_tensor * store, const ggml_tensor * index = nullptr) {
    lctx_new_rows rows = {lctx_store_args_of(store), {}};
    if (index) {
        const lctx_index_args a = lctx_index_args_of(index);
        rows.store.cache.index = a.cache.index, rows.index = a.index;
    }
    return rows;
}

static void run_index(const lctx_cuda_queue & queue, const ggml_tensor * node) {
    if (leaves_rows(node)) {
        return;
    }
    if (leaves_rows(node->src[0])) {
        return lctx_cuda_store(queue, rows_left(node->src[0], node));
    }
    lctx_cuda_index(queue, lctx_index_args_of(node));
}

static void run_select(const lctx_cuda_queue & queue, const ggml_tensor * node) {
    const ggml_tensor * index = node->src[1];
    lctx_cuda_select(queue, lctx_select_args_of(node),
                     leaves_rows(index) ? rows_left(index->src[0], index) : lctx_new_rows{});
}

static void run_attend(const lctx_cuda_queue & queue, const ggml_tensor * node) {
    const lctx_attend_args a = lctx_attend_args_of(node);
    if (a.params.writes && leaves_rows(node->src[1])) {
        const lctx_new_rows rows = rows_left(node->src[1]);
        if (lctx_cuda_decode_writes(a)) {
            return lctx_cuda_decode(queue, a, rows);
        }
        lctx_cuda_store(queue, rows);
    }
    lctx_cuda_attend(queue, a);
}

const char * lctx_cuda_refusal(const lctx_cuda_device & device, const ggml_tensor * node) {
    switch ((lctx_op)node->op_params[0]) {
        case LCTX_OP_ATTEND:
        case LCTX_OP_VOTE:   {
            const lctx_attend_args a = lctx_attend_args_of(node);
            if (a.params.fixed) {
                return "results that do not depend on the batch are computed on the CPU only";
            }
            return fits(a.head_dim_k) && fits(a.head_dim_v) ? nullptr : WHY_IT_DOES_NOT_FIT;
        }
        case LCTX_OP_STORE: {
            const lctx_hadamard h = lctx_store_args_of(node).params.hadamard;
            return why_not_hadamard(lctx_max(h.k, h.v));
        }
        case LCTX_OP_INDEX:     return why_not_index(lctx_index_args_of(node).index);
        case LCTX_OP_SUMMARIZE: {
            const lctx_summarize_args a = lctx_summarize_args_of(node);
            return why_not_chunks(a.params.representation, a.head_dim_k);
        }
        case LCTX_OP_SELECT: return why_not_select(lctx_select_args_of(node));
        case LCTX_OP_FETCH:
            return lctx_cuda_fetch_shared(lctx_fetch_args_of(node)) <= device.max_shared
                       ? nullptr
                       : "there are more chunks than fit into the shared memory of the GPU";
        default: return nullptr;
    }
}

size_t lctx_cuda_wsize(const lctx_cuda_device & device, const ggml_tensor * node) {
    switch ((lctx_op)node->op_params[0]) {
        case LCTX_OP_ANGLES:
        case LCTX_OP_STORE:
        case LCTX_OP_SUMMARIZE:
        case LCTX_OP_INDEX:     return 0;
        case LCTX_OP_ATTEND:    return lctx_cuda_attend_wsize(device, lctx_attend_args_of(node));
        case LCTX_OP_SELECT:    return lctx_cuda_select_wsize(device, lctx_select_args_of(node));
        case LCTX_OP_VOTE:      return lctx_cuda_vote_wsize(device, lctx_vote_args_of(node));
        case LCTX_OP_EVICT:     return lctx_cuda_evict_wsize(device, lctx_evict_args_of(node));
        case LCTX_OP_FETCH:     return lctx_cuda_fetch_wsize(device, lctx_fetch_args_of(node));
    }
    return 0;
}

void lctx_cuda_run(const lctx_cuda_queue & queue, ggml_tensor * node) {
    switch ((lctx_op)node->op_params[0]) {
        case LCTX_OP_ANGLES:    return lctx_cuda_angles(queue, lctx_angles_args_of(node));
        case LCTX_OP_STORE:     return leaves_rows(node) ? void() : lctx_cuda_store(queue, rows_left(node));
        case LCTX_OP_ATTEND:    return run_attend(queue, node);
        case LCTX_OP_SUMMARIZE: return lctx_cuda_summarize(queue, lctx_summarize_args_of(node));
        case LCTX_OP_SELECT:    return run_select(queue, node);
        case LCTX_OP_VOTE:      return lctx_cuda_vote(queue, lctx_vote_args_of(node));
        case LCTX_OP_EVICT:     return lctx_cuda_evict(queue, lctx_evict_args_of(node));
        case LCTX_OP_FETCH:     return lctx_cuda_fetch(queue, lctx_fetch_args_of(node));
        case LCTX_OP_INDEX:     return run_index(queue, node);
    }
}
