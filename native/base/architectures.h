// Lists llama.cpp's architectures: which of them methods serve, and what differs in their attention.
#pragma once

#include "llama-arch.h"

#include <string>

struct llama_cparams;
struct llama_model;

struct lctx_architecture {
    llm_arch arch;
    const char * why_not;   // why no method serves it, or nullptr: tests/native/test_models.py proves that one can
    bool float_product;     // the output projection accumulates in float, where half precision overflows
    bool trained_in_pairs;  // NORM rotation, and trained so: the rows of Wk and Wv have the same order
    bool scaled_softcap;    // scores are capped whatever hparams say, and scaled by f_attn_out_scale before
    bool mixes_sequences;   // llama.cpp's recurrent layers are wrong where a ubatch has several sequences
    bool even_ubatches;     // llama.cpp ends the process where n_seq_max does not divide n_ubatch
};

// The row of an architecture; nullptr: it has not been compared with llama.cpp.
const lctx_architecture * lctx_find_architecture(llm_arch arch);

// Throws lctx_refusal where llama.cpp would end the process while it makes the context, with a method or without.
void lctx_check_ubatches(const llama_model & model, const llama_cparams & cparams);

// Return why the model cannot run with a method, as far as can be seen before its graph is built; empty when it can.
std::string lctx_why_unsupported(const llama_model & model, const llama_cparams & cparams);
