// The C API: what a model's answer says, by llama.cpp's common/.
#include "base/firewall.h"
#include "base/log.h"
#include "base/refusal.h"
#include "chat-peg-parser.h"
#include "chat.h"
#include "chat/leaf.h"
#include "chat/nesting.h"
#include "text.h"

#include <cctype>
#include <new>
#include <random>

namespace {

enum class field { content, reasoning, arguments };

// Text that only grows a field of the message: what comes next needs no parse of what came before.
struct open_text {
    lctx_leaf leaf;
    field of = field::content;
    bool escaped = false;  // the field has it as the inside of a JSON string
    bool trimmed = false;  // the field has no spaces at its end
    size_t taken = 0;      // by the leaf, up to here in the text
    size_t told = 0;       // up to here in the text
};

}  // namespace

struct lctx_parser {
    common_chat_parser_params params;
    lctx_leaf_finder finder;
    std::string text;         // what the prompt begins of the answer, and the answer so far
    common_chat_msg message;  // what was reported already
    std::optional<open_text> open;
    lctx_open_brackets open_brackets;
    uint64_t n_parsed = 0;         // bytes
    std::vector<std::string> ids;  // of the tool calls
    std::mt19937_64 random{std::random_device{}()};
    std::string error;
};

namespace {

std::string new_id(std::mt19937_64 & random) {
    static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    std::string id = "call_";
    for (int i = 0; i < 24; i++) {
        id += digits[random() % (sizeof(digits) - 1)];
    }
    return id;
}

void read_syntax(lctx_parser & p, const common_json & syntax) {
    p.params.format = (common_chat_format)syntax.at("format").get<int>();
    p.params.reasoning_format = common_reasoning_format_from_name(syntax.at("reasoning_format").get<std::string>());
    p.text = syntax.at("generation_prompt").get<std::string>();
    p.params.is_continuation = syntax.at("is_continuation").get<bool>();
    const auto parser = syntax.at("parser").get<std::string>();
    if (!parser.empty()) {
        const common_json grammar = common_json::parse(parser);
        p.params.parser = common_peg_arena::from_json(grammar);
        p.finder.load(grammar);
    }
    if (p.params.is_continuation) {  // what is continued was said already
        p.message = common_chat_parse(p.text, true, p.params);
    }
}

common_json to_json(const common_chat_msg_diff & diff) {
    common_json delta = common_json::object();
    if (!diff.reasoning_content_delta.empty()) {
        delta["reasoning_content"] = diff.reasoning_content_delta;
    }
    if (!diff.content_delta.empty()) {
        delta["content"] = diff.content_delta;
    }
    if (diff.tool_call_index != std::string::npos) {
        delta["tool_call"] = common_json{
            {"index", diff.tool_call_index},
            {"id", diff.tool_call_delta.id},
            {"name", diff.tool_call_delta.name},
            {"arguments", diff.tool_call_delta.arguments},
        };
    }
    return delta;
}

// ---- text that only grows a field of the message ----

std::string escaped(const std::string & text) {
    const std::string quoted = common_json::make(text).dump();
    return quoted.substr(1, quoted.size() - 2);
}

std::string form(const open_text & open, const std::string & text) {
    return open.escaped ? escaped(text) : text;
}

std::string & text_of(common_chat_msg & message, field of) {
    switch (of) {
        case field::content:   return message.content;
        case field::reasoning: return message.reasoning_content;
        default:               return message.tool_calls.back().arguments;
    }
}

// The end of text[begin, end) without the spaces at its end.
size_t without_spaces(const std::string & text, size_t begin, size_t end) {
    while (end > begin && std::isspace((unsigned char)text[end - 1])) {
        end--;
    }
    return end;
}

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Read what llama.cpp's mappers make of a leaf inside these tags: the innermost one that says something counts.
bool read_tags(const lctx_leaf_finder & finder, open_text & open) {
    using tags = common_chat_peg_builder;
    const bool json = finder.is_json_string(open.leaf);
    for (auto tag = open.leaf.tags.rbegin(); tag != open.leaf.tags.rend(); tag++) {
        if (*tag == tags::CONTENT || *tag == tags::REASONING) {
            open.of = *tag == tags::CONTENT ? field::content : field::reasoning;
            return true;
        }
        if (*tag == tags::TOOL_ARG_STRING_VALUE || *tag == tags::TOOL_ARG_VALUE || *tag == tags::TOOL_ARGS) {
            open.of = field::arguments;
            open.escaped = *tag == tags::TOOL_ARG_STRING_VALUE || !json;
            open.trimmed = *tag == tags::TOOL_ARGS && json;
            return json || *tag != tags::TOOL_ARG_VALUE;
        }
    }
    return false;
}

// The open text at the end of what was parsed just now, when the message ends with it.
std::optional<open_text> find_open(lctx_parser & p) {
    const std::optional<lctx_leaf> leaf = p.finder.find(p.text);
    p.n_parsed += p.text.size();
    open_text open;
    if (!leaf || !read_tags(p.finder, open = {*leaf})) {
        return {};
    }
    if (open.of == field::arguments && (leaf->n_tools == 0 || leaf->n_tools != p.message.tool_calls.size())) {
        return {};
    }
    open.taken = leaf->end;
    open.told = open.trimmed ? without_spaces(p.text, leaf->start, open.taken) : open.taken;
    const std::string told = form(open, p.text.substr(leaf->start, open.told - leaf->start));
    const bool same = ends_with(text_of(p.message, open.of), told);
    return same ? std::optional<open_text>(open) : std::nullopt;
}

common_chat_msg_diff diff_of(const lctx_parser & p, field of, const std::string & text) {
    common_chat_msg_diff diff;
    if (of == field::arguments) {
        diff.tool_call_index = p.message.tool_calls.size() - 1;
        diff.tool_call_delta.arguments = text;
    } else {
        (of == field::content ? diff.content_delta : diff.reasoning_content_delta) = text;
    }
    return diff;
}

// Read what came after the open text as more of it; false when it ends there.
bool extend(lctx_parser & p, common_json & deltas) {
    open_text & open = *p.open;
    const std::string next = p.text.substr(open.taken);
    const std::optional<size_t> n = p.finder.take(open.leaf, next);
    p.n_parsed += next.size();
    if (!n) {
        return false;
    }
    open.taken += *n;
    const size_t end = open.trimmed ? without_spaces(p.text, open.told, open.taken) : open.taken;
    if (end > open.told) {
        const std::string text = form(open, p.text.substr(open.told, end - open.told));
        text_of(p.message, open.of) += text;
        deltas.push_back(to_json(diff_of(p, open.of, text)));
        open.told = end;
    }
    return true;
}

// ---- the whole text ----

// A parse reads the text twice, for the message and for the open text. All parses together read at most 256 KiB and 64
// times the text: where no text is open for long, the message lags by up to n/32 in a text of n.
bool may_parse(const lctx_parser & p) {
    return p.n_parsed + 2 * p.text.size() <= (1 << 18) + 64 * p.text.size();
}

// llama.cpp reads nested values by recursion.
void check_open(const lctx_parser & p) {
    if (p.open_brackets.most > LCTX_MAX_OPEN && !p.params.parser.empty()) {
        throw lctx_refusal("the answer opens more than " + std::to_string(LCTX_MAX_OPEN) + " brackets in each other");
    }
}

void parse(lctx_parser & p, bool final, common_json & deltas) {
    check_open(p);
    p.n_parsed += p.text.size();
    common_chat_msg message = common_chat_parse(p.text, !final, p.params);
    if (message.empty()) {
        return;
    }
    message.set_tool_call_ids(p.ids, [&] { return new_id(p.random); });
    for (const common_chat_msg_diff & diff : common_chat_msg_diff::compute_diffs(p.message, message)) {
        deltas.push_back(to_json(diff));
    }
    p.message = message;
}

std::string feed(lctx_parser & p, const std::string & piece) {
    p.text += piece;
    p.open_brackets.read(piece);
    common_json deltas = common_json::array();
    if (p.open && extend(p, deltas)) {
        return deltas.dump_safe();
    }
    p.open.reset();
    if (may_parse(p)) {
        parse(p, false, deltas);
        p.open = find_open(p);
    }
    return deltas.dump_safe();
}

std::string end(lctx_parser & p, bool complete) {
    common_json deltas = common_json::array();
    p.open.reset();
    parse(p, complete, deltas);
    return deltas.dump_safe();
}

}  // namespace

lctx_parser * lctx_parser_create(const char * syntax) {
    auto * p = new (std::nothrow) lctx_parser;
    if (p) {
        lctx_guard(&p->error, [&] { read_syntax(*p, lctx_parse_json("the syntax", syntax)); });
    }
    return p;
}

const char * lctx_parser_error(const lctx_parser * parser) {
    return !parser ? "out of memory" : parser->error.empty() ? nullptr : parser->error.c_str();
}

void lctx_parser_free(lctx_parser * parser) {
    delete parser;
}

lctx_text * lctx_parser_feed(lctx_parser * parser, const char * piece, size_t size) {
    return lctx_make_text([&] { return feed(*parser, std::string(piece, size)); });
}

lctx_text * lctx_parser_end(lctx_parser * parser, int32_t complete) {
    return lctx_make_text([&] { return end(*parser, complete != 0); });
}

uint64_t lctx_parser_parsed(const lctx_parser * parser) {
    return parser->n_parsed;
}
