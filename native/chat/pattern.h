// Regular expressions that are searched for in a text while it grows. std::regex reads all of the text again for every
// token, and recurses once for every character of a match.
#pragma once

#include <bitset>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

class lctx_pattern {
  public:
    static constexpr size_t NONE = std::string::npos;

    // ECMAScript as std::regex reads it: characters, sets, groups of which one captures, alternatives, repetitions, ^
    // and $ for the ends of the text, (?!characters). Throws lctx_refusal for anything else.
    explicit lctx_pattern(const std::string & text);

    // The text continues with this.
    void read(const std::string & more);

    // Return where the first match in the text begins, or what its group captured unless that is empty. NONE: there is
    // no match.
    size_t find() const;

    // No match that is still to come begins before.
    size_t first_open() const;

    enum class op { set, split, jump, open, close, begin, end, unless, match };
    struct instruction {
        op what;
        int first = 0, second = 0;  // of split and jump: where it continues, relative to here; the first is preferred
        std::bitset<256> set = {};
        std::string text = {};  // of unless: what must not follow
    };

  private:
    // One way to match what was read (Thompson's simulation, with the priorities of backtracking).
    struct thread {
        size_t at, begin;
        size_t opened = NONE, group = NONE;
        std::vector<std::pair<size_t, size_t>> ahead = {};  // instructions "unless", and how much of each has followed
    };
    using threads = std::vector<thread>;
    using seen = std::vector<std::pair<size_t, std::vector<std::pair<size_t, size_t>>>>;

    void step(unsigned char c);
    bool survives(thread & t, unsigned char c) const;
    void add(thread t, bool at_end, threads & to, seen & seen) const;

    std::vector<instruction> code_;
    threads threads_;  // the preferred ones first
    size_t size_ = 0;  // of the text
};
