// SelfExtend (arXiv 2401.01325, algorithm 1 and equations 3-5): exact positions for the last `neighbor_window` keys,
// floor-divided positions for all others.
//
// Distance D = p - j < w: exact. Else the relative position is floor(p/G) + w - floor(w/G) - floor(j/G).
// Far keys are stored at floor(j/G) and read from floor(p/G) + w - floor(w/G); near keys are kept once more, in a ring,
// at j.
#include "method.h"

#include <algorithm>

namespace {

class selfextend_method final : public lctx_method {
  public:
    selfextend_method(int32_t group, int32_t window, std::string reason)
        : group(group), window(window), reason(std::move(reason)) {}

    std::string spec() const override {
        return "selfextend,group_size=" + std::to_string(group) + ",neighbor_window=" + std::to_string(window);
    }

    std::string why() const override { return spec() + ": " + reason; }

    // group 1 is full attention: one segment, no ring
    int32_t n_angle() const override { return group == 1 ? 1 : 3; }

    void positions(int32_t p, int32_t * pos) const override {
        pos[0] = p / group;
        if (group > 1) {
            pos[1] = p;
            pos[2] = p / group + window - window / group;
        }
    }

    int32_t near_angle() const override { return 1; }

    int32_t n_segment() const override { return group == 1 ? 1 : 2; }

    void segments(int32_t p, lctx_segment * segs) const override {
        const int32_t first_near = group == 1 ? 0 : std::max(0, p - window + 1);
        segs[0] = {first_near, p + 1, group == 1 ? 0 : 1, 0};
        if (group > 1) {
            segs[1] = {0, first_near, 2, 0};
        }
    }

    uint32_t near_mask() const override { return group == 1 ? 0 : 1; }

    int32_t near_window() const override { return group == 1 ? 0 : window; }

  private:
    int32_t group;
    int32_t window;
    std::string reason;
};

std::string text(int64_t n) {
    return std::to_string(n);
}

// The smallest group with L/2 > w + (n_ctx - w)/G (SelfExtend, eq. 5); w must be below L/2.
int32_t smallest_group(int64_t n_ctx_train, int64_t n_ctx, int64_t window) {
    const int64_t room = n_ctx_train - 2 * window;  // twice (L/2 - w)
    return (int32_t)(2 * (n_ctx - window) / room + 1);
}

}  // namespace

std::unique_ptr<lctx_method> lctx_selfextend_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    const int64_t trained = env.n_ctx_train;
    const bool auto_group = spec.get("group_size") < 0;
    const int64_t window = spec.get("neighbor_window") < 0 ? trained / 4 : spec.get("neighbor_window");
    if (window < 1 || window >= trained) {
        throw lctx_refusal("selfextend: neighbor_window must be 1 .. " + text(trained - 1) +
                           " (below the trained context), not " + text(window));
    }
    if (auto_group && env.n_ctx <= trained) {
        return std::make_unique<selfextend_method>(
            1, (int32_t)window,
            "n_ctx " + text(env.n_ctx) + " fits the trained context " + text(trained) + ", nothing is remapped");
    }
    if (auto_group && 2 * window >= trained) {
        throw lctx_refusal("selfextend: neighbor_window " + text(window) + " must be below half the trained context " +
                           text(trained) + " for an automatic group_size; give group_size too");
    }
    const int64_t group = auto_group ? smallest_group(trained, env.n_ctx, window) : spec.get("group_size");
    if (group < 1) {
        throw lctx_refusal("selfextend: group_size must be at least 1, not " + text(group));
    }
    const int64_t largest = (trained - window) * group + window;
    if (env.n_ctx > largest) {
        throw lctx_refusal("selfextend: group_size " + text(group) + " and neighbor_window " + text(window) +
                           " allow n_ctx up to " + text(largest) + " with the trained context " + text(trained) +
                           ", not " + text(env.n_ctx) + "; raise group_size or leave it out to have it chosen");
    }
    const std::string reason =
        auto_group ? "smallest group with L/2 > w + (n_ctx - w)/G for n_ctx " + text(env.n_ctx) + ", L " + text(trained)
                   : "as asked; n_ctx up to " + text(largest) + " is possible";
    return std::make_unique<selfextend_method>((int32_t)group, (int32_t)window, reason);
}
