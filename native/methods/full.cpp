// Full attention: every key at its own position, every query reads all rows up to its own.
#include "method.h"

namespace {

class full_method final : public lctx_method {
  public:
    explicit full_method(const lctx_method_env & env) : env(env) {}

    std::string spec() const override { return "full"; }

    std::string why() const override {
        std::string text = "full: every token is read at its own position";
        if (env.n_ctx > env.n_ctx_train) {
            text += "; n_ctx " + std::to_string(env.n_ctx) + " is beyond the trained context " + std::to_string(env.n_ctx_train) +
                    ", where answers break down (try method=selfextend)";
        }
        return text;
    }

    int32_t n_angle() const override { return 1; }

    void positions(int32_t p, int32_t * pos) const override { pos[0] = p; }

    int32_t n_segment() const override { return 1; }

    void segments(int32_t p, lctx_segment * segs) const override { segs[0] = {0, p + 1, 0, 0}; }

    bool keeps_positions() const override { return true; }

  private:
    lctx_method_env env;
};

}  // namespace

std::unique_ptr<lctx_method> lctx_full_create(const lctx_method_spec &, const lctx_method_env & env) {
    return std::make_unique<full_method>(env);
}
