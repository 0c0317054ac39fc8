#include "grammar.h"

#include "llama-grammar.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

namespace {

// llama.cpp reads parentheses and looks for left recursion by recursion
constexpr int MAX_DEPTH = 256;
constexpr unsigned long long MAX_RULES = 20000;
constexpr size_t MAX_TEXT = 4 << 20;
constexpr size_t MAX_QUOTE = 60;

// Behind a literal, a set of characters or a comment that begins at pos, else the next character.
const char * skip_item(const char * pos) {
    const char end = *pos == '"' ? '"' : *pos == '[' ? ']' : *pos == '#' ? '\n' : 0;
    for (pos++; end && *pos && *pos != end; pos++) {
        if (*pos == '\\' && end != '\n' && pos[1]) {
            pos++;
        }
    }
    return end && *pos ? pos + 1 : pos;
}

const char * skip_blank(const char * pos) {
    while (*pos && strchr(" \t\r\n#", *pos)) {
        pos = *pos == '#' ? skip_item(pos) : pos + 1;
    }
    return pos;
}

// The rules that a repetition becomes. llama.cpp counts from the most down to the least and meets no end when the most is less.
unsigned long long count_repetition(const char * pos) {
    char * end = nullptr;
    const unsigned long long least = strtoull(skip_blank(pos + 1), &end, 10);
    pos = skip_blank(end);
    pos = *pos == ',' ? skip_blank(pos + 1) : "";
    const unsigned long long most = isdigit((unsigned char)*pos) ? strtoull(pos, nullptr, 10) : least;
    if (most < least) {
        throw lctx_refusal("the grammar repeats something at least " + std::to_string(least) + " times, and at most fewer");
    }
    return std::min(most, MAX_RULES + 1);
}

void check_size(const std::string & text) {
    int depth = 0;
    unsigned long long rules = 0;
    for (const char * pos = text.c_str(); *pos; pos = skip_item(pos)) {
        depth += (*pos == '(') - (*pos == ')');
        rules += *pos == '(' || *pos == '?' || *pos == '*' || *pos == '+' || (pos[0] == ':' && pos[1] == ':');
        rules += *pos == '{' ? count_repetition(pos) : 0;
        if (depth > MAX_DEPTH || rules > MAX_RULES || text.size() > MAX_TEXT) {
            throw lctx_refusal("the grammar is too large: at most 4 MiB, " + std::to_string(MAX_RULES) +
                               " rules, groups and repetitions, " + std::to_string(MAX_DEPTH) + " groups in each other");
        }
    }
}

void parse(llama_grammar_parser & parser, const std::string & text) {
    try {
        for (const char * pos = skip_blank(text.c_str()); *pos;) {
            pos = parser.parse_rule(pos);
        }
    } catch (const std::exception & e) {  // the reason ends with all of the text that is left
        const std::string reason = e.what();
        throw lctx_refusal("the grammar cannot be parsed: " + reason.substr(0, MAX_QUOTE) + (reason.size() > MAX_QUOTE ? "..." : ""));
    }
}

}  // namespace

void lctx_check_grammar(const llama_vocab * vocab, const std::string & text) {
    check_size(text);
    llama_grammar_parser parser(vocab);
    parse(parser, text);
    if (parser.symbol_ids.count("root") == 0) {
        throw lctx_refusal("the grammar has no rule named root");
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            throw lctx_refusal("the grammar has no rule named " + name);
        }
    }
}
