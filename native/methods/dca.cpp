// Dual chunk attention (ChunkLlama, arXiv 2402.17463): exact distances inside a chunk and to neighbours across its
// border, a bounded distance to everything before.
//
// Keys are stored at j mod s. The query at p, t = p mod s, reads its own chunk from t; the chunk before from s + t for
// the first w queries of a chunk, else from c - 1; all chunks before from c - 1, where c is the trained context and s +
// w <= c.
#include "method.h"

#include <algorithm>

namespace {

class dca_method final : public lctx_method {
  public:
    dca_method(int32_t size, int32_t window, int32_t trained, std::string reason)
        : size(size), window(window), trained(trained), reason(std::move(reason)) {}

    std::string spec() const override {
        return "dca,chunk_size=" + std::to_string(size) + ",local_window=" + std::to_string(window);
    }

    std::string why() const override { return spec() + ": " + reason; }

    int32_t n_angle() const override { return 3; }

    void positions(int32_t p, int32_t * pos) const override {
        const int32_t t = p % size;
        pos[0] = t;
        pos[1] = t < window ? size + t : trained - 1;
        pos[2] = trained - 1;
    }

    int32_t n_segment() const override { return 3; }

    void segments(int32_t p, lctx_segment * segs) const override {
        const int32_t own = p - p % size;
        const int32_t before = std::max(0, own - size);
        segs[0] = {own, p + 1, 0, 0};
        segs[1] = {before, own, 1, 0};
        segs[2] = {0, before, 2, 0};
    }

  private:
    int32_t size;
    int32_t window;
    int32_t trained;
    std::string reason;
};

std::string text(int64_t n) {
    return std::to_string(n);
}

// Three quarters of the trained context as in the paper, or what a local window leaves.
int32_t automatic_size(int32_t trained, int32_t window) {
    return std::max(1, std::min(trained - trained / 4, trained - std::max(0, window)));
}

}  // namespace

std::unique_ptr<lctx_method> lctx_dca_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    const int32_t trained = env.n_ctx_train;
    const int32_t asked_size = spec.get("chunk_size"), asked_window = spec.get("local_window");
    const int32_t align = std::max(1, spec.get("align"));  // of a filter, whose chunks lie in one of ours
    const int32_t automatic = automatic_size(trained, asked_window),
                  rounded = std::max(align, automatic / align * align);
    const int32_t size = asked_size < 0 ? rounded : asked_size;
    if (size < 1 || size >= trained) {
        throw lctx_refusal("dca: chunk_size must be 1 .. " + text(trained - 1) + " (below the trained context), not " +
                           text(size));
    }
    const int32_t most = std::min(size, trained - size);
    const int32_t window = asked_window < 0 ? most : asked_window;
    if (window < 1 || window > most) {
        throw lctx_refusal("dca: local_window must be 1 .. " + text(most) + " (at most chunk_size " + text(size) +
                           ", and the trained context " + text(trained) + " less chunk_size), not " + text(window));
    }
    const std::string chosen = asked_size < 0 ? "chunk_size from the trained context " + text(trained)
                                              : "as asked; trained context " + text(trained);
    return std::make_unique<dca_method>(size, window, trained,
                                        chosen + "; the first " + text(size + window) + " tokens are read as by full");
}
