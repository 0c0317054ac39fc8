#include "foreign-memory.h"

#include "../base/architectures.h"
#include "batch.h"
#include "check-state.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <typeinfo>

namespace {

// True when the window still holds all that a query at position p reads: what is before its first cell is masked.
bool has_window(const llama_kv_cache & window, const llama_hparams & hparams, int32_t seq, int32_t p) {
    const llama_pos first = window.seq_pos_min(seq);
    return p == 0 || first == 0 ||
           (first > 0 && llama_hparams::is_masked_swa(hparams.n_swa, hparams.swa_type, first - 1, p));
}

// Memory: llama.cpp's own; Context: that of a batch on its way through it.
template <class Memory, class Context> class foreign_of : public lctx_foreign_memory {
  public:
    using lctx_foreign_memory::lctx_foreign_memory;

    llama_memory_context_ptr full(lctx_kv_cache & cache) final { return joint(cache); }

  protected:
    Memory & inner() const { return static_cast<Memory &>(memory()); }
    template <typename... Args> llama_memory_context_ptr joint(lctx_kv_cache & cache, Args &&... args) const {
        return std::make_unique<lctx_joint_context<Context>>(cache, &inner(), std::forward<Args>(args)...);
    }
};

class iswa final : public foreign_of<llama_kv_cache_iswa, llama_kv_cache_iswa_context> {
  public:
    iswa(std::unique_ptr<llama_memory_i> memory, const llama_cparams & cparams, const llama_hparams & hparams)
        : foreign_of(std::move(memory), cparams, hparams, false) {}

    llama_memory_context_ptr batch(lctx_kv_cache & cache, const std::vector<llama_ubatch> & ubatches) override {
        auto base = inner().get_base()->prepare(ubatches), window = inner().get_swa()->prepare(ubatches);
        return base.empty() || window.empty() ? nullptr : joint(cache, std::move(base), std::move(window), ubatches);
    }
    bool can_go_back(int32_t seq, int32_t p) const override { return has_window(*inner().get_swa(), hparams_, seq, p); }

  private:
    llama_memory_i & books() const override { return *inner().get_base(); }
};

// The recurrent part of both kinds of hybrids.
template <class Memory, class Context> class recurrent : public foreign_of<Memory, Context> {
  public:
    recurrent(std::unique_ptr<llama_memory_i> memory, const llama_cparams & cparams, const llama_hparams & hparams,
              bool mixes_sequences)
        : foreign_of<Memory, Context>(std::move(memory), cparams, hparams, true, mixes_sequences) {}

    bool can_go_back(int32_t seq, int32_t p) const final {
        return p == 0 || this->inner().get_mem_recr()->seq_pos_max(seq) < p;
    }
};

class hybrid final : public recurrent<llama_memory_hybrid, llama_memory_hybrid_context> {
  public:
    using recurrent::recurrent;

    llama_memory_context_ptr batch(lctx_kv_cache & cache, const std::vector<llama_ubatch> & ubatches) override {
        if (!inner().get_mem_recr()->prepare(ubatches)) {
            return nullptr;
        }
        auto found = inner().get_mem_attn()->prepare(ubatches);
        return found.empty() ? nullptr : joint(cache, std::move(found), ubatches);
    }

  private:
    llama_memory_i & books() const override { return *inner().get_mem_attn(); }
};

class hybrid_iswa final : public recurrent<llama_memory_hybrid_iswa, llama_memory_hybrid_iswa_context> {
  public:
    using recurrent::recurrent;

    llama_memory_context_ptr batch(lctx_kv_cache & cache, const std::vector<llama_ubatch> & ubatches) override {
        if (!inner().get_mem_recr()->prepare(ubatches)) {
            return nullptr;
        }
        const llama_kv_cache_iswa & kv = *inner().get_mem_attn();
        auto base = kv.get_base()->prepare(ubatches), window = kv.get_swa()->prepare(ubatches);
        return base.empty() || window.empty() ? nullptr : joint(cache, std::move(base), std::move(window), ubatches);
    }

  private:
    llama_memory_i & books() const override { return *inner().get_mem_attn()->get_base(); }
};

}  // namespace

std::unique_ptr<lctx_foreign_memory> lctx_foreign_memory::create(std::unique_ptr<llama_memory_i> memory,
                                                                 const llama_model & model,
                                                                 const llama_cparams & cparams) {
    const llama_memory_i & kind = *memory;  // exactly these: classes that derive from them read the cache themselves
    if (typeid(kind) == typeid(llama_kv_cache_iswa)) {
        return std::make_unique<iswa>(std::move(memory), cparams, model.hparams);
    }
    const lctx_architecture * row = lctx_find_architecture(model.arch);
    const bool mixes_sequences = row && row->mixes_sequences;
    if (typeid(kind) == typeid(llama_memory_hybrid)) {
        return std::make_unique<hybrid>(std::move(memory), cparams, model.hparams, mixes_sequences);
    }
    if (typeid(kind) == typeid(llama_memory_hybrid_iswa)) {
        return std::make_unique<hybrid_iswa>(std::move(memory), cparams, model.hparams, mixes_sequences);
    }
    return nullptr;
}

std::vector<uint8_t> lctx_foreign_memory::save(int32_t seq) const {
    return lctx_save_partial(memory(), seq);
}

std::vector<uint8_t> lctx_foreign_memory::read_saved(llama_io_read_i & io, int32_t seq, int32_t p) const {
    std::vector<uint8_t> bytes;
    std::vector<int32_t> n_pos(seq + 1);  // the check looks at this sequence alone
    n_pos[seq] = p;
    lctx_check_state(io, memory(), hparams_, {seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, n_pos}, &bytes);
    return bytes;
}

void lctx_foreign_memory::restore(int32_t src, int32_t seq, int32_t p, const std::vector<uint8_t> & saved) {
    if (src != seq) {
        remove(seq, 0);
        books().seq_cp(src, seq, -1, -1);
    }
    books().seq_rm(seq, p, -1);
    lctx_state_reader io(saved.data(), saved.size());
    memory().state_read(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
}

void lctx_foreign_memory::read(llama_io_read_i & io, int32_t seq, llama_state_seq_flags flags,
                               const std::vector<int32_t> & n_pos) {
    std::vector<uint8_t> bytes;
    lctx_check_state(io, memory(), hparams_, {seq, flags, n_pos}, &bytes);
    lctx_state_reader checked(bytes.data(), bytes.size());
    memory().state_read(checked, seq, flags);
}

void lctx_foreign_memory::copy(int32_t src, int32_t dst, int32_t n_pos) {
    remove(dst, 0);
    memory().seq_cp(src, dst, -1, -1);
    remove(dst, n_pos);
}

void lctx_foreign_memory::remove(int32_t seq, int32_t from) {
    memory().seq_rm(seq, from, -1);
}
