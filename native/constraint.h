// A grammar that a sampler has to follow, from the first token or from a trigger on.
#pragma once

#include "grammar-budget.h"
#include "json.h"
#include "llama.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

// The end of an answer in which no trigger has been found yet. llama.cpp searches all of the answer again with every token.
struct lctx_trigger_tail {
    // Whether the tokens in `held` have a trigger now; when not, those that cannot be a part of one are dropped.
    bool finds(const llama_vocab * vocab, llama_token token);

    std::vector<llama_token> tokens;  // each is a trigger
    std::vector<std::string> words;   // neither tokens nor words: nothing is held back
    std::deque<llama_token> held;

  private:
    std::string text;  // of the tokens that are held
    std::deque<size_t> sizes;
};

class lctx_constraint {
  public:
    // spec: see lctx_sampler_constrain. Throws lctx_refusal; every function throws lctx_grammar_slow when the budget is spent.
    lctx_constraint(const llama_vocab * vocab, const common_json & spec);

    // Take the tokens that are not allowed now to -inf.
    void restrict(llama_token_data_array * candidates) const;

    bool allows(llama_token token) const;

    // Go on behind a token that is allowed.
    void accept(llama_token token);

  private:
    struct free_sampler {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
    };
    using sampler_ptr = std::unique_ptr<llama_sampler, free_sampler>;

    void make_grammar(const llama_vocab * vocab, const std::string & text, const common_json & spec);
    void skip_prompt(const llama_vocab * vocab, const common_json & spec);
    bool applies() const;
    void feed(llama_token token);

    const llama_vocab * vocab;
    sampler_ptr grammar;
    sampler_ptr thinking;  // what the model thinks triggers nothing; nullptr: not watched
    mutable lctx_grammar_budget budget;
    lctx_trigger_tail waiting;
    bool lazy = false;
    bool broken = false;
};
