// The C API: chat templates, by llama.cpp's common/.
#include "chat.h"
#include "firewall.h"
#include "handles.h"
#include "log.h"
#include "text.h"

#include <new>

struct lctx_template {
    common_chat_templates_ptr templates;
    std::string error;
};

namespace {

// What r says, where it says it.
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
    if (inputs.messages.empty() || inputs.messages.back().role != "assistant" || !inputs.messages.back().tool_calls.empty()) {
        throw lctx_refusal("only a final message of the assistant, without tool calls, can be continued");
    }
    inputs.add_generation_prompt = false;
}

common_chat_templates_inputs read_request(const common_json & r, const common_chat_templates * templates) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(r.at("messages"));
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

std::string apply(const common_chat_templates * templates, const common_json & request) {
    const common_chat_templates_inputs inputs = read_request(request, templates);
    const common_chat_params params = common_chat_templates_apply(templates, inputs);
    const common_json syntax = {
        {"format", (int)params.format},
        {"reasoning_format", common_reasoning_format_name(inputs.reasoning_format)},
        {"generation_prompt", params.generation_prompt},
        {"parser", params.parser},
        {"is_continuation", inputs.continue_final_message != COMMON_CHAT_CONTINUATION_NONE},
    };
    return common_json{
        {"prompt", params.prompt},
        {"constraint", params.grammar.empty() ? common_json() : constraint(params)},
        {"preserved_tokens", params.preserved_tokens},
        {"stops", params.additional_stops},
        {"syntax", syntax},
        {"supports_thinking", params.supports_thinking},
    }
        .dump();
}

}  // namespace

lctx_template * lctx_template_create(const lctx_model * model, const char * source) {
    auto * t = new (std::nothrow) lctx_template;
    if (!t) {
        return nullptr;
    }
    lctx_guard(&t->error, [&] {
        lctx_log_begin();
        std::string reason;
        if (!lctx_guard(&reason, [&] { t->templates = common_chat_templates_init(model->model, source ? source : ""); })) {
            throw lctx_refusal("the chat template cannot be read: " + lctx_log_errors(reason.c_str()));
        }
    });
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
        for (const auto & [name, can] : common_chat_templates_get_caps(tmpl->templates.get())) {
            caps[name] = can;
        }
        return common_json{
            {"source", common_chat_templates_source(tmpl->templates.get())},
            {"own", common_chat_templates_was_explicit(tmpl->templates.get())},
            {"caps", caps},
        }
            .dump();
    });
}

lctx_text * lctx_template_apply(const lctx_template * tmpl, const char * request) {
    return lctx_make_text([&] { return apply(tmpl->templates.get(), common_json::parse(request)); });
}
