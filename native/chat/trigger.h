// What begins a lazy grammar within an answer: a token, or text that a pattern finds.
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

    // Whether the grammar begins with this token, or text before it that becomes a trigger with it: as llama.cpp's own search in all of
    // the answer, whose end alone is kept here.
    bool finds(llama_token token);

    // What the grammar begins with: tokens, and the text that each of them stands for.
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
