// Which weights ggml shall leave as they are: it repacks some for kernels that are slower than those for plain ones.
#include "kernels.h"

#include "ggml-cpu-impl.h"
#include "traits.h"

#include <cstring>

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
static constexpr bool HAS_VNNI_TILES = true;
#else
static constexpr bool HAS_VNNI_TILES = false;
#endif

namespace {

// ggml's repacking, without the types whose repacked kernels multiply bytes in two steps (maddubs, madd) where those for plain weights
// take one (dpbusd, ggml-cpu/tiled).
class fewer_types : public ggml::cpu::extra_buffer_type {
  public:
    explicit fewer_types(void * inner) : inner((ggml::cpu::extra_buffer_type *)inner) {}

    bool supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) override {
        return op->src[0]->type != GGML_TYPE_Q4_K && inner->supports_op(dev, op);
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override { return inner->get_tensor_traits(op); }

  private:
    ggml::cpu::extra_buffer_type * inner;
};

}  // namespace

void lctx_cpu_choose_weights() {
    if (!HAS_VNNI_TILES) {
        return;
    }
    for (ggml_backend_buffer_type_t type : ggml_backend_cpu_get_extra_buffer_types()) {
        if (strcmp(ggml_backend_buft_name(type), "CPU_REPACK") == 0) {
            type->context = new fewer_types(type->context);  // for the life of the process, as what it wraps
        }
    }
}
