// Reading memory with all threads of a run: to measure it, and to leave the caches cold.
#pragma once

#include "run.h"

// Bytes of the last-level cache. Throws lctx_refusal when the system does not say.
size_t lctx_cache_bytes();

// A buffer that all threads read from end to end.
class lctx_stream {
  public:
    lctx_stream(int32_t n_threads, size_t n_bytes);
    lctx_stream(const lctx_stream &) = delete;  // the graph points here
    // Microseconds of n runs.
    std::vector<double> run(int32_t n);

  private:
    static void read(ggml_tensor * dst, int ith, int nth, void * self);

    std::vector<float> data_;
    lctx_graph_run g_;
    lctx_graph graph_;
};

// Makes the caches of the CPU as cold as the other layers of a model do, when asked to.
class lctx_cooler {
  public:
    explicit lctx_cooler(const lctx_op_args & a);
    void operator()();

  private:
    std::unique_ptr<lctx_stream> stream_;
};

// Times of the nodes that attend, one per layer: a.times and a.attend_us.
void lctx_time_attend(lctx_op_args & a, const lctx_graph_run & g, const std::vector<ggml_tensor *> & nodes);
