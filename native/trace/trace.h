// Records which chunks every layer and head read: the select nodes of a running graph, looked at through llama.cpp's
// evaluation callback.
#pragma once

#include "../base/counts.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

struct ggml_tensor;
struct lctx_row;

class lctx_trace {
  public:
    // Forget everything; record the queries of a sequence at positions [p0, p1).
    void start(int32_t seq, int32_t p0, int32_t p1, const lctx_trace_info & shape);
    void get(lctx_trace_info & info, int32_t * pos, int32_t * chunks) const;

    bool failed() const { return failed_; }

    // Messages of llama_context_params::cb_eval; data is the trace.
    static bool on_node(ggml_tensor * node, bool ask, void * data);

  private:
    bool covers(const lctx_row & row) const;
    bool wants(const ggml_tensor * node) const;
    void record(const ggml_tensor * node);

    int32_t seq_ = 0, p0_ = 0, p1_ = 0;
    bool failed_ = false;
    lctx_trace_info shape_ = {};
    struct query {
        std::vector<int32_t> chunks;  // [n_layer][n_head][n_read]
    };
    std::map<int32_t, query> queries_;  // by position
};
