// The C API: a grammar around schemas.
#include "base/firewall.h"
#include "base/log.h"
#include "chat/constraint.h"
#include "chat/nesting.h"
#include "handles.h"
#include "lctx-sampling.h"

#include <cmath>
#include <memory>
#include <new>

struct lctx_grammar {
    std::unique_ptr<lctx_constraint> constraint;
    std::string error;
};

namespace {

// Return what f returns, or LCTX_INVALID when it throws.
template <typename F> int32_t ask(lctx_grammar * grammar, F && f) {
    int32_t answer = LCTX_INVALID;
    grammar->error.clear();
    lctx_guard(&grammar->error, [&] { answer = f(*grammar->constraint); });
    return answer;
}

}  // namespace

lctx_grammar * lctx_grammar_create(const lctx_model * model, const char * constraint) {
    auto * grammar = new (std::nothrow) lctx_grammar;
    if (grammar) {
        lctx_log_begin();
        lctx_guard(&grammar->error, [&] {
            grammar->constraint =
                std::make_unique<lctx_constraint>(model->vocab, lctx_parse_json("the constraint", constraint));
        });
    }
    return grammar;
}

void lctx_grammar_free(lctx_grammar * grammar) {
    delete grammar;
}

const char * lctx_grammar_error(const lctx_grammar * grammar) {
    return !grammar ? "out of memory" : grammar->error.empty() ? nullptr : grammar->error.c_str();
}

int32_t lctx_grammar_restrict(lctx_grammar * grammar, float * logits, int32_t n_vocab) {
    return ask(grammar, [&](const lctx_constraint & constraint) {
        std::vector<llama_token_data> candidates(n_vocab);
        for (int32_t i = 0; i < n_vocab; i++) {
            candidates[i] = {i, logits[i], 0.0f};
        }
        llama_token_data_array array = {candidates.data(), candidates.size(), -1, false};
        constraint.restrict(&array);
        for (int32_t i = 0; i < n_vocab; i++) {
            logits[i] = candidates[i].logit;
        }
        return LCTX_OK;
    });
}

int32_t lctx_grammar_allows(lctx_grammar * grammar, int32_t token, const char * text, size_t size) {
    return ask(grammar, [&](const lctx_constraint & constraint) {
        return text ? constraint.allows(token, std::string(text, size)) : constraint.allows(token);
    });
}

int32_t lctx_grammar_accept(lctx_grammar * grammar, int32_t token, const char * text, size_t size) {
    return ask(grammar, [&](lctx_constraint & constraint) {
        if (text) {
            constraint.accept(token, std::string(text, size));
        } else if (constraint.allows(token)) {
            constraint.accept(token);
        } else {
            throw lctx_refusal("the grammar does not allow token " + std::to_string(token));
        }
        return LCTX_OK;
    });
}

int32_t lctx_grammar_schema_behind(lctx_grammar * grammar, const char * text, size_t size) {
    int32_t schema = -1;
    ask(grammar, [&](const lctx_constraint & constraint) {
        schema = constraint.schema_behind(std::string(text, size));
        return LCTX_OK;
    });
    return schema;
}

int32_t lctx_grammar_pass_schema(lctx_grammar * grammar, int32_t schema) {
    return ask(grammar, [&](lctx_constraint & constraint) {
        constraint.pass_schema(schema);
        return LCTX_OK;
    });
}
