#include "required.h"

#include "chat-peg-parser.h"
#include "json-schema-to-grammar.h"

namespace {

common_json nothing() {
    return common_json{{"type", "epsilon"}};
}

bool is_nothing(const common_json & nodes, size_t id) {
    return nodes.at(id).at("type") == "epsilon";
}

// Take the text that is said out of what node id reads; what only read such text reads nothing then.
void drop_text(common_json & nodes, size_t id) {
    common_json & node = nodes.at(id);
    const std::string type = node.at("type");
    if (type == "tag" && node.at("tag") == common_chat_peg_builder::CONTENT) {
        node = nothing();
    } else if (type == "sequence" || type == "choice") {
        std::vector<int> left;
        for (const int child : node.at("children").get<std::vector<int>>()) {
            drop_text(nodes, child);
            if (!is_nothing(nodes, child)) {
                left.push_back(child);
            }
        }
        nodes.at(id) = left.empty() ? nothing() : common_json{{"type", type}, {"children", left}};
    } else if (type == "repetition" || type == "tag" || type == "atomic") {
        const size_t child = node.at("child").get<int>();
        drop_text(nodes, child);
        if (is_nothing(nodes, child)) {
            nodes.at(id) = nothing();
        }
    }
}

// The rule of the root alone: the others stand in the grammar, with the schemas, which a saved parser has not.
std::string root_rule(const std::string & grammar) {
    const size_t begin = grammar.rfind("root ::=", 0) == 0 ? 0 : grammar.find("\nroot ::=") + 1;
    return grammar.substr(begin, grammar.find('\n', begin) - begin);
}

}  // namespace

std::string lctx_required_grammar(const std::string & grammar, const std::string & parser) {
    common_json saved = common_json::parse(parser);
    drop_text(saved.at("parsers"), saved.at("root").get<int>());
    const common_peg_arena arena = common_peg_arena::from_json(saved);
    const std::string with = root_rule(grammar);
    const std::string without =
        root_rule(build_grammar([&](const common_grammar_builder & b) { arena.build_grammar(b, false); }));
    std::string result = grammar;
    return result.replace(result.find(with), with.size(), without);
}
