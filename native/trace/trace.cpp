#include "trace.h"

#include "../base/firewall.h"
#include "../ops/ops.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

bool is_select(const ggml_tensor * node) {
    return node->op == GGML_OP_LCTX && node->op_params[0] == LCTX_OP_SELECT;
}

template <typename T> std::vector<T> values(const ggml_tensor * t) {
    std::vector<T> out(ggml_nbytes(t) / sizeof(T));
    ggml_backend_tensor_get(t, out.data(), 0, ggml_nbytes(t));
    return out;
}

std::vector<lctx_row> rows_of(const ggml_tensor * node) {
    return values<lctx_row>(node->src[2]);
}

// llama.cpp names the node of a layer "name-layer".
int32_t layer_of(const ggml_tensor * node) {
    const char * dash = strrchr(node->name, '-');
    return dash ? atoi(dash + 1) : -1;
}

}  // namespace

void lctx_trace::start(int32_t seq, int32_t p0, int32_t p1, const lctx_trace_info & shape) {
    queries_.clear();
    failed_ = false;
    seq_ = seq;
    p0_ = p0;
    p1_ = p1;
    shape_ = shape;
}

void lctx_trace::get(lctx_trace_info & info, int32_t * pos, int32_t * chunks) const {
    info = shape_;
    info.n_query = (int32_t)queries_.size();
    for (const auto & [p, read] : queries_) {
        if (pos) {
            *pos++ = p;
        }
        if (chunks) {
            chunks = std::copy(read.chunks.begin(), read.chunks.end(), chunks);
        }
    }
}

bool lctx_trace::covers(const lctx_row & row) const {
    return row.seq == seq_ && row.row >= p0_ && row.row < p1_;
}

bool lctx_trace::wants(const ggml_tensor * node) const {
    if (p1_ <= p0_ || !is_select(node)) {
        return false;
    }
    const std::vector<lctx_row> rows = rows_of(node);
    return std::any_of(rows.begin(), rows.end(), [&](const lctx_row & row) { return covers(row); });
}

void lctx_trace::record(const ggml_tensor * node) {
    const std::vector<lctx_row> rows = rows_of(node);
    const auto choices = values<int32_t>(node);
    const int64_t n_head = node->src[0]->ne[1];
    const int32_t layer = layer_of(node);
    for (size_t t = 0; t < rows.size(); t++) {
        if (!covers(rows[t]) || layer < 0 || layer >= shape_.n_layer) {
            continue;
        }
        query & at = queries_[rows[t].row];
        at.chunks.resize((size_t)shape_.n_layer * shape_.n_head * shape_.n_read, -1);
        for (int64_t head = 0; head < n_head; head++) {
            const std::vector<int32_t> read = lctx_chunks_read(node, choices.data(), (int32_t)t, (int32_t)head);
            const size_t index = (size_t)layer * shape_.n_head + head;
            int32_t * out = at.chunks.data() + index * shape_.n_read;
            std::fill(std::copy(read.begin(), read.end(), out), out + shape_.n_read, -1);
        }
    }
}

bool lctx_trace::on_node(ggml_tensor * node, bool ask, void * data) {
    auto * trace = (lctx_trace *)data;
    bool wanted = false;
    std::string error;
    const bool ok = lctx_guard(&error, [&] {
        wanted = trace->wants(node);
        if (wanted && !ask) {
            trace->record(node);
        }
    });
    if (!ok) {  // the evaluation continues, lctx_trace_get reports that the record is not complete
        trace->failed_ = true;
        trace->p1_ = trace->p0_;
    }
    return ask ? wanted : true;
}
