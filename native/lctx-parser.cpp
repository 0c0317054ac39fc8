// The C API: what a model's answer says, by llama.cpp's common/.
#include "chat.h"
#include "firewall.h"
#include "log.h"
#include "text.h"

#include <new>
#include <random>

struct lctx_parser {
    common_chat_parser_params params;
    common_chat_msg message;       // what was told already
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
    p.params.generation_prompt = syntax.at("generation_prompt").get<std::string>();
    p.params.is_continuation = syntax.at("is_continuation").get<bool>();
    const auto parser = syntax.at("parser").get<std::string>();
    if (!parser.empty()) {
        p.params.parser.load(parser);
    }
    if (p.params.is_continuation) {  // what is continued was said already
        p.message = common_chat_parse("", true, p.params);
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

std::string feed(lctx_parser & p, const std::string & answer, bool final) {
    common_chat_msg message = common_chat_parse(answer, !final, p.params);
    common_json deltas = common_json::array();
    if (!message.empty()) {
        message.set_tool_call_ids(p.ids, [&] { return new_id(p.random); });
        for (const common_chat_msg_diff & diff : common_chat_msg_diff::compute_diffs(p.message, message)) {
            deltas.push_back(to_json(diff));
        }
        p.message = message;
    }
    return deltas.dump_safe();
}

}  // namespace

lctx_parser * lctx_parser_create(const char * syntax) {
    auto * p = new (std::nothrow) lctx_parser;
    if (p) {
        lctx_guard(&p->error, [&] { read_syntax(*p, common_json::parse(syntax)); });
    }
    return p;
}

const char * lctx_parser_error(const lctx_parser * parser) {
    return !parser ? "out of memory" : parser->error.empty() ? nullptr : parser->error.c_str();
}

void lctx_parser_free(lctx_parser * parser) {
    delete parser;
}

lctx_text * lctx_parser_feed(lctx_parser * parser, const char * answer, size_t size, int32_t final) {
    return lctx_make_text([&] { return feed(*parser, std::string(answer, size), final != 0); });
}
