// Splits a text into words for BPE by the regular expressions that come with a vocabulary. std::regex recurses once for
// every character of a match, so a run of 27,000 equal characters ends the process. Here what grows with the text is on
// the heap, and what has failed once is not tried again, so the time is linear for the expressions in use.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// A set of code points.
class lctx_charset {
  public:
    using range = std::pair<uint32_t, uint32_t>;  // first and last

    lctx_charset() = default;
    explicit lctx_charset(std::vector<range> ranges);

    bool has(uint32_t c) const { return c < LOW ? low_[c] : in_ranges(c); }
    lctx_charset operator|(const lctx_charset & other) const;
    lctx_charset operator&(const lctx_charset & other) const { return ~(~*this | ~other); }
    lctx_charset operator~() const;

  private:
    static constexpr uint32_t LOW = 256;

    bool in_ranges(uint32_t c) const;

    std::vector<range> ranges_;  // ascending, with gaps between them
    std::bitset<LOW> low_;       // the first of them, for speed
};

class lctx_splitter {
  public:
    // ECMAScript as std::regex reads it: characters, sets, \s \d \w and their opposites, groups, alternatives, greedy
    // repetitions, (?=...), (?!...), \b and $ for the end of the text. Throws std::runtime_error for anything else.
    explicit lctx_splitter(const std::u32string & expression);

    // Append the lengths of the matches in a text, and of what is between them, as std::regex_iterator finds them.
    void split(const uint32_t * text, size_t n, std::vector<size_t> & lengths) const;

    enum class op { run, split, loop, jump, look, refuse, edge, end, match };

    struct instruction {
        op what;
        int32_t first = 0, second = 0;  // split, loop: where it continues, relative to here, the first is preferred;
                                        // jump: the first; look, refuse: behind what is looked for
        int32_t memo = -1;              // run, loop: where the search remembers its failures
        uint32_t least = 1, most = 1;   // run: how many characters
        lctx_charset set = {};          // run
    };

  private:
    std::vector<instruction> code_;
    int32_t n_run_ = 0, n_loop_ = 0;  // that have a memo
};
