// Attention sinks and a sliding window (StreamingLLM, arXiv 2309.17453; LM-Infinite, arXiv 2308.16137).
//
// The query at p reads the first n_sink keys from position min(p, n_sink + window - 1), as if they stood just before
// the window, and the last `window` keys, its own included, at true distances. Rows between are dead and their pages
// return.
#include "method.h"

#include <algorithm>

namespace {

class window_method final : public lctx_method {
  public:
    window_method(int32_t n_sink, int32_t window, std::string reason)
        : sink(n_sink), window(window), reason(std::move(reason)) {}

    std::string spec() const override {
        return "window,n_sink=" + std::to_string(sink) + ",window=" + std::to_string(window);
    }

    std::string why() const override { return spec() + ": " + reason; }

    int32_t n_angle() const override { return 2; }

    void positions(int32_t p, int32_t * pos) const override {
        pos[0] = p;
        pos[1] = std::min(p, sink + window - 1);
    }

    int32_t n_segment() const override { return 2; }

    void segments(int32_t p, lctx_segment * segs) const override {
        segs[0] = {0, std::min(sink, p + 1), 1, 0};
        segs[1] = {std::min(std::max(sink, first_row(p)), p + 1), p + 1, 0, 0};
    }

    int32_t n_sink() const override { return sink; }

    int32_t first_row(int32_t p) const override { return std::max(0, p - window + 1); }

  private:
    int32_t sink;
    int32_t window;
    std::string reason;
};

}  // namespace

std::unique_ptr<lctx_method> lctx_window_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    const int32_t n_ctx_train = env.n_ctx_train;
    const int32_t n_sink = spec.get("n_sink") < 0 ? 4 : spec.get("n_sink");
    const bool automatic = spec.get("window") < 0;
    if (n_sink >= n_ctx_train) {
        throw lctx_refusal("window: n_sink " + std::to_string(n_sink) + " leaves no room in the trained context " +
                           std::to_string(n_ctx_train));
    }
    const int32_t window = automatic ? n_ctx_train - n_sink : spec.get("window");
    if (window < 1 || window > n_ctx_train - n_sink) {
        throw lctx_refusal("window: window must be 1 .. " + std::to_string(n_ctx_train - n_sink) +
                           " (trained context " + std::to_string(n_ctx_train) + " less n_sink), not " +
                           std::to_string(window));
    }
    return std::make_unique<window_method>(
        n_sink, window,
        automatic ? "window = trained context " + std::to_string(n_ctx_train) + " less n_sink" : "as asked");
}
