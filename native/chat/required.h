// The grammar of an answer that has to call a tool.
#pragma once

#include <string>

// grammar: llama.cpp's own for a required call, by parser (of common_peg_arena::save). It allows text in front of the
// call, which need not end; what is returned allows thoughts alone.
std::string lctx_required_grammar(const std::string & grammar, const std::string & parser);
