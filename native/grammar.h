// What is wrong with a grammar, before llama.cpp sees it.
#pragma once

#include "llama.h"
#include "methods/method.h"

#include <string>

// A grammar that takes more than its budget, see grammar-budget.h.
struct lctx_grammar_slow : lctx_refusal {
    using lctx_refusal::lctx_refusal;
};

// Throws lctx_refusal when the GBNF text is no grammar with a rule "root".
void lctx_check_grammar(const llama_vocab * vocab, const std::string & text);
