// Chooses how ggml keeps and multiplies weights: it repacks some for products that are slower than those for plain
// ones.
#include "multiply.h"

#include "ggml-cpu-impl.h"
#include "rowwise.h"
#include "traits.h"

#include <cstring>

namespace {

// ggml's repacking, without the types that stay plain; what is plain is multiplied here where that is faster.
class our_types : public ggml::cpu::extra_buffer_type {
  public:
    explicit our_types(void * inner) : inner((ggml::cpu::extra_buffer_type *)inner) {}

    bool supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) override {
        return !lctx_cpu_keeps_plain(op) && inner->supports_op(dev, op);
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        ggml::cpu::tensor_traits * way = inner->get_tensor_traits(op);
        way = way ? way : lctx_cpu_multiply(op);
        way = way ? way : lctx_cpu_dots(op);
        return way ? way : lctx_cpu_rowwise(op);
    }

  private:
    ggml::cpu::extra_buffer_type * inner;
};

// When the library is loaded: programs that do not come through lctx.h get the same products.
[[maybe_unused]] const bool CHOSEN = [] {
    for (ggml_backend_buffer_type_t type : ggml_backend_cpu_get_extra_buffer_types()) {
        if (strcmp(ggml_backend_buft_name(type), "CPU_REPACK") == 0) {
            type->context = new our_types(type->context);  // for the life of the process, as what it wraps
        }
    }
    return true;
}();

}  // namespace
