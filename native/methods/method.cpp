#include "method.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>

namespace {

// "key" takes a number, "key=word|word" one of the words.
struct entry {
    const char * name;
    std::vector<std::string> options;
    bool extends;  // reads beyond the trained context
    std::unique_ptr<lctx_method> (*create)(const lctx_method_spec &, const lctx_method_env &);
};

const std::vector<entry> & table() {
    static const std::vector<entry> entries = {
        {"full", {}, false, lctx_full_create},
        {"window", {"n_sink", "window"}, true, lctx_window_create},
        {"selfextend", {"group_size", "neighbor_window"}, true, lctx_selfextend_create},
        {"longheads",
         {"chunk_size", "window", "n_recent", "select=head|group", "select_block", "representation=attention|minmax",
          "position=packed|grouped", "group_size", "n_neighbor"},
         true,
         lctx_longheads_create},
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

const entry & find(const std::string & name) {
    std::vector<std::string> names;
    for (const entry & e : table()) {
        if (e.name == name) {
            return e;
        }
        names.push_back(e.name);
    }
    throw lctx_refusal("unknown method '" + name + "'; available: " + join(names));
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

// What an option was set to: a number, or the place of a word in its list.
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
            throw lctx_refusal(std::string(e.name) + ": " + key + " must be one of " + join(words) + ", not '" + text + "'");
        }
        return (int32_t)(it - words.begin());
    }
    throw lctx_refusal(std::string(e.name) + ": unknown option '" + key + "'; options: " + join(e.options));
}

}  // namespace

lctx_method_spec lctx_method_parse(const std::string & text) {
    if (text.find('+') != std::string::npos) {
        throw lctx_refusal("'" + text + "': methods cannot be composed with + in this version; name one method");
    }
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

int32_t lctx_method_default_n_ctx(const lctx_method_spec & spec, int32_t n_ctx_train) {
    return find(spec.name).extends ? 4 * n_ctx_train : n_ctx_train;
}

std::unique_ptr<lctx_method> lctx_method_create(const lctx_method_spec & spec, const lctx_method_env & env) {
    return find(spec.name).create(spec, env);
}
