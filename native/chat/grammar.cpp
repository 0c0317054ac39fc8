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
constexpr uint32_t MAX_CODE_POINT = 0x10FFFF;

// The end of a literal, a set of characters or a comment that begins at pos, else the next character.
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

// The rules that a repetition becomes. llama.cpp counts from the most down to the least and meets no end when the most
// is less.
unsigned long long count_repetition(const char * pos) {
    char * end = nullptr;
    const unsigned long long least = strtoull(skip_blank(pos + 1), &end, 10);
    pos = skip_blank(end);
    pos = *pos == ',' ? skip_blank(pos + 1) : "";
    const unsigned long long most = isdigit((unsigned char)*pos) ? strtoull(pos, nullptr, 10) : least;
    if (most < least) {
        throw lctx_refusal("the grammar repeats something at least " + std::to_string(least) +
                           " times, and at most fewer");
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
                               " rules, groups and repetitions, " + std::to_string(MAX_DEPTH) +
                               " groups in each other");
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
        throw lctx_refusal("the grammar cannot be parsed: " + reason.substr(0, MAX_QUOTE) +
                           (reason.size() > MAX_QUOTE ? "..." : ""));
    }
}

bool is_code_point(uint32_t value) {
    return value <= MAX_CODE_POINT && (value < 0xD800 || value > 0xDFFF);
}

// Refuse what llama.cpp would run into while sampling: values that are not characters, ranges that end before they
// begin, unknown tokens.
void check_values(const llama_grammar_rule & rule, uint32_t n_tokens, int32_t n_schemas) {
    for (size_t i = 0; i < rule.size(); i++) {
        const auto [type, value] = rule[i];
        const bool is_token = type == LLAMA_GRETYPE_TOKEN || type == LLAMA_GRETYPE_TOKEN_NOT;
        const bool is_schema = value >= LCTX_FIRST_SCHEMA && value - LCTX_FIRST_SCHEMA < (uint32_t)n_schemas;
        if (is_token && value >= n_tokens && !is_schema) {
            throw lctx_refusal("the grammar names token " + std::to_string(value) + ", and the vocabulary ends at " +
                               std::to_string(n_tokens - 1));
        }
        const bool is_char = type == LLAMA_GRETYPE_CHAR || type == LLAMA_GRETYPE_CHAR_NOT ||
                             type == LLAMA_GRETYPE_CHAR_ALT || type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
        if (is_char && !is_code_point(value)) {
            throw lctx_refusal("the grammar has a character with the code " + std::to_string(value) +
                               ", which Unicode does not have");
        }
        if (type == LLAMA_GRETYPE_CHAR_RNG_UPPER && value < rule[i - 1].value) {
            throw lctx_refusal("the grammar has a range that ends before it begins: from code " +
                               std::to_string(rule[i - 1].value) + " to " + std::to_string(value));
        }
    }
}

// Return whether the class [^...] that begins at i leaves no character.
bool is_empty_class(const llama_grammar_rule & rule, size_t i) {
    std::vector<std::pair<uint32_t, uint32_t>> ranges = {{0xD800, 0xDFFF}};
    do {
        const bool is_range = rule[i + 1].type == LLAMA_GRETYPE_CHAR_RNG_UPPER;
        ranges.emplace_back(rule[i].value, rule[i + is_range].value);
        i += 1 + is_range;
    } while (rule[i].type == LLAMA_GRETYPE_CHAR_ALT);
    std::sort(ranges.begin(), ranges.end());
    uint32_t next = 0;  // the first character that is in none of them
    for (const auto & [from, to] : ranges) {
        next = from <= next ? std::max(next, to + 1) : next;
    }
    return next > MAX_CODE_POINT;
}

// Return whether one of a rule's alternatives can match something.
bool matches(const llama_grammar_rule & rule, const std::vector<bool> & matching) {
    bool all = true;
    for (size_t i = 0; i < rule.size(); i++) {
        const auto [type, value] = rule[i];
        if (type == LLAMA_GRETYPE_ALT || type == LLAMA_GRETYPE_END) {
            if (all) {
                return true;
            }
            all = true;
        } else if (type == LLAMA_GRETYPE_RULE_REF) {
            all = all && matching[value];
        } else if (type == LLAMA_GRETYPE_CHAR_NOT) {
            all = all && !is_empty_class(rule, i);
        }
    }
    return false;
}

// Return for each rule whether it matches something; one that calls itself without an end does.
std::vector<bool> matching_rules(const llama_grammar_rules & rules) {
    std::vector<bool> matching(rules.size(), true);
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = rules.size(); i-- > 0;) {
            if (matching[i] && !matches(rules[i], matching)) {
                matching[i] = false;
                changed = true;
            }
        }
    }
    return matching;
}

}  // namespace

void lctx_check_grammar(const llama_vocab * vocab, const std::string & text, int32_t n_schemas) {
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
        check_values(parser.rules[id], llama_vocab_n_tokens(vocab), n_schemas);
    }
    if (!matching_rules(parser.rules)[parser.symbol_ids.at("root")]) {
        throw lctx_refusal(
            "the grammar can match nothing: every way through the rule root needs a character that is in no class");
    }
}
