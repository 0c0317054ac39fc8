#include "trigger.h"

#include "../base/refusal.h"
#include "common.h"

#include <algorithm>

lctx_trigger::lctx_trigger(const llama_vocab * vocab, const common_json & spec) : vocab_(vocab) {
    std::vector<std::string> preserved;
    if (spec.contains("preserved_tokens")) {
        preserved = spec.at("preserved_tokens").get<std::vector<std::string>>();
    }
    if (spec.contains("triggers")) {
        for (const auto & trigger : spec.at("triggers")) {
            add(trigger, preserved);
        }
    }
    if (tokens_.empty() && patterns_.empty()) {
        throw lctx_refusal("a lazy grammar needs a trigger");
    }
}

void lctx_trigger::add(const common_json & trigger, const std::vector<std::string> & preserved) {
    const auto value = trigger.at("value").get<std::string>();
    switch ((common_grammar_trigger_type)trigger.at("type").get<int>()) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: {
            const llama_tokens ids = common_tokenize(vocab_, value, false, true);
            if (ids.size() == 1 && std::find(preserved.begin(), preserved.end(), value) != preserved.end()) {
                tokens_.push_back(ids[0]);
            } else {
                patterns_.emplace_back(regex_escape(value));
            }
            break;
        }
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN:      patterns_.emplace_back(value); break;
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: patterns_.emplace_back("^(?:" + value + ")$"); break;
        default:                                       throw lctx_refusal("a trigger of the grammar has an unknown type");
    }
}

bool lctx_trigger::finds(llama_token token) {
    const std::string piece = common_token_to_piece(vocab_, token, true);
    if (std::find(tokens_.begin(), tokens_.end(), token) != tokens_.end()) {
        held_ = {{token, piece}};
        return true;
    }
    held_.emplace_back(token, piece);
    for (lctx_pattern & pattern : patterns_) {
        pattern.read(piece);
    }
    size_t first_open = lctx_pattern::NONE;
    for (const lctx_pattern & pattern : patterns_) {
        const size_t start = pattern.find();
        if (start != lctx_pattern::NONE) {
            drop(start);
            if (!held_.empty() && first_ < start) {
                held_.front().second.erase(0, start - first_);
            }
            return true;
        }
        first_open = std::min(first_open, pattern.first_open());
    }
    drop(first_open);
    return false;
}

// Forget the tokens that end before pos, or there.
void lctx_trigger::drop(size_t pos) {
    while (!held_.empty() && first_ + held_.front().second.size() <= pos) {
        first_ += held_.front().second.size();
        held_.pop_front();
    }
}
