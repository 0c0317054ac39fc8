// Watches an answer for what begins a lazy grammar: a token, or text that a pattern finds.
#pragma once

#include "json.h"
#include "llama.h"
#include "pattern.h"

#include <deque>
#include <string>
#include <utility>
#include <vector>

class lctx_trigger {
  public:
    // spec: see lctx_sampler_constrain. Throws lctx_refusal.
    lctx_trigger(const llama_vocab * vocab, const common_json & spec);

    // Return whether the grammar begins with this token, or with text before it that becomes a trigger with it. It
    // finds what llama.cpp's own search in all of the answer finds, but keeps the end of the answer alone.
    bool finds(llama_token token);

    // Return what the grammar begins with: tokens, and the text that each of them stands for.
    const std::deque<std::pair<llama_token, std::string>> & held() const { return held_; }

  private:
    void add(const common_json & trigger, const std::vector<std::string> & preserved);
    void drop(size_t pos);

    const llama_vocab * vocab_;
    std::vector<llama_token> tokens_;
    std::vector<lctx_pattern> patterns_;
    std::deque<std::pair<llama_token, std::string>> held_;
    size_t first_ = 0;  // where the tokens that are held begin in the answer
};
