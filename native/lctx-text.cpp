// The C API: text made by the library, and grammars of JSON schemas.
#include "chat/nesting.h"
#include "json-schema-to-grammar.h"
#include "text.h"

const char * lctx_text_get(const lctx_text * text) {
    return text && text->made ? text->text.c_str() : nullptr;
}

const char * lctx_text_error(const lctx_text * text) {
    return !text ? "out of memory" : text->made ? nullptr : text->error.empty() ? "failed" : text->error.c_str();
}

void lctx_text_free(lctx_text * text) {
    delete text;
}

lctx_text * lctx_schema_to_grammar(const char * schema) {
    return lctx_make_text([&] { return json_schema_to_grammar(lctx_parse_json("the schema", schema), true); });
}
