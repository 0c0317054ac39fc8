// A grammar that a sampler has to follow, from the first token or from a trigger on.
#pragma once

#include "grammar-budget.h"
#include "json.h"
#include "llama-grammar.h"
#include "llama.h"
#include "trigger.h"

#include <memory>
#include <optional>
#include <string>

class lctx_constraint {
  public:
    // spec: see lctx_sampler_constrain. Throws lctx_refusal; every function throws lctx_grammar_slow when the budget is
    // spent.
    lctx_constraint(const llama_vocab * vocab, const common_json & spec);

    // Take the tokens that are not allowed now to -inf.
    void restrict(llama_token_data_array * candidates) const;

    bool allows(llama_token token) const;

    // Return whether text, the rest of a token, may come next.
    bool allows(llama_token token, const std::string & text) const;

    // Advance past a token that is allowed, or past the part of it that is text.
    void accept(llama_token token);
    void accept(llama_token token, const std::string & text);

    // The schema that may begin after text, -1: none.
    int32_t schema_behind(const std::string & text) const;

    // Advance past a schema that may begin here; what the schema itself allows is checked by the caller.
    void pass_schema(int32_t schema);

  private:
    struct deleter {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
        void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
    };

    void make_grammar(const llama_vocab * vocab, const std::string & text);
    void skip_prompt(const llama_vocab * vocab, const common_json & spec);
    bool applies() const;
    void feed(llama_token token);
    template <typename F> void watched(llama_token token, F && follow);

    std::unique_ptr<llama_grammar, deleter> grammar;
    std::unique_ptr<llama_sampler, deleter> thinking;  // what the model thinks triggers nothing; nullptr: not watched
    mutable lctx_grammar_budget budget;
    std::optional<lctx_trigger> waiting;  // until the grammar begins
    int32_t n_schemas = 0;
    bool lazy = false;
    bool broken = false;
};
