// One batch on its way through a memory, as the graph and llama.cpp see it.
#pragma once

#include "kv-cache.h"

#include <utility>
#include <vector>

// Lets the graph find our cache, whatever context of llama.cpp it is combined with.
class lctx_batch_view {
  public:
    explicit lctx_batch_view(lctx_kv_cache & cache) : cache_(cache) {}
    virtual ~lctx_batch_view() = default;
    lctx_kv_cache & cache() const { return cache_; }

  private:
    lctx_kv_cache & cache_;
};

// A batch, or the lack of one, where all layers with rows are ours.
class lctx_batch_context final : public llama_memory_context_i, public lctx_batch_view {
  public:
    lctx_batch_context(lctx_kv_cache & cache, llama_memory_status status) : lctx_batch_view(cache), status_(status) {}
    lctx_batch_context(lctx_kv_cache & cache, std::vector<llama_ubatch> ubatches)
        : lctx_batch_view(cache), ubatches_(std::move(ubatches)), status_(LLAMA_MEMORY_STATUS_SUCCESS) {}

    bool next() override { return ++next_ < ubatches_.size(); }
    bool apply() override { return ubatches_.empty() || cache().prepare(ubatches_[next_]); }
    const llama_ubatch & get_ubatch() const override { return ubatches_[next_]; }
    llama_memory_status get_status() const override { return status_; }

  private:
    std::vector<llama_ubatch> ubatches_;
    size_t next_ = 0;
    llama_memory_status status_;
};

// A context of llama.cpp's own memory that gives the rows of our layers cells too.
template <class Base> class lctx_joint_context final : public Base, public lctx_batch_view {
  public:
    template <typename... Args> explicit lctx_joint_context(lctx_kv_cache & cache, Args &&... args)
        : Base(std::forward<Args>(args)...), lctx_batch_view(cache) {}

    bool apply() override { return cache().prepare(this->get_ubatch()) && Base::apply(); }
};
