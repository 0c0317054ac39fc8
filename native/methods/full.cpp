// Full attention: every key at its own position, every query reads all rows up to its own.
//
// With spans=N a sequence may be put together of rows that were read elsewhere, and rows may leave its middle: every
// query sees each span from a distance of its own (memory/spans.cpp), so nothing that is stored is rotated again.
#include "method.h"

#include <algorithm>

namespace {

class full_method final : public lctx_method {
  public:
    full_method(const lctx_method_env & env, int32_t most_spans) : env(env), most_spans(most_spans) {}

    std::string spec() const override { return most_spans == 1 ? "full" : "full,spans=" + std::to_string(most_spans); }

    std::string why() const override {
        std::string text = spec() + ": every token is read at its own position";
        if (most_spans > 1) {
            text += ", in up to " + std::to_string(most_spans) + " spans";
        }
        if (env.n_ctx > env.n_ctx_train) {
            text += "; n_ctx " + std::to_string(env.n_ctx) + " is beyond the trained context " +
                    std::to_string(env.n_ctx_train) + ", where answers break down (try method=selfextend)";
        }
        return text;
    }

    int32_t n_angle() const override { return most_spans; }

    void positions(int32_t p, int32_t * pos) const override { std::fill_n(pos, most_spans, p); }

    int32_t n_segment() const override { return most_spans + (reads_pieces() ? 2 : 0); }

    void segments(int32_t p, lctx_segment * segs) const override {
        std::fill_n(segs, n_segment(), lctx_segment{});
        segs[0] = {0, p + 1, 0, 0};
    }

    int32_t n_span() const override { return most_spans; }

    bool can_read_pieces() const override { return true; }

    bool keeps_positions() const override { return most_spans == 1; }

  private:
    lctx_method_env env;
    int32_t most_spans;
};

}  // namespace

std::unique_ptr<lctx_method> lctx_full_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    constexpr int32_t MOST = 256;
    const int32_t n_span = spec.get("spans") < 0 ? 1 : spec.get("spans");
    if (n_span < 1 || n_span > MOST) {
        throw lctx_refusal("full: spans must be 1 .. " + std::to_string(MOST) + ", not " + std::to_string(n_span));
    }
    return std::make_unique<full_method>(env, n_span);
}
