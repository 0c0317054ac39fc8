// A parse of incomplete text stops at the first parser that needs more. When that is a leaf which has read something,
// and nothing before it has looked at the end of the text, then the parse of any longer text comes to this leaf as
// well.
#include "leaf.h"

#include "chat-peg-parser.h"

#include <algorithm>

namespace {

constexpr const char * LEAF = "leaf-";  // and the leaf's id: a tag of ours

bool is_leaf(const common_peg_ast_node & node) {
    return node.tag.rfind(LEAF, 0) == 0;
}

bool begins(const std::string & text, const std::string & prefix) {
    return text.rfind(prefix, 0) == 0;
}

size_t count_tools(const common_peg_parse_context & ctx, const common_peg_parse_result & result) {
    size_t n = 0;
    ctx.ast.visit(result,
                  [&](const common_peg_ast_node & node) { n += node.tag == common_chat_peg_builder::TOOL_OPEN; });
    return n;
}

}  // namespace

void lctx_leaf_finder::load(common_json grammar) {
    common_json & parsers = grammar.at("parsers");
    const size_t n = parsers.size();
    for (size_t i = 0; i < n; i++) {
        const common_json leaf = parsers.at(i);
        const std::string type = leaf.at("type");
        if (type == "until") {
            const auto words = leaf.at("delimiters").get<std::vector<std::string>>();
            delimiters.insert(delimiters.end(), words.begin(), words.end());
        } else if (type != "string") {
            continue;
        }
        const size_t id = parsers.size();
        parsers.at(i) = common_json{{"type", "tag"}, {"child", id}, {"tag", LEAF + std::to_string(id)}};
        parsers.push_back(leaf);
    }
    arena = common_peg_arena::from_json(grammar);
}

// Text up to a delimiter ends before a part of one at the end of the text: what follows may turn out not to be the
// delimiter.
bool lctx_leaf_finder::cut_in_delimiter(const std::string & text) const {
    return std::any_of(delimiters.begin(), delimiters.end(), [&](const std::string & word) {
        for (size_t n = std::min(word.size(), text.size() + 1); n-- > 1;) {
            if (text.compare(text.size() - n, n, word, 0, n) == 0) {
                return true;
            }
        }
        return false;
    });
}

std::optional<lctx_leaf> lctx_leaf_finder::find(const std::string & text) const {
    if (arena.empty() || cut_in_delimiter(text)) {
        return {};
    }
    common_peg_parse_context ctx(text, COMMON_PEG_PARSE_FLAG_LENIENT);
    const common_peg_parse_result result = arena.parse(ctx);
    if (!result.need_more_input()) {
        return {};
    }
    lctx_leaf leaf;
    for (const std::vector<common_peg_ast_id> * nodes = &result.nodes; !nodes->empty();) {
        const common_peg_ast_node & node = ctx.ast.get(nodes->back());
        if (!is_leaf(node)) {
            leaf.tags.push_back(node.tag);
            nodes = &node.children;
            continue;
        }
        if (!node.is_partial || node.start == node.end || !node.invalid_utf8.empty()) {
            return {};
        }
        leaf.id = std::stoul(node.tag.substr(std::string(LEAF).size()));
        leaf.start = node.start;
        leaf.end = node.end;
        leaf.n_tools = count_tools(ctx, result);
        return leaf;
    }
    return {};
}

std::optional<size_t> lctx_leaf_finder::take(const lctx_leaf & leaf, const std::string & text) const {
    common_peg_parse_context ctx(text, COMMON_PEG_PARSE_FLAG_LENIENT);
    const common_peg_parse_result result = arena.parse(leaf.id, ctx, 0);
    if (result.fail() || !result.invalid_utf8.empty()) {
        return {};
    }
    if (result.need_more_input()) {
        return result.end;
    }
    // a delimiter, or what may become one
    const std::string rest = text.substr(result.end);
    const auto * until = std::get_if<common_peg_until_parser>(&arena.get(leaf.id));
    const bool open = until && std::none_of(until->delimiters.begin(), until->delimiters.end(),
                                            [&](const std::string & word) { return begins(rest, word); });
    return open ? std::optional<size_t>(result.end) : std::nullopt;
}

bool lctx_leaf_finder::is_json_string(const lctx_leaf & leaf) const {
    const auto * string = std::get_if<common_peg_string_parser>(&arena.get(leaf.id));
    return string && string->delimiter == '"';
}
