// Finds where a text that is not complete stands in its grammar: the leaf of llama.cpp's PEG parser that waits for more
// of it.
#pragma once

#include "peg-parser.h"

#include <optional>

// A leaf that has met the end of the text and will take more.
struct lctx_leaf {
    common_peg_parser_id id = 0;
    std::vector<std::string> tags;  // around it, the outermost first
    size_t start = 0, end = 0;      // in the text; what follows it is an unfinished character or escape
    size_t n_tools = 0;             // tool calls that have begun
};

class lctx_leaf_finder {
    common_peg_arena arena;  // with a tag around every leaf that can wait
    std::vector<std::string> delimiters;

    bool cut_in_delimiter(const std::string & text) const;

  public:
    // grammar: of common_peg_arena::to_json.
    void load(common_json grammar);

    // The leaf at the end of text, unless what was read so far could be read otherwise with more text.
    std::optional<lctx_leaf> find(const std::string & text) const;

    // Return how many bytes of text, which comes next, the leaf takes for certain; nothing when the leaf ends in it.
    std::optional<size_t> take(const lctx_leaf & leaf, const std::string & text) const;

    // The leaf is a JSON string; else it is text up to a delimiter.
    bool is_json_string(const lctx_leaf & leaf) const;
};
