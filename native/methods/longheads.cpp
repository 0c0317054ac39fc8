// LongHeads (arXiv 2402.10685): every head reads the first chunk, its own, the ones before it, and the best of the rest.
//
// Key j is stored at j mod l, and a query sees chunk c from place s: as if it stood s*l + p mod l behind the chunk's beginning. packed
// (figure 3): the chunks that are read stand side by side. exact: s is the chunk's distance for queries inside the trained context, and
// packed for later ones. grouped: distances beyond the near chunks are divided by G (SelfExtend, arXiv 2401.01325, for whole chunks).
#include "method.h"

#include <cstdlib>
#include <cstring>

namespace {

constexpr int32_t CHUNK_STEP = 16;
constexpr int32_t NEARBY = 128;  // tokens before its own chunk that a query always reads

// Without distances, a bound adds up what every channel could give at most: with few channels it finds single keys, with many it says
// little.
constexpr int32_t FEW_CHANNELS = 64;

enum position : int32_t { PACKED, GROUPED, EXACT };
constexpr const char * POSITIONS[] = {"packed", "grouped", "exact"};
constexpr const char * REPRESENTATIONS[] = {"attention", "minmax", "moments", "outlier"};

std::string text(int64_t n) {
    return std::to_string(n);
}

// 0.95, without zeros behind.
std::string share(float x) {
    char digits[16];
    snprintf(digits, sizeof(digits), "%.6g", (double)x);
    return digits;
}

class longheads_method final : public lctx_method {
  public:
    // reach: the trained context, when the context is longer: scores must not exceed its distances; else 0.
    longheads_method(const lctx_chunks & chunks, position where, int32_t n_place, int32_t reach, std::string reason)
        : chunks_(chunks), where_(where), n_place_(n_place), reach_(reach), reason_(std::move(reason)) {}

    std::string spec() const override {
        const lctx_chunks & c = chunks_;
        return "longheads,chunk_size=" + text(c.chunk_size) + ",window=" + text(c.n_chunk * c.chunk_size) +
               ",n_recent=" + text(c.n_recent) + ",select=" + (c.by_group ? "group" : "head") +
               ",representation=" + REPRESENTATIONS[c.representation] + ",position=" + POSITIONS[where_] +
               (where_ == GROUPED ? ",group_size=" + text(c.group_size) : "") + ",n_neighbor=" + text(c.n_neighbor) +
               (c.mass > 0.0f ? ",mass=" + share(c.mass) : "");
    }

    std::string why() const override { return spec() + ": " + reason_; }

    int32_t n_angle() const override { return LCTX_N_ANGLE_CHUNKS; }

    void positions(int32_t p, int32_t * pos) const override {
        pos[LCTX_ANGLE_LOCAL] = p % chunks_.chunk_size;
        pos[LCTX_ANGLE_START] = score_position(p) - p % chunks_.chunk_size;
    }

    int32_t score_position(int32_t p) const override { return reach_ > 0 ? p % chunks_.chunk_size : p; }
    int32_t score_reach() const override { return reach_; }

    int32_t key_angle() const override { return LCTX_ANGLE_LOCAL; }

    int32_t n_segment() const override { return chunks_.n_segment(); }
    void segments(int32_t, lctx_segment *) const override {}
    const lctx_chunks * chunks() const override { return &chunks_; }
    int32_t n_place() const override { return n_place_; }

  private:
    lctx_chunks chunks_;
    position where_;
    int32_t n_place_;
    int32_t reach_;
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

// An eighth of what is read and was trained, at least 2048 tokens, at most half of the trained context; with mass that half.
int32_t choose_window(int32_t trained, int32_t n_ctx, bool has_mass) {
    return has_mass ? trained / 2 : std::min(trained / 2, std::max(2048, std::min(trained, n_ctx) / 8));
}

// As many as hold the nearby tokens, in a quarter of the window.
int32_t choose_n_recent(int32_t chunk_size, int32_t n_chunk) {
    return std::max(1, std::min((NEARBY + chunk_size - 1) / chunk_size, n_chunk / 4));
}

// Chunk size, window and recent chunks, checked; reason says what was chosen.
void choose_chunks(const lctx_method_spec & spec, const lctx_method_env & env, lctx_chunks & c, std::string & reason) {
    const int32_t trained = env.n_ctx_train;
    const bool auto_window = spec.get("window") < 0;
    c.chunk_size = either(spec.get("chunk_size"), CHUNK_STEP);
    if (c.chunk_size < CHUNK_STEP || c.chunk_size % CHUNK_STEP != 0 || c.chunk_size > trained) {
        refuse("chunk_size must be a multiple of " + text(CHUNK_STEP) + " up to the trained context " + text(trained) + ", not " +
               text(c.chunk_size));
    }
    const int32_t asked_recent = spec.get("n_recent");
    if (asked_recent > trained / CHUNK_STEP) {
        refuse("n_recent " + text(asked_recent) + " chunks are more than the trained context holds");
    }
    // the first chunk, the recent ones, its own; and room for one choice
    const int32_t n_auto = std::max(choose_window(trained, env.n_ctx, spec.get("mass") > 0) / c.chunk_size, std::max(1, asked_recent) + 3);
    const int32_t window = auto_window ? n_auto * c.chunk_size : spec.get("window");
    if (window % c.chunk_size != 0) {
        refuse("window must be a multiple of chunk_size " + text(c.chunk_size) + " such as " +
               text(std::max(1, window / c.chunk_size) * c.chunk_size) + ", not " + text(window));
    }
    if (window > trained) {
        refuse("a window of " + text(window) + (auto_window ? " (room for one choice)" : "") + " is beyond the trained context " +
               text(trained) + "; " + (auto_window ? "lower chunk_size or n_recent" : "the paper reads half of it"));
    }
    c.n_chunk = window / c.chunk_size;
    c.n_recent = either(asked_recent, choose_n_recent(c.chunk_size, c.n_chunk));
    const int32_t least = c.n_recent + 2;
    if (c.n_chunk < least) {
        refuse("a window of " + text(window) + " holds " + text(c.n_chunk) + " chunks of " + text(c.chunk_size) + ", but the first, the " +
               text(c.n_recent) + " recent and the own one are always read: " + text(least * c.chunk_size) + " at least");
    }
    reason = auto_window ? "window = an eighth of the context, 2048 at least, half of the trained " + text(trained) + " at most"
                         : "window as asked";
}

// Where chunks are seen from; returns the number of places.
int32_t choose_places(const lctx_method_spec & spec, const lctx_method_env & env, position where, lctx_chunks & c) {
    const int32_t n_trained = env.n_ctx_train / c.chunk_size, n_all = (env.n_ctx + c.chunk_size - 1) / c.chunk_size;
    if (where != GROUPED && spec.get("group_size") >= 0) {
        refuse("group_size belongs to position=grouped");
    }
    if (where == EXACT) {
        c.n_exact = n_trained;
        return std::max(std::min(n_trained, n_all), n_all > n_trained ? c.n_chunk : 0);
    }
    if (where == PACKED) {
        return c.n_chunk;
    }
    c.n_near = c.n_recent + 1;
    if (c.n_near >= n_trained) {
        refuse("position=grouped reads the last " + text(c.n_near * c.chunk_size) +
               " tokens (own and recent chunks) exactly, which must be " + "less than the trained context " + text(env.n_ctx_train));
    }
    const int32_t n_far = std::max(0, n_all - c.n_near), room = n_trained - c.n_near;
    c.group_size = either(spec.get("group_size"), std::max(1, (n_far + room - 1) / room));
    if (c.group_size < 1) {
        refuse("group_size must be at least 1, not " + text(c.group_size));
    }
    const int64_t largest = (int64_t)(room * c.group_size + c.n_near) * c.chunk_size;
    if (env.n_ctx > largest) {
        refuse("group_size " + text(c.group_size) + " allows n_ctx up to " + text(largest) + ", not " + text(env.n_ctx) +
               "; raise it or leave it out to have it chosen");
    }
    return std::min(n_trained, n_all);
}

}  // namespace

std::unique_ptr<lctx_method> lctx_longheads_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    lctx_chunks c = {};
    std::string reason;
    c.mass = (float)std::max(0, spec.get("mass")) / LCTX_MILLION;
    const bool by_bound = env.n_ctx > env.n_ctx_train && env.head_dim <= FEW_CHANNELS && c.mass == 0.0f;
    c.representation = (lctx_representation)either(spec.get("representation"), by_bound ? LCTX_REPRESENT_MINMAX : LCTX_REPRESENT_OUTLIER);
    choose_chunks(spec, env, c, reason);
    c.by_group = either(spec.get("select"), 0);
    c.ablation = ablation();
    const int32_t n_free = c.n_chunk - 2 - c.n_recent;
    if (c.mass > 0.0f && c.representation != LCTX_REPRESENT_MOMENTS && c.representation != LCTX_REPRESENT_OUTLIER) {
        refuse("mass needs an estimate of the attention: representation=outlier or moments");
    }
    c.n_neighbor = either(spec.get("n_neighbor"), 0);
    if (c.mass > 0.0f && c.n_neighbor > 0) {
        refuse("n_neighbor gives a part of a fixed budget away; with mass there is none");
    }
    if (c.n_neighbor > 0 && c.n_neighbor >= n_free) {
        refuse("n_neighbor must leave a chunk to choose: " + text(n_free) + " are free, n_neighbor is " + text(c.n_neighbor));
    }
    const auto where = (position)either(spec.get("position"), EXACT);
    const int32_t n_place = choose_places(spec, env, where, c);
    const int32_t reach = env.n_ctx > env.n_ctx_train ? env.n_ctx_train : 0;
    reason += reach > 0 && !c.by_attention() ? "; scores without distances, which go beyond the trained context" : "";
    return std::make_unique<longheads_method>(c, where, n_place, reach, reason);
}
