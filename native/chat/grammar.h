// Finds what is wrong with a grammar, before llama.cpp sees it.
#pragma once

#include "../base/refusal.h"
#include "llama.h"

#include <string>

// A grammar that takes more than its budget, see grammar-budget.h.
struct lctx_grammar_slow : lctx_refusal {
    using lctx_refusal::lctx_refusal;
};

// A schema stands in a grammar as <[LCTX_FIRST_SCHEMA + its number]>, which is no token of any vocabulary.
constexpr uint32_t LCTX_FIRST_SCHEMA = 1u << 30;

// Throws lctx_refusal unless the GBNF text is a grammar with a rule "root" that can match something; it may name
// n_schemas schemas.
void lctx_check_grammar(const llama_vocab * vocab, const std::string & text, int32_t n_schemas = 0);
