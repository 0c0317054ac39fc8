// Untrusted JSON: code that walks through it recursively needs it to be shallow.
#pragma once

#include "json.h"

#include <string>

// Limits how deep the JSON in a text may nest, and how much a model's answer may open without closing it.
constexpr size_t LCTX_MAX_NESTING = 200;
constexpr size_t LCTX_MAX_OPEN = 1000;

// The value of a JSON text. what: begins the message. Throws lctx_refusal when it nests deeper than LCTX_MAX_NESTING.
common_json lctx_parse_json(const std::string & what, const std::string & text);

// Throws lctx_refusal when text, as far as it is JSON, nests deeper than LCTX_MAX_NESTING.
void lctx_check_nesting(const std::string & what, const std::string & text);

// Brackets that a text opens and does not close; quotes are not read, so there may be more than JSON has.
struct lctx_open_brackets {
    size_t now = 0, most = 0;

    void read(const std::string & text);
};
