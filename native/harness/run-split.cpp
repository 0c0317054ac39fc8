// lctx_split_run: words of a text by an expression, ours and std::regex's. For tests.
#include "../hooks.h"
#include "run.h"

#include <regex>

namespace {

// What llama.cpp did before its patch: matches, and what is between them.
template <typename CHAR>
std::vector<size_t> by_std_regex(const std::basic_string<CHAR> & text, const std::basic_string<CHAR> & expression) {
    const std::basic_regex<CHAR> wanted(expression, std::regex_constants::optimize | std::regex_constants::nosubs);
    std::vector<size_t> lengths;
    size_t done = 0;
    using iterator = std::regex_iterator<typename std::basic_string<CHAR>::const_iterator>;
    for (iterator found(text.begin(), text.end(), wanted); found != iterator(); ++found) {
        const size_t begin = (size_t)found->position();
        if (begin > done) {
            lengths.push_back(begin - done);
        }
        lengths.push_back((size_t)found->length());
        done = begin + (size_t)found->length();
    }
    if (done < text.size()) {
        lengths.push_back(text.size() - done);
    }
    return lengths;
}

template <typename CHAR> void run_as(lctx_split_args & a) {
    const std::basic_string<CHAR> text(a.text, a.text + a.n_text),
        expression(a.expression, a.expression + a.n_expression);
    const std::vector<size_t> found =
        a.by_std_regex ? by_std_regex(text, expression) : lctx_split(text, expression, {text.size()});
    lctx_require(found.size() <= 2 * text.size() + 2, "more words than characters");
    std::copy(found.begin(), found.end(), a.lengths);
    a.n_length = (int32_t)found.size();
}

void run(lctx_split_args & a) {
    lctx_require(a.expression && a.text && a.lengths && a.n_expression > 0 && a.n_text >= 0, "an array is missing");
    a.is_wide ? run_as<wchar_t>(a) : run_as<char>(a);
}

}  // namespace

int32_t lctx_split_run(lctx_split_args * args, char * err, size_t err_size) {
    return lctx_status_of([&] { run(*args); }, err, err_size);
}
