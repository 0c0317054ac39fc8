// A grammar that a sampler has to follow, from the first token or from a trigger on.
#pragma once

#include "grammar-budget.h"
#include "json.h"
#include "llama.h"

#include <memory>
#include <string>

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

    sampler_ptr grammar;
    sampler_ptr thinking;  // what the model thinks triggers nothing; nullptr: not watched
    mutable lctx_grammar_budget budget;
    bool lazy = false;
    bool broken = false;
};
