// Decides where rows lie: which layers of a model the cache serves, and the stores of the devices that have their
// heads.
#pragma once

#include "../base/claim.h"
#include "../base/counts.h"
#include "../base/pending.h"
#include "../methods/method.h"
#include "centers.h"
#include "device-store.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

struct llama_cparams;
struct llama_memory_params;
struct llama_model;

// Sizes of a context.
struct lctx_kv_sizes {
    int32_t n_ctx;       // rows of one sequence
    int32_t n_rows_all;  // rows of all sequences together
    int32_t n_ubatch, n_batch, n_seq, n_threads;

    lctx_kv_sizes(uint32_t n_ctx, const llama_cparams & cparams);
};

// A layer of the model.
struct lctx_stored_layer {
    lctx_device_store * store = nullptr;
    lctx_layer_heads heads = {};  // in the store; none: the layer has no rows here
};

class lctx_placement {
  public:
    // As lctx_kv_cache. offload_kqv: rows lie on the devices of their layers. Throws lctx_refusal.
    lctx_placement(const llama_model & model, const llama_memory_params & params,
                   const std::vector<lctx_claimed> & layers, const lctx_method & method, const lctx_kv_sizes & sizes,
                   bool offload_kqv, const lctx_offload & offload);
    lctx_placement(const lctx_placement &) = delete;
    lctx_placement & operator=(const lctx_placement &) = delete;

    const lctx_method & method() const { return method_; }
    const lctx_chunks * chunks() const { return shape_.chunks; }  // or nullptr
    const lctx_retain * retain() const { return shape_.retain; }  // or nullptr
    const lctx_kv_sizes & sizes() const { return sizes_; }
    const lctx_kv_shape & shape() const { return shape_; }
    // Of all layers.
    int32_t n_head() const { return n_head_; }
    int32_t n_query_head() const { return n_query_head_; }
    // Most blocks that a head of one sequence has at a time.
    int32_t live_blocks() const;

    // A layer that the cache serves: it has rows here, or reads those of an earlier layer.
    bool serves(int32_t il) const { return il < (int32_t)source_.size() && source_[il] >= 0; }
    // The layer whose rows it reads: itself, or an earlier one.
    int32_t source(int32_t il) const { return source_[il]; }
    const std::vector<lctx_stored_layer> & layers() const { return layers_; }
    const lctx_device_store & store(int32_t il) const { return *layers_[source_[il]].store; }
    const std::vector<std::unique_ptr<lctx_device_store>> & stores() const { return stores_; }
    // f(store, head in the store) for the KV heads of all layers.
    template <typename F> void each_head(F && f) const {
        for (const lctx_stored_layer & layer : layers_) {
            for (int32_t head = layer.heads.first; head < layer.heads.first + layer.heads.n; head++) {
                f(*layer.store, head);
            }
        }
    }

    // for graphs
    lctx_layer layer(ggml_context * ctx, int32_t il) const;
    int32_t first_layer(const lctx_device_store & store) const;
    // The bias of the keys of a layer that stores them, F32, where its mean is subtracted (centers.h); else nullptr.
    const ggml_tensor * key_bias(int32_t il) const { return source_[il] == il ? key_bias_[il] : nullptr; }
    lctx_centers & centers() const { return *centers_; }
    // A graph of the context is being built: where it runs.
    void attach(ggml_backend_sched_t sched) const;
    // A graph is about to run: the devices have to know where the rows lie.
    void begin_graph() const;
    // Nothing is running on the devices, and what was staged of a sequence is void: its rows are written from the host
    // next.
    void prepare_writes(int32_t seq) const;
    void wait() const;

    // Say what the method chose and why, and which kernels run where on rows of which types.
    std::string full_why() const;
    lctx_offload_info offload() const;
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const;
    // Return what the host has done so far; n_built is the context's to know.
    lctx_work & work() const { return work_; }

  private:
    struct device;
    void set_shape(const llama_model & model, const llama_memory_params & params,
                   const std::vector<lctx_claimed> & layers);
    void check_heads(const llama_model & model, const std::vector<lctx_claimed> & layers);
    void find_key_bias(const llama_model & model);
    int32_t units_read(int32_t n_chosen) const;
    int32_t n_staged(const lctx_offload & offload) const;
    std::vector<device> devices_of(const llama_model & model, const std::vector<lctx_claimed> & layers,
                                   bool offload_kqv);
    void allocate(const device & d, bool dry);

    const lctx_method & method_;
    const lctx_kv_sizes sizes_;
    lctx_kv_shape shape_ = {};
    int32_t n_head_ = 0, n_query_head_ = 0;
    std::vector<std::unique_ptr<lctx_device_store>> stores_;
    std::unique_ptr<lctx_centers> centers_;
    std::vector<const ggml_tensor *> key_bias_;  // by layer
    std::vector<lctx_stored_layer> layers_;      // of all layers of the model
    std::vector<int32_t> source_;                // the layer whose rows each reads, -1: another memory serves it
    mutable lctx_work work_ = {};
};
