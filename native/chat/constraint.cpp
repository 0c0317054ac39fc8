#include "constraint.h"

#include "../base/firewall.h"
#include "../base/log.h"
#include "../base/refusal.h"
#include "common.h"
#include "grammar.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <climits>
#include <cmath>

namespace {

std::vector<std::string> strings(const common_json & spec, const char * name) {
    return spec.contains(name) ? spec.at(name).get<std::vector<std::string>>() : std::vector<std::string>();
}

llama_tokens tokens_of_prompt(const llama_vocab * vocab, const std::string & prompt) {
    llama_tokens tokens = prompt.empty() ? llama_tokens() : common_tokenize(vocab, prompt, false, true);
    const std::string first = tokens.empty() ? "" : common_token_to_piece(vocab, tokens[0], true);
    if (!first.empty() && isspace((unsigned char)first[0]) && !isspace((unsigned char)prompt[0])) {
        tokens.erase(tokens.begin());  // the space that a tokenizer puts in front
    }
    return tokens;
}

// The schema that a stack waits for, -1: none.
int32_t schema_of(const llama_grammar_stack & stack) {
    const bool waits =
        !stack.empty() && stack.back()->type == LLAMA_GRETYPE_TOKEN && stack.back()->value >= LCTX_FIRST_SCHEMA;
    return waits ? (int32_t)(stack.back()->value - LCTX_FIRST_SCHEMA) : -1;
}

// Remembers where a grammar stands, and returns the grammar to it.
class parse_state {
  public:
    explicit parse_state(llama_grammar & grammar)
        : grammar(grammar), stacks(grammar.stacks), partial_utf8(grammar.partial_utf8) {}
    ~parse_state() {
        grammar.stacks = std::move(stacks);
        grammar.partial_utf8 = partial_utf8;
    }
    parse_state(const parse_state &) = delete;

  private:
    llama_grammar & grammar;
    llama_grammar_stacks stacks;
    llama_partial_utf8 partial_utf8;
};

}  // namespace

lctx_constraint::lctx_constraint(const llama_vocab * vocab, const common_json & spec) {
    const auto text = spec.at("grammar").get<std::string>();
    n_schemas = spec.value("n_schemas", 0);
    lctx_check_grammar(vocab, text, n_schemas);
    lazy = spec.value("lazy", false);
    make_grammar(vocab, text);
    if (lazy) {
        waiting.emplace(vocab, spec);
    }
    const auto start = spec.value("thinking_start", "");
    const std::vector<std::string> ends = strings(spec, "thinking_ends");
    if (lazy && !start.empty() && !ends.empty()) {
        std::vector<llama_tokens> end_tokens;
        for (const std::string & end : ends) {
            end_tokens.push_back(common_tokenize(vocab, end, false, true));
        }
        thinking.reset(
            common_reasoning_budget_init(vocab, {common_tokenize(vocab, start, false, true)}, end_tokens, {}, INT_MAX));
    }
    skip_prompt(vocab, spec);
}

void lctx_constraint::make_grammar(const llama_vocab * vocab, const std::string & text) {
    const lctx_grammar_budget::use spend(budget);
    grammar.reset(llama_grammar_init_impl(vocab, text.c_str(), "root", false, nullptr, 0, nullptr, 0));
    if (!grammar) {
        throw lctx_refusal("the grammar cannot be used: " + lctx_log_errors("out of memory"));
    }
}

// Past what the template has written of the answer already.
void lctx_constraint::skip_prompt(const llama_vocab * vocab, const common_json & spec) {
    for (const llama_token token : tokens_of_prompt(vocab, spec.value("prefill", ""))) {
        if (thinking) {
            llama_sampler_accept(thinking.get(), token);
        }
        if (!lazy) {
            if (!allows(token)) {
                throw lctx_refusal("the grammar does not begin with what the chat template begins the answer with");
            }
            feed(token);
        }
    }
}

// Pass a token to the grammar once its trigger has been found.
void lctx_constraint::feed(llama_token token) {
    const lctx_grammar_budget::use spend(budget);
    if (!waiting) {
        llama_grammar_accept_impl(*grammar, token);
    } else if (waiting->finds(token)) {
        for (const auto & [held, text] : waiting->held()) {
            llama_grammar_accept_token(*grammar, held, text);
        }
        waiting.reset();
    }
}

bool lctx_constraint::applies() const {
    if (!thinking) {
        return true;
    }
    const common_reasoning_budget_state state = common_reasoning_budget_get_state(thinking.get());
    return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
}

void lctx_constraint::restrict(llama_token_data_array * candidates) const {
    if (broken) {
        throw lctx_refusal("the grammar has come to an end that it does not allow; begin again");
    }
    if (applies() && !waiting) {
        const lctx_grammar_budget::use spend(budget);
        llama_grammar_apply_impl(*grammar, candidates);
    }
}

bool lctx_constraint::allows(llama_token token) const {
    llama_token_data one = {token, 1.0f, 0.0f};
    llama_token_data_array array = {&one, 1, -1, false};
    restrict(&array);
    return one.logit != -INFINITY;
}

bool lctx_constraint::allows(llama_token token, const std::string & text) const {
    if (!applies() || waiting) {
        return true;
    }
    const lctx_grammar_budget::use spend(budget);
    const parse_state kept(*grammar);
    return lctx_guard(nullptr, [&] { llama_grammar_accept_token(*grammar, token, text); });
}

// Run follow, which advances the grammar past a token, unless the token is part of a thought.
template <typename F> void lctx_constraint::watched(llama_token token, F && follow) {
    const bool open = applies();
    broken = true;  // until the end of this function: an exception leaves a grammar without a state
    if (thinking) {
        llama_sampler_accept(thinking.get(), token);
        const llama_tokens * end = open || !applies() ? nullptr : common_reasoning_budget_get_end_match(thinking.get());
        for (size_t i = 0; end && i < end->size(); i++) {
            feed((*end)[i]);  // the end of a thought may be a trigger
        }
    }
    if (open) {
        follow();
    }
    broken = false;
    budget.refill();
}

void lctx_constraint::accept(llama_token token) {
    watched(token, [&] { feed(token); });
}

void lctx_constraint::accept(llama_token token, const std::string & text) {
    watched(token, [&] {
        const lctx_grammar_budget::use spend(budget);
        if (!text.empty()) {  // places of schemas are tokens, and this is none
            llama_grammar_accept_token(*grammar, token, text);
        }
    });
}

int32_t lctx_constraint::schema_behind(const std::string & text) const {
    if (n_schemas == 0 || !applies() || waiting) {
        return -1;
    }
    const lctx_grammar_budget::use spend(budget);
    const parse_state kept(*grammar);
    if (!text.empty() && !lctx_guard(nullptr, [&] { llama_grammar_accept_token(*grammar, -1, text); })) {
        return -1;
    }
    for (const llama_grammar_stack & stack : grammar->stacks) {
        if (const int32_t schema = schema_of(stack); schema >= 0 && grammar->partial_utf8.n_remain == 0) {
            return schema;
        }
    }
    return -1;
}

void lctx_constraint::pass_schema(int32_t schema) {
    const lctx_grammar_budget::use spend(budget);
    llama_grammar_stacks stacks = grammar->stacks;
    stacks.erase(
        std::remove_if(stacks.begin(), stacks.end(), [&](const auto & stack) { return schema_of(stack) != schema; }),
        stacks.end());
    if (schema < 0 || stacks.empty()) {
        throw lctx_refusal("no schema " + std::to_string(schema) + " may begin here");
    }
    grammar->stacks = std::move(stacks);
    llama_grammar_accept_token(*grammar, LCTX_FIRST_SCHEMA + schema, "");
}
