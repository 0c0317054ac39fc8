// LongHeads (arXiv 2402.10685): every head reads the first chunk, its own, the ones before it, and the best of the
// rest.
//
// The rest are those of a base, which says where keys are stored and from where a query sees them (filter.h): full
// inside the trained context, dca beyond it. packed is the paper's own (figure 3): key j is stored at j mod l, and the
// chunks that are read stand side by side, so that of n chunks number i is seen from (n - 1 - i) * l + p mod l.
#include "filter.h"

#include <algorithm>
#include <cstring>

lctx_method_factory lctx_full_create, lctx_string_create, lctx_dca_create, lctx_selfextend_create;

namespace {

constexpr int32_t CHUNK_STEP = 16;
constexpr int32_t TILE = 64;  // tokens of a prompt that choose together
constexpr int16_t TILE_STEP = 4;
constexpr int16_t TILE_CUTOFF = 8;  // a key below 1/256 of the weight of what is read anyway (docs/research/tiles.md)
constexpr int16_t MOST_CUTOFF = 1000;  // leaves out nothing
constexpr int32_t TILE_MORE = 2048;    // tokens that a query of a tile reads in addition to a window: at most another
                                       // window (docs/research/tiles.md)
constexpr int32_t GROUP =
    4;  // as many query heads of a KV head choose together if nothing is asked (docs/research/tiles.md)
constexpr int32_t NEARBY = 128;  // tokens before its own chunk that a query always reads

enum position : int32_t { FULL, STRING, DCA, SELFEXTEND, PACKED };
constexpr const char * POSITIONS[] = {"full", "string", "dca", "selfextend", "packed"};

std::string text(int64_t n) {
    return std::to_string(n);
}

// from: the first row whose query chooses; -1: it follows from the window.
std::string spec_of(const lctx_chunks & c, int32_t from, position where) {
    return "longheads,chunk_size=" + text(c.chunk_size) + ",window=" + text(c.n_chunk() * c.chunk_size) +
           ",n_recent=" + text(c.n_recent) + ",select=" + (c.by_group ? "group" : "head") +
           ",representation=" + LCTX_REPRESENTATIONS[c.representation] + ",position=" + POSITIONS[where] +
           (from < 0 ? "" : ",select_from=" + text(from)) + (c.by_keys() ? ",tile=" + text(c.tile) : "") +
           (c.has_tiles() ? ",tile_window=" + text(c.n_listed() * c.chunk_size) + ",tile_cutoff=" + text(c.cutoff)
                          : "");
}

// Chunks of a base.
class filtered_method final : public lctx_method {
  public:
    filtered_method(const lctx_chunks & chunks, int32_t from, position where, std::unique_ptr<lctx_method> base,
                    std::string reason)
        : chunks_(chunks),
          from_(from),
          where_(where),
          base_(std::move(base)),
          filter_(*base_, chunks_, from),
          n_read_(filter_.n_read()),
          reason_(std::move(reason)) {}

    std::string spec() const override { return spec_of(chunks_, from_, where_); }
    std::string why() const override { return spec() + ": " + reason_ + "; " + base_->why(); }

    int32_t n_angle() const override { return base_->n_angle(); }
    void positions(int32_t p, int32_t * pos) const override { base_->positions(p, pos); }
    int32_t key_angle() const override { return base_->key_angle(); }
    int32_t near_angle() const override { return base_->near_angle(); }

    int32_t n_segment() const override { return chunks_.n_given(); }
    void segments(int32_t p, lctx_segment * segs) const override { filter_.segments(p, segs); }
    const lctx_chunks * chunks() const override { return &chunks_; }
    bool selects(int32_t p) const override { return filter_.selects(p); }
    bool is_tile(int32_t p) const override { return filter_.is_tile(p); }
    bool tile_selects(int32_t p) const override { return filter_.tile_selects(p); }
    void tile_segments(int32_t first, int32_t p, lctx_segment * segs) const override {
        filter_.tile_segments(first, p, segs);
    }
    int32_t n_read() const override { return n_read_; }
    void select_from(int32_t from) override {
        const int32_t window = chunks_.n_chunk() * chunks_.chunk_size;
        if (from != -1 && (from < window || from > from_)) {
            throw lctx_refusal("queries choose from a row from the window of " + std::to_string(window) +
                               " to select_from, " + std::to_string(from_) + ", not " + std::to_string(from));
        }
        filter_.set_from(from == -1 ? from_ : from);
    }

    bool keeps_positions() const override { return base_->keeps_positions(); }
    uint32_t near_mask() const override { return filter_.near_mask(); }
    int32_t near_window() const override { return base_->near_window(); }

  private:
    lctx_chunks chunks_;
    int32_t from_;
    position where_;
    std::unique_ptr<lctx_method> base_;
    lctx_filter filter_;
    int32_t n_read_;  // with the spec's own row
    std::string reason_;
};

// The paper's. *select* gives chunks their angles, since they depend on how many are read.
class packed_method final : public lctx_method {
  public:
    packed_method(const lctx_chunks & chunks, std::string reason) : chunks_(chunks), reason_(std::move(reason)) {}

    std::string spec() const override { return spec_of(chunks_, -1, PACKED); }
    std::string why() const override { return spec() + ": " + reason_; }

    int32_t n_angle() const override { return chunks_.n_chunk(); }
    void positions(int32_t p, int32_t * pos) const override {
        for (int32_t i = 0; i < n_angle(); i++) {
            pos[i] = i * chunks_.chunk_size + p % chunks_.chunk_size;
        }
    }

    int32_t n_segment() const override { return chunks_.n_given(); }
    void segments(int32_t p, lctx_segment * segs) const override {
        const int32_t size = chunks_.chunk_size, near = (p / size - chunks_.n_recent) * size;
        const bool all = p / size < chunks_.n_chunk();
        segs[0] = {0, all ? p + 1 : size, 0, 0};
        segs[1] = {near, all ? near : p + 1, 0, 0};
        segs[2] = {size, all ? size : near, 0, 0};
    }
    const lctx_chunks * chunks() const override { return &chunks_; }
    bool selects(int32_t) const override { return true; }
    int32_t n_read() const override { return chunks_.n_chunk(); }

  private:
    lctx_chunks chunks_;
    std::string reason_;
};

[[noreturn]] void refuse(const std::string & reason) {
    throw lctx_refusal("longheads: " + reason);
}

int32_t either(int32_t given, int32_t otherwise) {
    return given < 0 ? otherwise : given;
}

// An eighth of the trained context, from 2048 tokens to 4096, at most half of it. With 2048 of 11,000,
// Qwen2.5-Coder-1.5B finds 33 of 50 numbers, with 4096 38, with all 39; with 4096 of 49,152 it finds the 8 of 10 facts
// that it finds with all.
int32_t choose_window(int32_t trained) {
    return std::min(trained / 2, std::clamp(trained / 8, 2048, 4096));
}

// Return from which position on choosing pays in prompts. For a tile, comparing every row costs a fifth of the rows
// that it reads; where each token chooses, reading a chosen row costs twice what reading all of them does.
int32_t choose_from(const lctx_chunks & c, bool auto_window) {
    const int32_t window = c.n_chunk() * c.chunk_size, tile_window = c.n_listed() * c.chunk_size;
    return !auto_window ? window : c.has_tiles() ? std::max(window, tile_window + tile_window / 4) : 3 * window;
}

// Return why the tokens of a prompt choose each for itself unless `tile` is given; empty if they choose by tile.
std::string why_no_tile(const lctx_method_env & env) {
    if (env.fixed) {
        return "; deterministic: every token of a prompt chooses for itself, whatever is in its batch, which is slower";
    }
    return env.n_ubatch == 0 || env.n_ubatch >= TILE
               ? ""
               : "; n_ubatch " + text(env.n_ubatch) + " is less than a tile of " + text(TILE) +
                     ", so every token of a prompt chooses for itself, which is slower";
}

// Choose how the tokens of a prompt choose. alone: the window of heads that choose alone.
void choose_tile(const lctx_method_spec & spec, const lctx_method_env & env, int32_t alone, lctx_chunks & c,
                 std::string & reason) {
    const int32_t window = c.n_chunk() * c.chunk_size, asked = spec.get("tile"), asked_window = spec.get("tile_window");
    const std::string why = c.by_keys() && asked < 0 ? why_no_tile(env) : "";
    reason += why;
    c.tile = either(asked, c.by_keys() && why.empty() ? TILE : 1);
    c.step = TILE_STEP;
    if (c.tile != 1 && c.tile != TILE) {
        refuse("tile must be " + text(TILE) + ", or 1: every token of a prompt chooses for itself; not " +
               text(c.tile));
    }
    if (!c.has_tiles()) {
        for (const char * name : {"tile_window", "tile_cutoff"}) {
            if (spec.get(name) >= 0) {
                refuse(name + std::string(" is for tiles of tokens that choose together; leave it out, or use tile=") +
                       text(TILE));
            }
        }
        return;
    }
    if (!c.by_keys()) {
        refuse("tile=" + text(c.tile) + " compares keys, not " + LCTX_REPRESENTATIONS[c.representation] +
               "; use representation=keys2, or tile=1");
    }
    if (env.n_ubatch > 0 && c.tile > env.n_ubatch) {
        refuse("a tile of " + text(c.tile) + " tokens does not fit into n_ubatch " + text(env.n_ubatch) +
               "; raise n_ubatch, or use tile=1");
    }
    const int32_t more = alone + std::min(alone, TILE_MORE) / c.chunk_size * c.chunk_size;
    const int32_t tile_window = either(asked_window, std::max(window, more));
    const int32_t least = (c.n_recent + 3) * c.chunk_size;  // room for one choice
    if (tile_window < least || tile_window % c.chunk_size != 0) {
        refuse("tile_window must be a multiple of chunk_size " + text(c.chunk_size) + " from " + text(least) +
               " on, not " + text(tile_window));
    }
    c.n_shared = tile_window / c.chunk_size - (c.n_recent + 2);
    const int32_t cutoff = either(spec.get("tile_cutoff"), TILE_CUTOFF);
    if (cutoff > MOST_CUTOFF) {
        refuse("tile_cutoff must be from 0 to " + text(MOST_CUTOFF) + ", which leaves out nothing, not " +
               text(cutoff));
    }
    c.cutoff = (int16_t)cutoff;
}

// As many as hold the nearby tokens, in a quarter of the window.
int32_t choose_n_recent(int32_t chunk_size, int32_t n_chunk) {
    return std::max(1, std::min((NEARBY + chunk_size - 1) / chunk_size, n_chunk / 4));
}

// Chunk size, window and recent chunks, checked; reason says what was chosen. Returns the window of heads that choose
// alone: those that choose together read half as much more, or what is asked.
int32_t choose_chunks(const lctx_method_spec & spec, const lctx_method_env & env, lctx_chunks & c,
                      std::string & reason) {
    const int32_t trained = env.n_ctx_train;
    const bool auto_window = spec.get("window") < 0;
    c.chunk_size = either(spec.get("chunk_size"), CHUNK_STEP);
    if (c.chunk_size < CHUNK_STEP || c.chunk_size % CHUNK_STEP != 0 || c.chunk_size > trained) {
        refuse("chunk_size must be a multiple of " + text(CHUNK_STEP) + " up to the trained context " + text(trained) +
               ", not " + text(c.chunk_size));
    }
    const int32_t asked_recent = spec.get("n_recent");
    if (asked_recent > trained / CHUNK_STEP) {
        refuse("n_recent " + text(asked_recent) + " chunks are more than the trained context holds");
    }
    // the first chunk, the recent ones, its own; and room for one choice
    const int32_t chosen = choose_window(trained), together = std::min(trained / 2, chosen + chosen / 2);
    const auto whole = [&](int32_t window) {
        return std::max(window / c.chunk_size, std::max(1, asked_recent) + 3) * c.chunk_size;
    };
    const int32_t window = !auto_window ? spec.get("window") : whole(c.by_group ? together : chosen);
    if (window % c.chunk_size != 0) {
        refuse("window must be a multiple of chunk_size " + text(c.chunk_size) + " such as " +
               text(std::max(1, window / c.chunk_size) * c.chunk_size) + ", not " + text(window));
    }
    if (window > trained) {
        refuse("a window of " + text(window) + (auto_window ? " (room for one choice)" : "") +
               " is beyond the trained context " + text(trained) + "; " +
               (auto_window ? "lower chunk_size or n_recent" : "the paper reads half of it"));
    }
    const int32_t n_chunk = window / c.chunk_size;
    c.n_recent = either(asked_recent, choose_n_recent(c.chunk_size, n_chunk));
    const int32_t least = c.n_recent + 2;
    if (n_chunk < least) {
        refuse("a window of " + text(window) + " holds " + text(n_chunk) + " chunks of " + text(c.chunk_size) +
               ", but the first, the " + text(c.n_recent) +
               " recent and the own one are always read: " + text(least * c.chunk_size) + " at least");
    }
    c.n_free = n_chunk - least;
    reason = !auto_window
                 ? "window as asked"
                 : "window = an eighth of the trained context, from 2048 to 4096" +
                       std::string(c.by_group ? ", and half as much more for heads that choose together" : "") +
                       ", half of the trained " + text(trained) + " at most";
    return auto_window ? whole(chosen) : window;
}

// Create the base, which says where keys are and from where queries see them: by default full inside the trained
// context, dca beyond it.
std::unique_ptr<lctx_method> create_base(position where, const lctx_method_env & env, int32_t chunk_size) {
    const lctx_method_spec spec = {POSITIONS[where], {{"align", chunk_size}}, nullptr};
    switch (where) {
        case STRING:
            if (env.n_ctx > env.n_ctx_train) {
                refuse("position=string is for contexts up to the trained " + text(env.n_ctx_train) + ", not " +
                       text(env.n_ctx) + "; beyond it use position=dca");
            }
            return lctx_string_create(spec, env);
        case DCA:        return lctx_dca_create(spec, env);
        case SELFEXTEND: return lctx_selfextend_create(spec, env);
        default:         return lctx_full_create(spec, env);
    }
}

// Choose what a query is compared with, and which heads choose together.
void choose_comparison(const lctx_method_spec & spec, const lctx_method_env & env, position where, lctx_chunks & c) {
    c.packed = where == PACKED;
    c.representation = (lctx_representation)either(spec.get("representation"),
                                                   c.packed ? LCTX_REPRESENT_ATTENTION : LCTX_REPRESENT_KEYS2);
    c.by_group = either(spec.get("select"), c.by_keys() && spec.get("window") < 0 && env.n_rep >= GROUP);
    if (c.by_attention() != (c.packed != 0)) {
        refuse(
            "representation=attention and position=packed are the paper's and go together; leave both out, or give "
            "both");
    }
    if (c.by_attention() && c.by_group) {
        refuse(
            "representation=attention has summaries of query heads, which cannot choose as a group; use select=head");
    }
}

}  // namespace

std::unique_ptr<lctx_method> lctx_longheads_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    lctx_chunks c = {};
    std::string reason;
    const bool by_paper = spec.get("representation") == LCTX_REPRESENT_ATTENTION;
    const auto where = (position)either(spec.get("position"), by_paper                       ? PACKED
                                                              : env.n_ctx <= env.n_ctx_train ? FULL
                                                                                             : DCA);
    choose_comparison(spec, env, where, c);
    const int32_t alone = choose_chunks(spec, env, c, reason);
    choose_tile(spec, env, alone, c, reason);
    if (where == PACKED) {
        c.n_run = 2, c.n_range = 1;
        if (spec.get("select_from") >= 0) {
            refuse("select_from is for the other positions: packed reads everything up to its window");
        }
        return std::make_unique<packed_method>(c, reason);
    }
    const int32_t window = c.n_chunk() * c.chunk_size;
    const int32_t from = either(spec.get("select_from"), choose_from(c, spec.get("window") < 0));
    if (from < window) {
        refuse("select_from must be at least the window of " + text(window) + ", not " + text(from));
    }
    return std::make_unique<filtered_method>(c, from, where, create_base(where, env, c.chunk_size), reason);
}
