// A method says where a key is stored, which segments of rows a query reads, and which rows are dead.
// An eviction rule is a struct of numbers instead. CONTRIBUTING.md says how to add either.
#pragma once

#include "../base/refusal.h"
#include "../ops/ops.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Automatic choices depend on these. n_ctx_train counts rope scaling in: positions that the model can tell apart.
struct lctx_method_env {
    int32_t n_ctx_train;
    int32_t n_ctx;
    int32_t head_dim;  // of K
    int32_t n_ubatch;  // 0: not known
    bool fixed;        // a token has the same bits in every batch (deterministic.h)
    int32_t n_rep;     // query heads of a KV head; 0: not known
};

// Rows of a sequence from `first` to the next span: their keys were rotated to row + shift, because they were read
// elsewhere, or rows before them left. A query at p sees them from p + shift, so that distances are those between rows.
struct lctx_row_span {
    int32_t first;
    int32_t shift;
};

// Says what queries of a replay read of the text: all, or their own piece of it; automatic: the piece where the method
// can.
enum class lctx_replay { text, piece, automatic };

// A rule by which heads evict, in addition to a method that says what is read.
struct lctx_rule {
    lctx_retain retain;
    std::string spec;
    std::string reason;
    int32_t pool = 1;  // where the rule waits: neighbors over which the scores of rows are summed before the eviction
    lctx_replay replay = lctx_replay::text;
};

class lctx_method {
  public:
    virtual ~lctx_method() = default;

    // The method's own string with every option filled in, and one line that says what was chosen and why.
    virtual std::string spec() const = 0;
    virtual std::string why() const = 0;

    // Says how heads evict; none: they keep what the method keeps.
    std::optional<lctx_rule> rule;
    const lctx_retain * retain() const { return rule ? &rule->retain : nullptr; }

    // Both together: "corm,..." or "longheads,...+corm,...".
    std::string full_spec() const { return !rule ? spec() : spec() == "full" ? rule->spec : spec() + "+" + rule->spec; }
    std::string full_why() const { return !rule ? why() : why() + "\n" + rule->spec + ": " + rule->reason; }

    // Rows of the angle table per token, and their positions for a token at position p: what its key is rotated to
    // (row key_angle(); near ring: row near_angle()) and from where its query looks.
    virtual int32_t n_angle() const = 0;
    virtual void positions(int32_t p, int32_t * pos) const = 0;
    virtual int32_t key_angle() const { return 0; }
    virtual int32_t near_angle() const { return 0; }

    // Segments of the query at position p; .angle is the row among the token's own n_angle rows.
    virtual int32_t n_segment() const = 0;
    virtual void segments(int32_t p, lctx_segment * segs) const = 0;

    // Most spans of a sequence. With more than one, segment and angle i are those of span i, and a new row is stored
    // from the last one's.
    virtual int32_t n_span() const { return 1; }

    // Return whether queries of a replay read their own piece of the text: two segments more than spans, of which other
    // queries have none.
    bool reads_pieces() const { return rule && rule->replay == lctx_replay::piece; }
    virtual bool can_read_pieces() const { return false; }

    // Return how heads choose chunks in the graph, or nullptr: then segments() are its runs and far ranges.
    virtual const lctx_chunks * chunks() const { return nullptr; }
    // Chunks that a query reads at most.
    virtual int32_t n_read() const { return 0; }
    // Return whether the query at p chooses when it chooses for itself; else its runs are all that it reads.
    virtual bool selects(int32_t) const { return false; }
    // Return whether the tokens [p, p + tile) are a tile, and whether it chooses; else its tokens read everything. p: a
    // multiple of chunks()->tile.
    virtual bool is_tile(int32_t) const { return false; }
    virtual bool tile_selects(int32_t) const { return false; }
    // segments() of the query at p in the tile that begins at `first`.
    virtual void tile_segments(int32_t /*first*/, int32_t p, lctx_segment * segs) const { segments(p, segs); }
    // Let queries before row `from` read everything, from the window to the spec's own row; -1: the spec's. Throws
    // lctx_refusal.
    virtual void select_from(int32_t) { throw lctx_refusal(spec() + " has no row from which queries choose"); }

    // True when queries and keys are always used at their own positions: nothing is rotated again.
    virtual bool keeps_positions() const { return false; }

    // Segments that read the near ring (bit mask), and how many rows back they reach; 0: no near ring.
    virtual uint32_t near_mask() const { return 0; }
    virtual int32_t near_window() const { return 0; }

    // Queries at p and later read no row in [n_sink(), first_row(p)).
    virtual int32_t n_sink() const { return 0; }
    virtual int32_t first_row(int32_t p) const { return p < 0 ? p : 0; }
};

// "name,key=value,key=value"; a word is its index in the option's list of words.
struct lctx_method_spec {
    std::string name;
    std::map<std::string, int32_t> options;
    std::shared_ptr<const lctx_method_spec> rule;  // after a +, or nullptr

    // The option's value, or -1 when it is left to choose.
    int32_t get(const char * key) const {
        const auto it = options.find(key);
        return it == options.end() ? -1 : it->second;
    }
};

// "base+rule", where a rule alone goes with full. Throws lctx_refusal when the name or an option is unknown or a value
// is not a number.
lctx_method_spec lctx_method_parse(const std::string & text);

// n_ctx for n_ctx = 0: the trained context; up to 4 times that for a method that extends, as far as its own options
// reach.
int32_t lctx_method_default_n_ctx(const lctx_method_spec & spec, int32_t n_ctx_train);

// Fill in what is automatic and check the rest against the model. Throws lctx_refusal.
std::unique_ptr<lctx_method> lctx_method_create(const lctx_method_spec & spec, const lctx_method_env & env);

// The file of a method or of a rule exports this, for the table in method.cpp. Each throws lctx_refusal.
using lctx_method_factory = std::unique_ptr<lctx_method>(const lctx_method_spec & spec, const lctx_method_env & env);
using lctx_rule_factory = lctx_rule(const lctx_method_spec & spec, const lctx_method_env & env);

// Rules share these: an option that is left out is `otherwise`; the budget, and why; how often a rule with a budget
// evicts.
int32_t lctx_rule_option(const lctx_method_spec & spec, const char * key, int32_t otherwise, int32_t least);
int32_t lctx_rule_budget(const lctx_method_spec & spec, const lctx_method_env & env, std::string & reason);
int32_t lctx_rule_evict_every(const lctx_method_spec & spec, int32_t budget);
// Read whether heads share their budgets; return what the spec says of it: nothing where they do not, as before there
// was a choice.
std::string lctx_rule_heads(const lctx_method_spec & spec, lctx_retain & retain);
