// STRING (arXiv 2410.18745, section 4.1): exact positions nearby, and far keys at distances that training saw more
// often.
//
// Distance D = p - j < S: exact. Else D - S + W (equation 4, with the shift offset S and the local window W).
// Keys are stored at j. The query at p reads the last S keys, its own included, from p, and all before from p - S + W.
#include "method.h"

#include <algorithm>

namespace {

class string_method final : public lctx_method {
  public:
    string_method(int32_t shift, int32_t window, std::string reason)
        : shift(shift), window(window), reason(std::move(reason)) {}

    std::string spec() const override {
        return "string,shift_offset=" + std::to_string(shift) + ",local_window=" + std::to_string(window);
    }

    std::string why() const override { return spec() + ": " + reason; }

    int32_t n_angle() const override { return 2; }

    void positions(int32_t p, int32_t * pos) const override {
        pos[0] = p;
        pos[1] = p < shift ? p : p - shift + window;
    }

    int32_t n_segment() const override { return 2; }

    void segments(int32_t p, lctx_segment * segs) const override {
        const int32_t first_near = std::max(0, p - shift + 1);
        segs[0] = {first_near, p + 1, 0, 0};
        segs[1] = {0, first_near, 1, 0};
    }

  private:
    int32_t shift;
    int32_t window;
    std::string reason;
};

std::string text(int64_t n) {
    return std::to_string(n);
}

// Return what the paper takes for every model; less where the trained context is short, since W << S.
int32_t automatic_window(int32_t trained) {
    constexpr int32_t PAPER = 128, SHARE = 16;
    return std::max(1, std::min(PAPER, trained / SHARE));
}

// The paper's third of the trained context; beyond that context the least that brings the largest distance back to it.
int64_t automatic_shift(int64_t trained, int64_t n_ctx, int64_t window) {
    return std::min(trained, std::max({window, trained / 3, n_ctx - trained + window}));
}

}  // namespace

std::unique_ptr<lctx_method> lctx_string_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    const int64_t trained = env.n_ctx_train, n_ctx = env.n_ctx;
    const bool auto_shift = spec.get("shift_offset") < 0, auto_window = spec.get("local_window") < 0;
    const int64_t most_window = auto_window ? automatic_window(env.n_ctx_train) : spec.get("local_window");
    const int64_t shift = auto_shift ? automatic_shift(trained, n_ctx, most_window) : spec.get("shift_offset");
    if (shift < 1 || shift > trained) {
        throw lctx_refusal("string: shift_offset must be 1 .. " + text(trained) + " (the trained context), not " +
                           text(shift));
    }
    const int64_t window = auto_window ? std::min(most_window, shift) : most_window;
    if (window < 1 || window > shift) {
        throw lctx_refusal("string: local_window must be 1 .. " + text(shift) + " (at most shift_offset), not " +
                           text(window));
    }
    const int64_t largest = trained + shift - window;
    if (n_ctx > largest) {
        throw lctx_refusal("string: shift_offset " + text(shift) + " and local_window " + text(window) +
                           " allow n_ctx up to " + text(largest) + " with the trained context " + text(trained) +
                           ", not " + text(n_ctx) +
                           (auto_shift ? "" : "; raise shift_offset or leave it out to have it chosen"));
    }
    const std::string chosen =
        auto_shift ? "a third of the trained context " + text(trained) + ", or what n_ctx " + text(n_ctx) + " needs"
                   : "as asked; n_ctx up to " + text(largest) + " is possible";
    return std::make_unique<string_method>((int32_t)shift, (int32_t)window,
                                           chosen + "; the first " + text(shift) + " tokens are read as by full");
}
