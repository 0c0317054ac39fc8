// What is wrong with a grammar, before llama.cpp sees it.
#pragma once

#include "llama.h"

#include <string>

// Throws lctx_refusal when the GBNF text is no grammar with a rule "root".
void lctx_check_grammar(const llama_vocab * vocab, const std::string & text);
