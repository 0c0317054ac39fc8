// Chooses how ggml keeps and multiplies weights: it repacks some for products that are slower than those for plain
// ones.
#include "weights.h"

#include "../ops/fixed.h"
#include "ggml-cpu-impl.h"
#include "multiply.h"
#include "rowwise.h"
#include "traits.h"

#include <cstring>

namespace {

// ggml's repacking, without the types that stay plain; what is plain is multiplied here where that is faster.
class our_types : public ggml::cpu::extra_buffer_type {
  public:
    our_types(void * inner, bool all) : inner((ggml::cpu::extra_buffer_type *)inner), all(all) {}

    bool supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) override {
        return !(all && lctx_cpu_keeps_plain(op)) && inner->supports_op(dev, op);
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        ggml::cpu::tensor_traits * way = inner->get_tensor_traits(op);
        if (!all && !lctx_is_fixed(op)) {
            return way;
        }
        way = way ? way : lctx_cpu_multiply(op);
        way = way ? way : lctx_cpu_dots(op);
        return way ? way : lctx_cpu_rowwise(op);
    }

  private:
    ggml::cpu::extra_buffer_type * inner;
    const bool all;  // else what is marked
};

}  // namespace

void lctx_wrap_repacking(bool all) {
    for (ggml_backend_buffer_type_t type : ggml_backend_cpu_get_extra_buffer_types()) {
        if (strcmp(ggml_backend_buft_name(type), "CPU_REPACK") == 0) {
            type->context = new our_types(type->context, all);  // for the life of the process, as what it wraps
        }
    }
}
