#include "constraint.h"

#include "common.h"
#include "grammar.h"
#include "log.h"
#include "methods/method.h"
#include "reasoning-budget.h"

#include <algorithm>
#include <climits>
#include <cmath>

namespace {

std::vector<std::string> strings(const common_json & spec, const char * name) {
    return spec.contains(name) ? spec.at(name).get<std::vector<std::string>>() : std::vector<std::string>();
}

// What starts a lazy grammar: tokens, and regular expressions on the text.
struct triggers {
    std::vector<llama_token> tokens;
    std::vector<std::string> words, patterns;

    void add_word(const llama_vocab * vocab, const std::string & word, const std::vector<std::string> & preserved) {
        const llama_tokens ids = common_tokenize(vocab, word, false, true);
        if (ids.size() == 1 && std::find(preserved.begin(), preserved.end(), word) != preserved.end()) {
            tokens.push_back(ids[0]);
        } else {
            words.push_back(word);
        }
    }
};

triggers read_triggers(const llama_vocab * vocab, const common_json & spec) {
    triggers found;
    if (!spec.contains("triggers")) {
        return found;
    }
    const std::vector<std::string> preserved = strings(spec, "preserved_tokens");
    for (const auto & trigger : spec.at("triggers")) {
        const auto value = trigger.at("value").get<std::string>();
        switch ((common_grammar_trigger_type)trigger.at("type").get<int>()) {
            case COMMON_GRAMMAR_TRIGGER_TYPE_WORD:         found.add_word(vocab, value, preserved); break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:      found.patterns.push_back(value); break;
            case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: found.patterns.push_back("^(?:" + value + ")$"); break;
            default:                                       throw lctx_refusal("a trigger of the grammar has an unknown type");
        }
    }
    return found;
}

llama_tokens tokens_of_prompt(const llama_vocab * vocab, const std::string & prompt) {
    llama_tokens tokens = prompt.empty() ? llama_tokens() : common_tokenize(vocab, prompt, false, true);
    const std::string first = tokens.empty() ? "" : common_token_to_piece(vocab, tokens[0], true);
    if (!first.empty() && isspace((unsigned char)first[0]) && !isspace((unsigned char)prompt[0])) {
        tokens.erase(tokens.begin());  // the space that a tokenizer puts in front
    }
    return tokens;
}

}  // namespace

bool lctx_trigger_tail::finds(const llama_vocab * vocab, llama_token token) {
    const std::string piece = common_token_to_piece(vocab, token, true);
    text += piece;
    held.push_back(token);
    sizes.push_back(piece.size());
    const auto is_in_text = [&](const std::string & word) { return text.find(word) != std::string::npos; };
    if (std::find(tokens.begin(), tokens.end(), token) != tokens.end() || std::any_of(words.begin(), words.end(), is_in_text)) {
        return true;
    }
    size_t longest = 0;
    for (const std::string & word : words) {
        longest = std::max(longest, word.size());
    }
    while (!held.empty() && text.size() - sizes.front() + 1 >= longest) {
        text.erase(0, sizes.front());
        held.pop_front();
        sizes.pop_front();
    }
    return false;
}

lctx_constraint::lctx_constraint(const llama_vocab * vocab, const common_json & spec) : vocab(vocab) {
    const auto text = spec.at("grammar").get<std::string>();
    lctx_check_grammar(vocab, text);
    lazy = spec.value("lazy", false);
    make_grammar(vocab, text, spec);
    const auto start = spec.value("thinking_start", "");
    const std::vector<std::string> ends = strings(spec, "thinking_ends");
    if (lazy && !start.empty() && !ends.empty()) {
        std::vector<llama_tokens> end_tokens;
        for (const std::string & end : ends) {
            end_tokens.push_back(common_tokenize(vocab, end, false, true));
        }
        thinking.reset(common_reasoning_budget_init(vocab, {common_tokenize(vocab, start, false, true)}, end_tokens, {}, INT_MAX));
    }
    skip_prompt(vocab, spec);
}

void lctx_constraint::make_grammar(const llama_vocab * vocab, const std::string & text, const common_json & spec) {
    const lctx_grammar_budget::use spend(budget);
    if (!lazy) {
        grammar.reset(llama_sampler_init_grammar(vocab, text.c_str(), "root"));
    } else {
        triggers found = read_triggers(vocab, spec);
        if (found.tokens.empty() && found.words.empty() && found.patterns.empty()) {
            throw lctx_refusal("a lazy grammar needs a trigger");
        }
        if (found.patterns.empty()) {  // a pattern may begin anywhere
            waiting.tokens = found.tokens;
            waiting.words = found.words;
        }
        for (const std::string & word : found.words) {
            found.patterns.push_back(regex_escape(word));
        }
        std::vector<const char *> patterns;
        for (const std::string & pattern : found.patterns) {
            patterns.push_back(pattern.c_str());
        }
        grammar.reset(llama_sampler_init_grammar_lazy_patterns(vocab, text.c_str(), "root", patterns.data(), patterns.size(),
                                                               found.tokens.data(), found.tokens.size()));
    }
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

// Hand a token to the grammar; before a trigger only those that may be a part of it.
void lctx_constraint::feed(llama_token token) {
    const lctx_grammar_budget::use spend(budget);
    if (waiting.tokens.empty() && waiting.words.empty()) {
        llama_sampler_accept(grammar.get(), token);
    } else if (waiting.finds(vocab, token)) {
        for (const llama_token one : waiting.held) {
            llama_sampler_accept(grammar.get(), one);
        }
        waiting = {};
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
    if (applies()) {
        const lctx_grammar_budget::use spend(budget);
        llama_sampler_apply(grammar.get(), candidates);
    }
}

bool lctx_constraint::allows(llama_token token) const {
    llama_token_data one = {token, 1.0f, 0.0f};
    llama_token_data_array array = {&one, 1, -1, false};
    restrict(&array);
    return one.logit != -INFINITY;
}

void lctx_constraint::accept(llama_token token) {
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
        feed(token);
    }
    broken = false;
    budget.refill();
}
