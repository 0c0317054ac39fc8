// The C API from logits to text: samplers, grammars, chat templates and parsers, log-probabilities. lctx.h has the
// rules.
#pragma once

#include "lctx.h"

#ifdef __cplusplus
extern "C" {
#endif

// [cdef begin]

// ---- text made by the library ----

typedef struct lctx_text lctx_text;

// The text, UTF-8 without NUL bytes; NULL: lctx_text_error says why there is none.
const char * lctx_text_get(const lctx_text * text);
const char * lctx_text_error(const lctx_text * text);
void lctx_text_free(lctx_text * text);

// ---- sampler ----

typedef struct lctx_sampler lctx_sampler;

typedef struct lctx_sampler_params {
    uint32_t seed;
    int32_t top_k;
    float top_p;
    float min_p;
    float typical_p;
    float top_n_sigma;      // <= 0: off
    float xtc_probability;  // 0: off
    float xtc_threshold;
    float temp;            // 0: greedy; < 0: sample from the plain distribution
    float dynatemp_range;  // 0: off
    float dynatemp_exponent;
    float adaptive_target;  // < 0: off
    float adaptive_decay;
    int32_t min_keep;        // tokens that top_p, min_p, typical and XTC leave at least
    int32_t penalty_last_n;  // at most the last 4194304 tokens
    float repeat_penalty;
    float frequency_penalty;
    float presence_penalty;
    float dry_multiplier;  // 0: off
    float dry_base;
    int32_t dry_allowed_length;
    int32_t dry_penalty_last_n;  // at most the last 1048576 tokens
    int32_t mirostat_mode;
    float mirostat_tau;
    float mirostat_eta;
    int32_t n_logit_bias;
    const int32_t * logit_bias_tokens;
    const float * logit_bias_values;
    int32_t n_dry_breakers;
    const char * const * dry_breakers;  // texts that no repetition is followed across
    int32_t n_before;
    const int32_t * before;  // tokens of the text so far, for DRY; penalties count sampled tokens only
    const char * samplers;   // NULL, or llama.cpp's letters of those that run, in their order: "edskypmxta"
} lctx_sampler_params;

void lctx_sampler_params_default(lctx_sampler_params * params);

// llama.cpp's sampler chain: logit bias, then the samplers, then a choice by the distribution. In place of all samplers
// but penalties and DRY stands mirostat, or with temp 0 the likeliest token, unless XTC, dynamic temperature or
// samplers are given. NULL when out of memory, and for an unknown letter.
lctx_sampler * lctx_sampler_create(const lctx_model * model, const lctx_sampler_params * params);

// Choose a token from float[n_vocab] and remember it for the penalties; -inf forbids one. -1 when none is left, or a
// logit is NaN or infinite: lctx_sampler_error names its token. -2 when the grammar takes too long: a token may take a
// second of the processor.
int32_t lctx_sampler_sample(lctx_sampler * sampler, const float * logits, int32_t n_vocab);

// The parts of lctx_sampler_sample, for a caller that asks a grammar in between: choose a token, -1 as there; remember
// the one taken.
int32_t lctx_sampler_choose(lctx_sampler * sampler, const float * logits, int32_t n_vocab);
void lctx_sampler_accept(lctx_sampler * sampler, int32_t token);

// The probabilities by which the last token was chosen: float[n_vocab], 0 for those that the samplers left out.
// LCTX_INVALID when none was chosen, or of another n_vocab.
int32_t lctx_sampler_probs(const lctx_sampler * sampler, float * probs, int32_t n_vocab);

void lctx_sampler_free(lctx_sampler * sampler);

// ---- grammars ----

// The GBNF grammar of what a JSON schema allows; it may take long, and much memory.
lctx_text * lctx_schema_to_grammar(const char * schema);

// Let a sampler choose only what a grammar allows. constraint: JSON, "grammar" (GBNF, starts at "root"), and what
// lctx_template_apply adds to it; "lazy": the grammar begins with a trigger. LCTX_INVALID: lctx_sampler_error says why,
// the sampler is as before.
int32_t lctx_sampler_constrain(lctx_sampler * sampler, const char * constraint);

// Return why the last call on the sampler failed, or NULL.
const char * lctx_sampler_error(const lctx_sampler * sampler);

// A grammar with places for schemas that the caller holds; a token may begin in the grammar and end in a schema, or the
// other way round. constraint: as above, and "n_schemas"; the place of number i is <[2^30 + i]>. Never NULL but when
// out of memory; check lctx_grammar_error.
typedef struct lctx_grammar lctx_grammar;
lctx_grammar * lctx_grammar_create(const lctx_model * model, const char * constraint);
void lctx_grammar_free(lctx_grammar * grammar);

// Return why the last call on the grammar failed, or NULL.
const char * lctx_grammar_error(const lctx_grammar * grammar);

// Take the logits of tokens that may not come next to -inf. LCTX_INVALID: it takes too long, or the grammar is broken.
int32_t lctx_grammar_restrict(lctx_grammar * grammar, float * logits, int32_t n_vocab);

// 1 when a token may come next, or with text only this part of it; 0 when not; LCTX_INVALID.
int32_t lctx_grammar_allows(lctx_grammar * grammar, int32_t token, const char * text, size_t size);

// Advance past a token, or with text only past this part of it; LCTX_INVALID when it is not allowed.
int32_t lctx_grammar_accept(lctx_grammar * grammar, int32_t token, const char * text, size_t size);

// The schema that may begin after a text, which may be empty; -1: none.
int32_t lctx_grammar_schema_behind(lctx_grammar * grammar, const char * text, size_t size);

// Advance past a schema that may begin here; LCTX_INVALID for another.
int32_t lctx_grammar_pass_schema(lctx_grammar * grammar, int32_t schema);

// ---- chat ----

typedef struct lctx_template lctx_template;
typedef struct lctx_parser lctx_parser;

// Read a chat template. spec: JSON with "source" (Jinja text), "with_tools" (another one, for requests with tools),
// "is_name" (source is the name of a format that llama.cpp knows), "bos", "eos" (texts of tokens), "add_bos", "add_eos"
// (the vocabulary adds them). Never NULL but when out of memory; check lctx_template_error. It may run endlessly,
// recurse and take all memory, as does all that renders it.
lctx_template * lctx_template_create(const char * spec);

// NULL when the template can be used, else why not.
const char * lctx_template_error(const lctx_template * tmpl);

void lctx_template_free(lctx_template * tmpl);

// JSON: "caps" (what the template can render).
lctx_text * lctx_template_info(const lctx_template * tmpl);

// Render a conversation. request: JSON with OpenAI's "messages", "tools", "tool_choice" (auto, none, required),
// "parallel_tool_calls"; "json_schema", "add_generation_prompt", "continue_final_message", "enable_thinking",
// "reasoning_format", "kwargs" (more variables of the template). The answer, JSON: "prompt" (no BOS where the
// vocabulary adds one), "constraint" (for lctx_sampler_constrain; null for none), "preserved_tokens" (texts that one
// special token stands for and the parser needs), "stops", "syntax" (for lctx_parser_create), "supports_thinking".
lctx_text * lctx_template_apply(const lctx_template * tmpl, const char * request);

// A parser of one answer. Never NULL but when out of memory; check lctx_parser_error.
lctx_parser * lctx_parser_create(const char * syntax);
const char * lctx_parser_error(const lctx_parser * parser);
void lctx_parser_free(lctx_parser * parser);

// Read the next piece of the answer. JSON, what is new since the last call: a list of objects with "reasoning_content",
// "content" or "tool_call" (index, id, name, arguments: those that are new). What may still turn out to be something
// else is held back. An error says that nothing could be made of the text so far; more of it may make sense.
lctx_text * lctx_parser_feed(lctx_parser * parser, const char * piece, size_t size);

// Read what was held back. complete: the answer ends here; else it was cut off. An error says that a complete answer is
// not what the syntax allows; read it as one that was cut off then.
lctx_text * lctx_parser_end(lctx_parser * parser, int32_t complete);

// Bytes parsed so far, those that were parsed again included: at most 256 KiB and 64 times the text before
// lctx_parser_end.
uint64_t lctx_parser_parsed(const lctx_parser * parser);

// ---- log-probabilities ----

// Of float[n_rows][n_vocab]: own[i] that of tokens[i] (NaN for a token of -1), and the n_top likeliest tokens of every
// row, the likeliest first; top_tokens, top: [n_rows][n_top]. LCTX_FAILED when a logit is NaN or infinite, or all of a
// row are -inf.
int32_t lctx_logprobs(const float * logits, int32_t n_rows, int32_t n_vocab, const int32_t * tokens, float * own,
                      int32_t n_top, int32_t * top_tokens, float * top);

// [cdef end]

#ifdef __cplusplus
}
#endif
