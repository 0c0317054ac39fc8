// LongHeads (arXiv 2402.10685): every head reads the first chunk, its own, the ones before it, and the best of the rest.
//
// packed (figure 3): key j is stored at j mod l; the chunks that are read stand side by side, place s of n is seen from
// (n - 1 - s)*l + p mod l. grouped: the chunks keep their order and distance, at SelfExtend's positions: floor(j/G) far away, exact
// in the near window, which is the own chunk and what fits of the recent ones.
#include "method.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr int32_t CHUNK_STEP = 16;
constexpr int32_t CHUNK_MOST = 256;  // the paper's
constexpr int32_t FREE_PER_NEIGHBOR = 8;
constexpr int32_t N_CHUNK_WANTED[] = {8, 16};  // attention, minmax: bounds are the tighter, the smaller the chunk

std::string text(int64_t n) {
    return std::to_string(n);
}

class longheads_method final : public lctx_method {
  public:
    longheads_method(const lctx_chunks & chunks, int32_t group, std::string reason)
        : chunks_(chunks), group_(group), reason_(std::move(reason)) {}

    std::string spec() const override {
        const lctx_chunks & c = chunks_;
        return "longheads,chunk_size=" + text(c.chunk_size) + ",window=" + text(c.n_chunk * c.chunk_size) +
               ",n_recent=" + text(c.n_recent) + ",select=" + (c.by_group ? "group" : "head") + ",select_block=" + text(c.select_block) +
               ",representation=" + (c.minmax ? "minmax" : "attention") + ",position=" + (grouped() ? "grouped" : "packed") +
               (grouped() ? ",group_size=" + text(group_) : "") + ",n_neighbor=" + text(c.n_neighbor);
    }

    std::string why() const override { return spec() + ": " + reason_; }

    int32_t n_angle() const override { return grouped() ? LCTX_N_ANGLE_GROUPED : chunks_.n_chunk; }

    void positions(int32_t p, int32_t * pos) const override {
        const int32_t size = chunks_.chunk_size, window = chunks_.near_window;
        if (grouped()) {
            pos[LCTX_ANGLE_LOCAL] = p % size;
            pos[LCTX_ANGLE_SHIFT] = -(p / size * size);
            pos[LCTX_ANGLE_STORED] = p / group_;
            pos[LCTX_ANGLE_EXACT] = p;
            pos[LCTX_ANGLE_FAR] = p / group_ + window - window / group_;
            return;
        }
        for (int32_t place = 0; place < chunks_.n_chunk; place++) {
            pos[place] = place * size + p % size;
        }
    }

    int32_t key_angle() const override { return grouped() ? LCTX_ANGLE_STORED : LCTX_ANGLE_LOCAL; }
    int32_t near_angle() const override { return grouped() ? LCTX_ANGLE_EXACT : LCTX_ANGLE_LOCAL; }

    int32_t n_segment() const override { return chunks_.n_segment(); }
    void segments(int32_t, lctx_segment *) const override {}
    const lctx_chunks * chunks() const override { return &chunks_; }

    // the ring also serves the summary of a chunk that has just been completed
    int32_t near_window() const override { return chunks_.near_window; }

  private:
    bool grouped() const { return chunks_.near_window > 0; }

    lctx_chunks chunks_;
    int32_t group_;
    std::string reason_;
};

// Table 4 of the paper; for tests.
lctx_ablation ablation() {
    const char * name = getenv("LCTX_TEST_ABLATION");
    const char * names[] = {"", "random", "random_all", "no_first", "last"};
    for (int i = 0; name && i < 5; i++) {
        if (strcmp(name, names[i]) == 0) {
            return (lctx_ablation)i;
        }
    }
    if (name) {
        throw lctx_refusal("LCTX_TEST_ABLATION must be random, random_all, no_first or last, not '" + std::string(name) + "'");
    }
    return LCTX_ABLATE_NONE;
}

[[noreturn]] void refuse(const std::string & reason) {
    throw lctx_refusal("longheads: " + reason);
}

int32_t either(int32_t given, int32_t otherwise) {
    return given < 0 ? otherwise : given;
}

// 256, or less so that enough chunks fit into the window.
int32_t choose_chunk_size(int32_t window, int32_t n_wanted) {
    return std::min(CHUNK_MOST, std::max(CHUNK_STEP, window / n_wanted / CHUNK_STEP * CHUNK_STEP));
}

// Chunk size and window, checked; reason says what was chosen.
void choose_chunks(const lctx_method_spec & spec, int32_t trained, lctx_chunks & c, std::string & reason) {
    const int32_t least = c.n_recent + 2;  // the first chunk, the recent ones, its own
    const bool auto_size = spec.get("chunk_size") < 0, auto_window = spec.get("window") < 0;
    c.chunk_size =
        auto_size ? choose_chunk_size(either(spec.get("window"), trained / 2), N_CHUNK_WANTED[c.minmax]) : spec.get("chunk_size");
    if (c.chunk_size < CHUNK_STEP || c.chunk_size % CHUNK_STEP != 0 || c.chunk_size > trained) {
        refuse("chunk_size must be a multiple of " + text(CHUNK_STEP) + " up to the trained context " + text(trained) + ", not " +
               text(c.chunk_size));
    }
    // half the trained context, but room for one choice
    const int32_t window = auto_window ? std::max(trained / 2 / c.chunk_size, least + 1) * c.chunk_size : spec.get("window");
    if (window % c.chunk_size != 0) {
        refuse("window must be a multiple of chunk_size " + text(c.chunk_size) + " such as " +
               text(std::max(1, window / c.chunk_size) * c.chunk_size) + ", not " + text(window));
    }
    if (window > trained) {
        refuse("a window of " + text(window) + (auto_window ? " (room for one choice)" : "") + " is beyond the trained context " +
               text(trained) + "; " + (auto_window ? "lower chunk_size or n_recent" : "the paper reads half of it"));
    }
    c.n_chunk = window / c.chunk_size;
    if (c.n_chunk < least) {
        refuse("a window of " + text(window) + " holds " + text(c.n_chunk) + " chunks of " + text(c.chunk_size) + ", but the first, the " +
               text(c.n_recent) + " recent and the own one are always read: " + text(least * c.chunk_size) + " at least");
    }
    reason = (auto_window ? "window = half the trained context " + text(trained) : "window as asked") +
             (auto_size ? ", chunks of at most 256 so that " + text(N_CHUNK_WANTED[c.minmax]) + " fit" : ", chunk_size as asked");
}

}  // namespace

std::unique_ptr<lctx_method> lctx_longheads_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    lctx_chunks c = {};
    std::string reason;
    c.n_recent = either(spec.get("n_recent"), 1);
    if (c.n_recent > env.n_ctx_train / CHUNK_STEP) {
        refuse("n_recent " + text(c.n_recent) + " chunks are more than the trained context holds");
    }
    // defaults of the parts: bench/accuracy.py and the tables in docs/methods/longheads.md
    c.minmax = either(spec.get("representation"), 1);
    choose_chunks(spec, env.n_ctx_train, c, reason);
    c.by_group = either(spec.get("select"), 1);
    c.select_block = either(spec.get("select_block"), 1);
    c.ablation = ablation();
    if (c.select_block < 1 || c.chunk_size % c.select_block != 0) {
        refuse("select_block must divide chunk_size " + text(c.chunk_size) + ", " + text(c.select_block) + " does not");
    }
    const int32_t n_free = c.n_chunk - 2 - c.n_recent;
    c.n_neighbor = either(spec.get("n_neighbor"), c.minmax ? n_free / FREE_PER_NEIGHBOR : 0);
    if (c.n_neighbor > 0 && c.n_neighbor >= n_free) {
        refuse("n_neighbor must leave a chunk to choose: " + text(n_free) + " are free, n_neighbor is " + text(c.n_neighbor));
    }
    if (either(spec.get("position"), 0) == 0) {
        if (spec.get("group_size") >= 0) {
            refuse("group_size belongs to position=grouped");
        }
        return std::make_unique<longheads_method>(c, 0, reason);
    }
    c.near_window = std::max(1, c.n_recent) * c.chunk_size;
    if (2 * c.near_window >= env.n_ctx_train) {
        refuse("position=grouped reads the last " + text(c.near_window) +
               " tokens (n_recent * chunk_size) exactly, which must be less than" + " half the trained context " + text(env.n_ctx_train));
    }
    const bool fits = env.n_ctx <= env.n_ctx_train;
    const int32_t group = either(spec.get("group_size"), fits ? 1 : lctx_selfextend_group(env.n_ctx_train, env.n_ctx, c.near_window));
    if (group < 1) {
        refuse("group_size must be at least 1, not " + text(group));
    }
    const int64_t largest = (int64_t)(env.n_ctx_train - c.near_window) * group + c.near_window;
    if (env.n_ctx > largest) {
        refuse("group_size " + text(group) + " allows n_ctx up to " + text(largest) + ", not " + text(env.n_ctx) +
               "; raise it or leave it out to have it chosen");
    }
    return std::make_unique<longheads_method>(c, group, reason);
}
