#include "method.h"

#include "base/firewall.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>

lctx_method_factory lctx_full_create, lctx_window_create, lctx_selfextend_create, lctx_longheads_create,
    lctx_dca_create, lctx_string_create;
lctx_rule_factory lctx_corm_create, lctx_h2o_create, lctx_scissorhands_create, lctx_tova_create, lctx_kvzip_create,
    lctx_snapkv_create;

namespace {

// "key" takes a number, "key=word|word" one of the words. An entry is a method or a rule.
struct entry {
    const char * name;
    std::vector<std::string> options;
    bool extends;   // n_ctx = 0 reaches beyond the trained context
    bool composes;  // a rule may follow
    lctx_method_factory * create;
    lctx_rule_factory * create_rule;

    bool is_rule() const { return create_rule != nullptr; }
};

constexpr const char * HEADS = "heads=uniform|adaptive";

std::string representations() {
    std::string text;
    for (const char * name : LCTX_REPRESENTATIONS) {
        text += (text.empty() ? "representation=" : "|") + std::string(name);
    }
    return text;
}

const std::vector<entry> & table() {
    static const std::vector<entry> entries = {
        {"full", {"spans"}, false, true, lctx_full_create, nullptr},
        {"window", {"n_sink", "window"}, true, false, lctx_window_create, nullptr},
        {"selfextend", {"group_size", "neighbor_window"}, true, true, lctx_selfextend_create, nullptr},
        {"longheads",
         {"chunk_size", "window", "n_recent", "select=head|group", representations(),
          "position=full|string|dca|selfextend|packed", "select_from", "tile", "tile_window", "tile_cutoff"},
         true,
         true,
         lctx_longheads_create,
         nullptr},
        {"dca", {"chunk_size", "local_window"}, true, true, lctx_dca_create, nullptr},
        {"string", {"shift_offset", "local_window"}, false, true, lctx_string_create, nullptr},
        {"corm", {"window", "recent", "evict_every"}, false, false, nullptr, lctx_corm_create},
        {"h2o", {"budget", "recent", "evict_every", HEADS}, false, false, nullptr, lctx_h2o_create},
        {"scissorhands",
         {"budget", "window", "recent", "evict_every", HEADS},
         false,
         false,
         nullptr,
         lctx_scissorhands_create},
        {"tova", {"budget", "evict_every", HEADS}, false, false, nullptr, lctx_tova_create},
        {"kvzip", {"replay=text|piece"}, false, false, nullptr, lctx_kvzip_create},
        {"snapkv", {"window", "pool"}, false, false, nullptr, lctx_snapkv_create},
    };
    return entries;
}

std::string join(const std::vector<std::string> & words) {
    std::string text;
    for (const auto & word : words) {
        text += (text.empty() ? "" : ", ") + word;
    }
    return text.empty() ? "none" : text;
}

template <typename F> std::string names(F && wanted) {
    std::vector<std::string> found;
    for (const entry & e : table()) {
        if (wanted(e)) {
            found.push_back(e.name);
        }
    }
    return join(found);
}

const entry & find(const std::string & name) {
    for (const entry & e : table()) {
        if (e.name == name) {
            return e;
        }
    }
    throw lctx_refusal("unknown method '" + name + "'; available: " + names([](const entry &) { return true; }));
}

int32_t number(const std::string & method, const std::string & key, const std::string & text) {
    char * end = nullptr;
    errno = 0;
    const long value = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || errno != 0 || value < 0 || value > INT32_MAX) {
        throw lctx_refusal(method + ": " + key + " must be a whole number >= 0, not '" + text + "'");
    }
    return (int32_t)value;
}

std::vector<std::string> split(const std::string & text, char sep) {
    std::vector<std::string> parts;
    size_t from = 0;
    for (size_t at = text.find(sep); at != std::string::npos; from = at + 1, at = text.find(sep, from)) {
        parts.push_back(text.substr(from, at - from));
    }
    parts.push_back(text.substr(from));
    return parts;
}

// Return what an option was set to: a number, or the index of a word in its list.
int32_t value(const entry & e, const std::string & key, const std::string & text) {
    for (const std::string & option : e.options) {
        const size_t eq = option.find('=');
        if (option.substr(0, eq) != key) {
            continue;
        }
        if (eq == std::string::npos) {
            return number(e.name, key, text);
        }
        const std::vector<std::string> words = split(option.substr(eq + 1), '|');
        const auto it = std::find(words.begin(), words.end(), text);
        if (it == words.end()) {
            throw lctx_refusal(std::string(e.name) + ": " + key + " must be one of " + join(words) + ", not '" + text +
                               "'");
        }
        return (int32_t)(it - words.begin());
    }
    throw lctx_refusal(std::string(e.name) + ": unknown option '" + key + "'; options: " + join(e.options));
}

lctx_method_spec parse_one(const std::string & text) {
    const std::vector<std::string> parts = split(text, ',');
    lctx_method_spec spec;
    spec.name = parts[0];
    const entry & e = find(spec.name);
    for (size_t i = 1; i < parts.size(); i++) {
        const size_t eq = parts[i].find('=');
        const std::string key = parts[i].substr(0, eq);
        spec.options[key] = value(e, key, eq == std::string::npos ? "" : parts[i].substr(eq + 1));
    }
    return spec;
}

}  // namespace

lctx_method_spec lctx_method_parse(const std::string & text) {
    const std::vector<std::string> parts = split(text, '+');
    lctx_method_spec spec = parse_one(parts[0]);
    if (parts.size() == 1 && find(spec.name).is_rule()) {
        return {"full", {}, std::make_shared<lctx_method_spec>(spec)};
    }
    if (parts.size() == 2) {
        spec.rule = std::make_shared<lctx_method_spec>(parse_one(parts[1]));
    }
    if (parts.size() > 2 || (spec.rule && (!find(spec.name).composes || !find(spec.rule->name).is_rule()))) {
        throw lctx_refusal("'" + text + "' cannot be composed: one of " +
                           names([](const entry & e) { return e.composes; }) + " goes with one of " +
                           names([](const entry & e) { return e.is_rule(); }) + ", such as longheads+corm");
    }
    return spec;
}

int32_t lctx_method_default_n_ctx(const lctx_method_spec & spec, int32_t n_ctx_train) {
    const auto reaches = [&](int32_t n) {
        return lctx_guard(nullptr, [&] { find(spec.name).create(spec, {n_ctx_train, n, 0, 0}); });
    };
    int32_t most = find(spec.name).extends ? 4 * n_ctx_train : n_ctx_train, least = n_ctx_train;
    if (reaches(most) || !reaches(least)) {
        return most;  // when it is refused, that says why
    }
    while (most - least > 1) {
        const int32_t middle = least + (most - least) / 2;
        (reaches(middle) ? least : most) = middle;
    }
    return least;
}

std::unique_ptr<lctx_method> lctx_method_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    std::unique_ptr<lctx_method> method = find(spec.name).create(spec, env);
    if (spec.rule) {
        method->rule = find(spec.rule->name).create_rule(*spec.rule, env);
        if (method->n_span() > 1 && (!method->retain()->waits() || method->retain()->recent > 0)) {
            throw lctx_refusal(spec.name + ": rows of spans stay until they are compressed, so spans and " +
                               spec.rule->name + " do not go together");
        }
        if (method->rule->replay == lctx_replay::automatic) {
            method->rule->replay = method->can_read_pieces() ? lctx_replay::piece : lctx_replay::text;
        } else if (method->reads_pieces() && !method->can_read_pieces()) {
            throw lctx_refusal("replay=piece needs full attention, which " + method->spec() + " is not; leave it out");
        }
    }
    return method;
}

int32_t lctx_rule_option(const lctx_method_spec & spec, const char * key, int32_t otherwise, int32_t least) {
    constexpr int32_t MOST = 1 << 30;
    const int32_t value = spec.get(key) < 0 ? otherwise : spec.get(key);
    if (value < least || value > MOST) {
        throw lctx_refusal(spec.name + ": " + key + " must be " + std::to_string(least) + " .. " +
                           std::to_string(MOST) + ", not " + std::to_string(value));
    }
    return value;
}

int32_t lctx_rule_budget(const lctx_method_spec & spec, const lctx_method_env & env, std::string & reason) {
    constexpr int32_t SHARE = 4;
    reason = spec.get("budget") < 0 ? "budget = a quarter of the trained context " + std::to_string(env.n_ctx_train)
                                    : "budget as asked";
    return lctx_rule_option(spec, "budget", std::max(1, env.n_ctx_train / SHARE), 1);
}

int32_t lctx_rule_evict_every(const lctx_method_spec & spec, int32_t budget) {
    constexpr int32_t SHARE = 4, MOST = 256;  // a head may exceed its budget by this many rows for a while
    return lctx_rule_option(spec, "evict_every", std::max(1, std::min(MOST, budget / SHARE)), 1);
}

std::string lctx_rule_heads(const lctx_method_spec & spec, lctx_retain & retain) {
    retain.adaptive = spec.get("heads") == 1;
    return retain.adaptive ? ",heads=adaptive" : "";
}
