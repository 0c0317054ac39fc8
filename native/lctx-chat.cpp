// The C API: chat templates, by llama.cpp's common/.
#include "base/firewall.h"
#include "base/log.h"
#include "base/refusal.h"
#include "chat.h"
#include "chat/nesting.h"
#include "chat/required.h"
#include "text.h"

#include <new>

struct lctx_template {
    common_chat_templates_ptr plain, with_tools;
    std::string bos, eos;
    bool add_bos = false, add_eos = false;
    bool is_name = false;  // of a format that llama.cpp knows, no Jinja text
    std::string error;
};

namespace {

// Read what r says into value, if it says it.
template <typename T> void read(const common_json & r, const char * name, T & value) {
    if (r.contains(name) && !r.at(name).is_null()) {
        value = r.at(name).get<T>();
    }
}

void read_continuation(const common_json & r, common_chat_templates_inputs & inputs) {
    if (!r.contains("continue_final_message")) {
        return;
    }
    inputs.continue_final_message = common_chat_continuation_parse(r.at("continue_final_message"));
    if (inputs.continue_final_message == COMMON_CHAT_CONTINUATION_NONE) {
        return;
    }
    if (inputs.messages.empty() || inputs.messages.back().role != "assistant" ||
        !inputs.messages.back().tool_calls.empty()) {
        throw lctx_refusal("only a final message of the assistant, without tool calls, can be continued");
    }
    inputs.add_generation_prompt = false;
}

// Templates read the arguments of calls as JSON, and some the answers of tools.
void check_texts(const std::vector<common_chat_msg> & messages) {
    for (const common_chat_msg & message : messages) {
        for (const common_chat_tool_call & call : message.tool_calls) {
            lctx_check_nesting("what a tool call has as arguments", call.arguments);
        }
        if (message.role == "tool") {
            lctx_check_nesting("the answer of a tool", message.content);
        }
    }
}

common_chat_templates_inputs read_request(const common_json & r, const common_chat_templates * templates) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(r.at("messages"));
    check_texts(inputs.messages);
    inputs.parallel_tool_calls = common_chat_templates_get_caps(templates)["supports_parallel_tool_calls"];
    inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    read(r, "parallel_tool_calls", inputs.parallel_tool_calls);
    read(r, "add_generation_prompt", inputs.add_generation_prompt);
    read(r, "enable_thinking", inputs.enable_thinking);
    if (r.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(r.at("tools"));
    }
    if (r.contains("tool_choice")) {
        inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(r.at("tool_choice").get<std::string>());
    }
    if (r.contains("json_schema")) {
        inputs.json_schema = r.at("json_schema").dump();
    }
    if (r.contains("reasoning_format")) {
        inputs.reasoning_format = common_reasoning_format_from_name(r.at("reasoning_format").get<std::string>());
    }
    if (r.contains("kwargs")) {
        for (const auto & item : r.at("kwargs").items()) {
            inputs.chat_template_kwargs[item.key()] = item.value().dump();
        }
    }
    read_continuation(r, inputs);
    return inputs;
}

common_json constraint(const common_chat_params & params) {
    common_json triggers = common_json::array();
    for (const common_grammar_trigger & trigger : params.grammar_triggers) {
        triggers.push_back({{"type", (int)trigger.type}, {"value", trigger.value}});
    }
    return common_json{
        {"grammar", params.grammar},
        {"lazy", params.grammar_lazy},
        {"triggers", triggers},
        {"preserved_tokens", params.preserved_tokens},
        {"prefill", params.generation_prompt},
        {"thinking_start", params.thinking_start_tag},
        {"thinking_ends", params.thinking_end_tags},
    };
}

// The prompt without the tokens that the vocabulary adds.
std::string without_added(const lctx_template & t, const common_chat_templates_inputs & inputs, std::string prompt) {
    if (t.add_bos && !t.bos.empty() && prompt.rfind(t.bos, 0) == 0) {
        prompt.erase(0, t.bos.size());
    }
    const bool continues = inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE;
    const size_t n = t.eos.size();
    if (t.add_eos && n > 0 && !continues && prompt.size() >= n && prompt.compare(prompt.size() - n, n, t.eos) == 0) {
        prompt.erase(prompt.size() - n);
    }
    return prompt;
}

std::string apply(const lctx_template & t, const common_json & request) {
    const bool tools = request.contains("tools") && !request.at("tools").empty();
    const common_chat_templates * templates = (tools && t.with_tools ? t.with_tools : t.plain).get();
    common_chat_templates_inputs inputs = read_request(request, templates);
    inputs.use_jinja = !t.is_name;
    common_chat_params params = common_chat_templates_apply(templates, inputs);
    if (tools && inputs.tool_choice == COMMON_CHAT_TOOL_CHOICE_REQUIRED && !params.grammar.empty()) {
        params.grammar = lctx_required_grammar(params.grammar, params.parser);
    }
    const common_json syntax = {
        {"format", (int)params.format},
        {"reasoning_format", common_reasoning_format_name(inputs.reasoning_format)},
        {"generation_prompt", params.generation_prompt},
        {"parser", params.parser},
        {"is_continuation", inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE},
    };
    return common_json{
        {"prompt", without_added(t, inputs, params.prompt)},
        {"constraint", params.grammar.empty() ? common_json() : constraint(params)},
        {"preserved_tokens", params.preserved_tokens},
        {"stops", params.additional_stops},
        {"syntax", syntax},
        {"supports_thinking", params.supports_thinking},
    }
        .dump();
}

common_chat_templates_ptr read_template(const lctx_template & t, const std::string & source) {
    common_chat_templates_ptr templates;
    std::string reason;
    lctx_log_begin();
    if (!lctx_guard(&reason, [&] { templates = common_chat_templates_init(nullptr, source, t.bos, t.eos); })) {
        throw lctx_refusal("the chat template cannot be read: " + lctx_log_errors(reason.c_str()));
    }
    return templates;
}

void read_spec(lctx_template & t, const common_json & spec) {
    read(spec, "bos", t.bos);
    read(spec, "eos", t.eos);
    read(spec, "add_bos", t.add_bos);
    read(spec, "add_eos", t.add_eos);
    read(spec, "is_name", t.is_name);
    t.plain = read_template(t, spec.at("source").get<std::string>());
    const auto with_tools = spec.value("with_tools", "");
    if (!with_tools.empty()) {
        t.with_tools = read_template(t, with_tools);
    }
}

}  // namespace

lctx_template * lctx_template_create(const char * spec) {
    auto * t = new (std::nothrow) lctx_template;
    if (t) {
        lctx_guard(&t->error, [&] { read_spec(*t, lctx_parse_json("the template", spec)); });
    }
    return t;
}

const char * lctx_template_error(const lctx_template * tmpl) {
    return !tmpl ? "out of memory" : tmpl->error.empty() ? nullptr : tmpl->error.c_str();
}

void lctx_template_free(lctx_template * tmpl) {
    delete tmpl;
}

lctx_text * lctx_template_info(const lctx_template * tmpl) {
    return lctx_make_text([&] {
        common_json caps = common_json::object();
        for (const auto & [name, can] : common_chat_templates_get_caps(tmpl->plain.get())) {
            caps[name] = can;
        }
        return common_json{{"caps", caps}}.dump();
    });
}

lctx_text * lctx_template_apply(const lctx_template * tmpl, const char * request) {
    return lctx_make_text([&] { return apply(*tmpl, lctx_parse_json("the request", request)); });
}
