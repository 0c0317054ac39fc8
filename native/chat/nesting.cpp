#include "nesting.h"

#include "../base/refusal.h"

#include <algorithm>

namespace {

// The position after the string that begins at pos.
size_t skip_string(const std::string & text, size_t pos) {
    for (pos++; pos < text.size() && text[pos] != '"'; pos++) {
        pos += text[pos] == '\\';
    }
    return pos + 1;
}

}  // namespace

void lctx_check_nesting(const std::string & what, const std::string & text) {
    size_t depth = 0;
    for (size_t pos = 0; pos < text.size();) {
        const char c = text[pos];
        if (c == '[' || c == '{') {
            depth++;
        } else if ((c == ']' || c == '}') && depth > 0) {
            depth--;
        }
        if (depth > LCTX_MAX_NESTING) {
            throw lctx_refusal(what + " nests deeper than " + std::to_string(LCTX_MAX_NESTING) + " lists and objects");
        }
        pos = c == '"' ? skip_string(text, pos) : pos + 1;
    }
}

common_json lctx_parse_json(const std::string & what, const std::string & text) {
    lctx_check_nesting(what, text);
    return common_json::parse(text);
}

void lctx_open_brackets::read(const std::string & text) {
    for (const char c : text) {
        if (c == '[' || c == '{') {
            most = std::max(most, ++now);
        } else if ((c == ']' || c == '}') && now > 0) {
            now--;
        }
    }
}
