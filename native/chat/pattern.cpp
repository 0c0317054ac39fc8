#include "pattern.h"

#include "../base/refusal.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace {

using op = lctx_pattern::op;
using instruction = lctx_pattern::instruction;
using code = std::vector<instruction>;
using set = std::bitset<256>;

constexpr size_t MAX_TEXT = 4096, MAX_CODE = 4096;  // both are read by recursion

code operator+(code a, const code & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

set chars(const char * text) {
    set found;
    for (; *text; text++) {
        found.set((unsigned char)*text);
    }
    return found;
}

set all_that(int (*is)(int)) {
    set found;
    for (int c = 0; c < 128; c++) {
        found.set(c, is(c) != 0);
    }
    return found;
}

// A split into the next part and what comes after it: the longer match is tried first unless it is lazy.
instruction split(int longer, int shorter, bool lazy) {
    return {op::split, lazy ? shorter : longer, lazy ? longer : shorter};
}

code many(const code & one, bool lazy) {
    const int n = (int)one.size();
    return code{split(1, n + 2, lazy)} + one + code{{op::jump, -n - 1}};
}

class parser {
  public:
    explicit parser(const std::string & text) : text_(text) {}

    code parse() {
        require(text_.size() <= MAX_TEXT);
        const code all = alternatives();
        require(at_ == text_.size());
        return all + code{{op::match}};
    }

  private:
    void require(bool known) const {
        if (!known) {
            throw lctx_refusal("the trigger of the grammar cannot be read at character " + std::to_string(at_) + ": " +
                               text_.substr(0, 100));
        }
    }

    bool takes(const char * what) {
        const size_t n = strlen(what);
        const bool is_next = text_.compare(at_, n, what) == 0;
        at_ += is_next ? n : 0;
        return is_next;
    }

    char next() {
        require(at_ < text_.size());
        return text_[at_++];
    }

    code alternatives() {
        const code first = sequence();
        if (!takes("|")) {
            return first;
        }
        const code others = alternatives();
        return code{split(1, (int)first.size() + 2, false)} + first + code{{op::jump, (int)others.size() + 1}} + others;
    }

    code sequence() {
        code all;
        while (at_ < text_.size() && !strchr("|)", text_[at_])) {
            all = std::move(all) + repeated(item());
            require(all.size() <= MAX_CODE);
        }
        return all;
    }

    code item() {
        if (takes("(?!")) {
            std::string text;
            while (!takes(")")) {
                text += one_char();
            }
            return {{op::unless, 0, 0, {}, text}};
        }
        if (takes("(")) {
            const bool captures = !takes("?:");
            require(!captures || !has_group_);
            has_group_ = has_group_ || captures;
            const code inner = alternatives();
            require(takes(")"));
            return captures ? code{{op::open}} + inner + code{{op::close}} : inner;
        }
        if (takes("^")) {
            return {{op::begin}};
        }
        if (takes("$")) {
            return {{op::end}};
        }
        return {{op::set, 0, 0, takes("[") ? bracket() : takes(".") ? ~chars("\n\r") : one()}};
    }

    // A character that stands for itself.
    char one_char() {
        const set found = one();
        require(found.count() == 1);
        return text_[at_ - 1];
    }

    // A character or an escape, which may stand for several.
    set one() {
        const char c = next();
        if (c != '\\') {
            require(!strchr("*+?{}()[]|^$", c));
            set found;
            return found.set((unsigned char)c);
        }
        return escaped(next());
    }

    set escaped(char c) const {
        const set word = all_that(isalnum) | chars("_");
        switch (c) {
            case 's': return all_that(isspace);
            case 'S': return ~all_that(isspace);
            case 'd': return all_that(isdigit);
            case 'D': return ~all_that(isdigit);
            case 'w': return word;
            case 'W': return ~word;
            case 'n': return chars("\n");
            case 'r': return chars("\r");
            case 't': return chars("\t");
            default:  break;
        }
        require(!isalnum((unsigned char)c));
        set found;
        return found.set((unsigned char)c);
    }

    set bracket() {
        const bool inverted = takes("^");
        set found;
        do {
            const set first = bracket_item();
            const bool is_range = at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']';
            at_ += is_range ? 1 : 0;
            found |= is_range ? range(first, bracket_item()) : first;
        } while (!takes("]"));
        return inverted ? ~found : found;
    }

    set bracket_item() {
        const char c = next();
        require(!strchr("[]", c));
        set found;
        return c == '\\' ? escaped(next()) : found.set((unsigned char)c);
    }

    set range(const set & first, const set & last) const {
        require(first.count() == 1 && last.count() == 1);
        set found;
        size_t c = 0;
        while (!first[c]) {
            c++;
        }
        for (; c < found.size() && !(found & last).any(); c++) {
            found.set(c);
        }
        require((found & last).any());
        return found;
    }

    code repeated(const code & one) {
        size_t least = 1, most = 1;
        if (takes("*")) {
            least = 0, most = lctx_pattern::NONE;
        } else if (takes("+")) {
            most = lctx_pattern::NONE;
        } else if (takes("?")) {
            least = 0;
        } else if (takes("{")) {
            least = number();
            most = !takes(",")                                                ? least
                   : at_ < text_.size() && isdigit((unsigned char)text_[at_]) ? number()
                                                                              : lctx_pattern::NONE;
            require(takes("}") && least <= most);
        } else {
            return one;
        }
        const bool lazy = takes("?");
        require((least + (most == lctx_pattern::NONE ? 1 : most - least)) * (one.size() + 2) <= MAX_CODE);
        code all;
        for (size_t i = 0; i < least; i++) {
            all = std::move(all) + one;
        }
        if (most == lctx_pattern::NONE) {
            return std::move(all) + many(one, lazy);
        }
        for (size_t left = most - least; left > 0; left--) {  // each way out leads to the end
            all = std::move(all) + code{split(1, (int)(left * (one.size() + 1)), lazy)} + one;
        }
        return all;
    }

    size_t number() {
        size_t n = 0;
        require(at_ < text_.size() && isdigit((unsigned char)text_[at_]));
        while (at_ < text_.size() && isdigit((unsigned char)text_[at_])) {
            n = 10 * n + (size_t)(text_[at_++] - '0');
            require(n <= MAX_CODE);
        }
        return n;
    }

    const std::string & text_;
    size_t at_ = 0;
    bool has_group_ = false;
};

}  // namespace

lctx_pattern::lctx_pattern(const std::string & text) : code_(parser(text).parse()) {
    seen seen;
    add({0, 0}, false, threads_, seen);
}

void lctx_pattern::read(const std::string & more) {
    for (const char c : more) {
        step((unsigned char)c);
    }
}

// Read the next byte. A thread stays where its match ended until all is read: what must not follow may still come.
void lctx_pattern::step(unsigned char c) {
    threads next;
    seen seen;
    size_++;
    for (thread & t : threads_) {
        if (survives(t, c)) {
            const bool is_match = code_[t.at].what == op::match;
            t.at += is_match ? 0 : 1;
            add(std::move(t), false, next, seen);
        }
    }
    add({0, size_}, false, next, seen);
    threads_ = std::move(next);
}

// Return whether the thread continues with c.
bool lctx_pattern::survives(thread & t, unsigned char c) const {
    std::vector<std::pair<size_t, size_t>> ahead;
    for (const auto & [at, n] : t.ahead) {
        const std::string & text = code_[at].text;
        if ((unsigned char)text[n] == c) {
            ahead.emplace_back(at, n + 1);
            if (n + 1 == text.size()) {
                return false;
            }
        }
    }
    t.ahead = std::move(ahead);
    const instruction & i = code_[t.at];
    return i.what == op::match || (i.what == op::set && i.set[c]);
}

// Append the thread at every instruction that it can reach where it reads the next character or has matched. What comes
// after a match, or is where another thread was already, has lower priority and is dropped.
void lctx_pattern::add(thread t, bool at_end, threads & to, seen & seen) const {
    const bool is_matched = !to.empty() && code_[to.back().at].what == op::match && to.back().ahead.empty();
    const std::pair<size_t, decltype(t.ahead)> key(t.at, t.ahead);
    if (is_matched || std::find(seen.begin(), seen.end(), key) != seen.end()) {
        return;
    }
    seen.push_back(key);
    const instruction & i = code_[t.at];
    const size_t pos = size_;
    switch (i.what) {
        case op::split: {
            thread other = t;
            t.at += (size_t)i.first, other.at += (size_t)i.second;
            add(std::move(t), at_end, to, seen);
            add(std::move(other), at_end, to, seen);
            return;
        }
        case op::jump: t.at += (size_t)i.first; break;
        case op::begin:
            if (pos > 0) {
                return;
            }
            t.at++;
            break;
        case op::open:  t.opened = pos, t.at++; break;
        case op::close: t.group = pos > t.opened ? t.opened : NONE, t.at++; break;
        case op::unless:
            if (i.text.empty()) {
                return;
            }
            t.ahead.emplace_back(t.at, 0), t.at++;
            break;
        case op::end:
            if (!at_end) {
                to.push_back(std::move(t));
                return;
            }
            t.at++;
            break;
        default: to.push_back(std::move(t)); return;
    }
    add(std::move(t), at_end, to, seen);
}

size_t lctx_pattern::find() const {
    for (const thread & t : threads_) {
        threads ends;
        seen seen;
        add(t, true, ends, seen);
        for (const thread & end : ends) {
            if (code_[end.at].what == op::match) {
                return end.group != NONE ? end.group : end.begin;
            }
        }
    }
    return NONE;
}

size_t lctx_pattern::first_open() const {
    size_t first = size_;
    for (const thread & t : threads_) {
        first = std::min(first, t.begin);
    }
    return first;
}
