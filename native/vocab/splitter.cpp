#include "splitter.h"

#include "../hooks.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <tuple>

namespace {

using op = lctx_splitter::op;
using instruction = lctx_splitter::instruction;
using code = std::vector<instruction>;

constexpr uint32_t ANY_NUMBER = UINT32_MAX;
constexpr size_t NONE = SIZE_MAX;
constexpr uint32_t MOST_COPIES = 1000;  // of a repeated group

const lctx_charset SPACES({{'\t', '\r'}, {' ', ' '}});
const lctx_charset DIGITS({{'0', '9'}});
const lctx_charset WORD({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}});
const lctx_charset LINE_ENDS({{'\n', '\n'}, {'\r', '\r'}});

// ---- expressions ----

// A part of an expression, and the least number of characters that it matches.
struct part {
    code instructions = {};
    size_t width = 0;
};

instruction one_of(const lctx_charset & set) {
    instruction made{op::run};
    made.set = set;
    return made;
}

bool is_one(const instruction & i) {
    return i.what == op::run && i.least == 1 && i.most == 1;
}

code operator+(code a, const code & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// One character of a set that is looked for is in both sets: (?=[ab])[bc] is [b].
code folded(const code & all) {
    if (all.size() == 4 && all[0].what == op::look && is_one(all[1]) && all[2].what == op::match && is_one(all[3])) {
        return {one_of(all[1].set & all[3].set)};
    }
    return all;
}

part either(const part & a, const part & b) {
    const int32_t n = (int32_t)a.instructions.size();
    return {code{{op::split, 1, n + 2}} + a.instructions + code{{op::jump, (int32_t)b.instructions.size() + 1}} +
                b.instructions,
            std::min(a.width, b.width)};
}

class parser {
  public:
    explicit parser(const std::u32string & text) : text_(text) {}

    code parse() {
        const code all = alternatives().instructions;
        require(at_ == text_.size());
        return all + code{{op::match}};
    }

  private:
    void require(bool holds) const {
        if (!holds) {
            throw std::runtime_error(
                "the vocabulary splits texts by an expression that is not known, at its character " +
                std::to_string(at_));
        }
    }

    bool takes(char32_t c) {
        const bool found = at_ < text_.size() && text_[at_] == c;
        at_ += found;
        return found;
    }

    bool takes(const char32_t * start) {
        const std::u32string wanted = start;
        const bool found = text_.compare(at_, wanted.size(), wanted) == 0;
        at_ += found ? wanted.size() : 0;
        return found;
    }

    char32_t next() {
        require(at_ < text_.size());
        return text_[at_++];
    }

    bool ends() const { return at_ == text_.size() || text_[at_] == '|' || text_[at_] == ')'; }

    part alternatives() {
        const part one = sequence();
        return takes('|') ? either(one, alternatives()) : one;
    }

    part sequence() {
        part all;
        while (!ends()) {
            const part one = repeated(term());
            all = {all.instructions + one.instructions, all.width + one.width};
        }
        return all;
    }

    part term() {
        if (takes(U"(?=")) {
            return looked_for(op::look);
        }
        if (takes(U"(?!")) {
            return looked_for(op::refuse);
        }
        if (takes(U"(?:") || takes('(')) {
            const part inside = alternatives();
            require(takes(')'));
            return {folded(inside.instructions), inside.width};
        }
        if (takes('$')) {
            return {{{op::end}}, 0};
        }
        if (takes(U"\\b")) {
            return {{{op::edge}}, 0};
        }
        return {{one_of(takes('[') ? bracket() : character())}, 1};
    }

    part looked_for(op what) {
        const code inside = alternatives().instructions;
        require(takes(')'));
        return {code{{what, (int32_t)inside.size() + 2}} + inside + code{{op::match}}, 0};
    }

    lctx_charset character() {
        const char32_t c = next();
        require(std::u32string(U"*+?{}]^").find(c) == std::u32string::npos);
        return c == '\\' ? escape() : c == '.' ? ~LINE_ENDS : lctx_charset({{c, c}});
    }

    lctx_charset escape() {
        const char32_t c = next();
        switch (c) {
            case 's': return SPACES;
            case 'S': return ~SPACES;
            case 'd': return DIGITS;
            case 'D': return ~DIGITS;
            case 'w': return WORD;
            case 'W': return ~WORD;
            case 'n': return lctx_charset({{'\n', '\n'}});
            case 'r': return lctx_charset({{'\r', '\r'}});
            case 't': return lctx_charset({{'\t', '\t'}});
            case 'v': return lctx_charset({{'\v', '\v'}});
            case 'f': return lctx_charset({{'\f', '\f'}});
            default:  require(!WORD.has(c)); return lctx_charset({{c, c}});
        }
    }

    // One character of a set, as the end of a range.
    char32_t end_of_range() {
        const char32_t c = next();
        if (c != '\\') {
            return c;
        }
        const char32_t escaped = next();
        require(!WORD.has(escaped));
        return escaped;
    }

    bool begins_range() const {
        const size_t n = text_[at_] == '\\' ? 2 : 1;
        return at_ + n + 1 < text_.size() && text_[at_ + n] == '-' && text_[at_ + n + 1] != ']';
    }

    lctx_charset bracket() {
        const bool negative = takes('^');
        lctx_charset set;
        while (!takes(']')) {
            require(at_ < text_.size());
            if (begins_range()) {
                const char32_t first = end_of_range();
                require(takes('-'));
                const char32_t last = end_of_range();
                require(first <= last);
                set = set | lctx_charset({{first, last}});
            } else {
                const char32_t c = next();
                set = set | (c == '\\' ? escape() : lctx_charset({{c, c}}));
            }
        }
        return negative ? ~set : set;
    }

    uint32_t number() {
        uint32_t n = 0;
        const size_t first = at_;
        while (at_ < text_.size() && DIGITS.has(text_[at_])) {
            n = 10 * n + (next() - '0');
            require(n <= MOST_COPIES);
        }
        require(at_ > first);
        return n;
    }

    part repeated(const part & one) {
        uint32_t least = 1, most = 1;
        if (takes('*')) {
            least = 0, most = ANY_NUMBER;
        } else if (takes('+')) {
            most = ANY_NUMBER;
        } else if (takes('?')) {
            least = 0;
        } else if (takes('{')) {
            least = most = number();
            if (takes(',')) {
                most = at_ < text_.size() && text_[at_] == '}' ? ANY_NUMBER : number();
            }
            require(takes('}') && least <= most);
        } else {
            return one;
        }
        require(at_ == text_.size() || (text_[at_] != '?' && text_[at_] != '+' && text_[at_] != '*'));
        return {times(one, least, most), least * one.width};
    }

    code times(const part & one, uint32_t least, uint32_t most) const {
        if (one.instructions.size() == 1 && is_one(one.instructions[0])) {
            instruction run = one.instructions[0];
            run.least = least, run.most = most;
            return {run};
        }
        code all;
        for (uint32_t i = 0; i < least; i++) {
            all = all + one.instructions;
        }
        const int32_t n = (int32_t)one.instructions.size();
        if (most == ANY_NUMBER) {
            require(one.width > 0);  // or it would match nothing for ever
            return all + code{{op::loop, 1, n + 2}} + one.instructions + code{{op::jump, -n - 1}};
        }
        for (uint32_t left = most - least; left > 0; left--) {
            all = all + code{{op::split, 1, (int32_t)left * (n + 1)}} + one.instructions;
        }
        return all;
    }

    const std::u32string & text_;
    size_t at_ = 0;
};

// ---- the search ----

// Looks for a match by trying what is preferred first. A choice stays on the stack until all of it has failed; then
// that is remembered, since whether the rest of an expression matches at a place does not depend on how it got there.
class search {
  public:
    search(const code & all, int32_t n_run, int32_t n_loop, const uint32_t * text, size_t n)
        : code_(all), text_(text), n_(n), runs_(n_run), loops_((size_t)n_loop * (n + 1)) {}

    // Return the end of the match that begins at a place; `longer`: a match of nothing does not count.
    size_t match_at(size_t begin, bool longer = false) {
        begin_ = begin, longer_ = longer;
        return run(0, begin);
    }

  private:
    enum outcome : uint8_t { unknown, failed, matched };  // of a loop at a place; matched: in what is looked for

    struct choice {
        int32_t at;                 // the instruction that made it
        size_t first, next, least;  // run: it has matched up to `first`, and can end at next - 1, ..., least
                                    // split, loop: it is at `first`, and next > least while the second is to be tried
    };

    struct run_memo {
        size_t begin = 1, end = 0;          // characters of its set
        size_t failed = 1, failed_end = 0;  // what follows the run does not match at these places
    };

    // Whether what happens at a place is remembered. At the beginning of what is looked for, another character may
    // stand before it the next time, and a match of nothing may count then.
    bool is_kept(size_t at) const { return depth_ > 0 ? at > origin_ && begin_ > 0 : !longer_; }

    uint8_t & of_loop(const instruction & i, size_t at) { return loops_[(size_t)i.memo * (n_ + 1) + at]; }

    // Return where a match of the code from an instruction on ends.
    size_t run(int32_t pc, size_t at) {
        const size_t base = stack_.size();
        for (;;) {
            const instruction & i = code_[pc];
            bool goes_on = true;
            switch (i.what) {
                case op::run: goes_on = take_run(i, pc, at); break;
                case op::loop:
                    if (is_kept(at) && of_loop(i, at) == matched) {
                        return note_matched(base, at);
                    }
                    goes_on = !(is_kept(at) && of_loop(i, at) == failed) && take_split(i, pc, at);
                    break;
                case op::split: goes_on = take_split(i, pc, at); break;
                case op::jump:  pc += i.first; break;
                case op::look:
                case op::refuse:
                    goes_on = follows(pc + 1, at) == (i.what == op::look);
                    pc += i.first;
                    break;
                case op::edge: goes_on = is_word(at) != is_word_before(at), pc++; break;
                case op::end:  goes_on = at == n_, pc++; break;
                case op::match:
                    if (depth_ > 0 || !longer_ || at > begin_) {
                        return note_matched(base, at);
                    }
                    goes_on = false;
            }
            if (!goes_on && !go_back(base, pc, at)) {
                return NONE;
            }
        }
    }

    // Whether what is looked for follows.
    bool follows(int32_t pc, size_t at) {
        const size_t origin = std::exchange(origin_, at);
        depth_++;
        const bool found = run(pc, at) != NONE;
        depth_--;
        origin_ = origin;
        return found;
    }

    // Loops whose choices are on the stack led to the match that ends at a place.
    size_t note_matched(size_t base, size_t at) {
        for (size_t n = base; depth_ > 0 && n < stack_.size(); n++) {
            const instruction & i = code_[stack_[n].at];
            if (i.what == op::loop && is_kept(stack_[n].first)) {
                of_loop(i, stack_[n].first) = matched;
            }
        }
        stack_.resize(base);
        return at;
    }

    bool is_word(size_t at) const { return at < n_ && WORD.has(text_[at]); }

    // In libstdc++, what is looked for knows no character before it where the match begins with the text.
    bool is_word_before(size_t at) const {
        const bool is_known = at > 0 && (depth_ == 0 || at > origin_ || begin_ > 0);
        return is_known && is_word(at - 1);
    }

    // The longest run comes first. False: it does not match, or what follows is known not to.
    bool take_run(const instruction & i, int32_t & pc, size_t & at) {
        size_t end = at;
        run_memo * memo = i.memo < 0 ? nullptr : &runs_[i.memo];
        if (memo && memo->begin <= at && at < memo->end) {
            end = memo->end;
        } else {
            for (const size_t most = i.most < n_ - at ? at + i.most : n_; end < most && i.set.has(text_[end]);) {
                end++;
            }
            if (memo) {
                memo->begin = at, memo->end = end;
            }
        }
        if (end - at < i.least) {
            return false;
        }
        const size_t least = at + i.least;
        if (memo && is_kept(least) && memo->failed <= least && end < memo->failed_end) {
            return false;
        }
        if (end > least) {
            stack_.push_back({pc, end, end, least});
        }
        at = end, pc++;
        return true;
    }

    bool take_split(const instruction & i, int32_t & pc, size_t at) {
        stack_.push_back({pc, at, 1, 0});
        pc += i.first;
        return true;
    }

    // Take the next way of the last choice that has one.
    bool go_back(size_t base, int32_t & pc, size_t & at) {
        while (stack_.size() > base) {
            choice & last = stack_.back();
            const instruction & i = code_[last.at];
            if (last.next > last.least) {
                last.next--;
                std::tie(pc, at) =
                    i.what == op::run ? std::pair(last.at + 1, last.next) : std::pair(last.at + i.second, last.first);
                return true;
            }
            if (i.what == op::loop && is_kept(last.first)) {
                of_loop(i, last.first) = failed;
            } else if (i.what == op::run && i.memo >= 0 && is_kept(last.least)) {
                runs_[i.memo].failed = last.least, runs_[i.memo].failed_end = last.first + 1;
            }
            stack_.pop_back();
        }
        return false;
    }

    const code & code_;
    const uint32_t * text_;
    size_t n_, begin_ = 0;
    size_t origin_ = 0;  // where what is looked for begins
    int depth_ = 0;      // of it
    bool longer_ = false;
    std::vector<choice> stack_;
    std::vector<run_memo> runs_;
    std::vector<uint8_t> loops_;
};

}  // namespace

lctx_charset::lctx_charset(std::vector<range> ranges) {
    std::sort(ranges.begin(), ranges.end());
    for (const range & one : ranges) {
        if (!ranges_.empty() && (uint64_t)one.first <= (uint64_t)ranges_.back().second + 1) {
            ranges_.back().second = std::max(ranges_.back().second, one.second);
        } else {
            ranges_.push_back(one);
        }
    }
    for (uint32_t c = 0; c < LOW; c++) {
        low_[c] = in_ranges(c);
    }
}

bool lctx_charset::in_ranges(uint32_t c) const {
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), range(c, UINT32_MAX));
    return after != ranges_.begin() && c <= std::prev(after)->second;
}

lctx_charset lctx_charset::operator|(const lctx_charset & other) const {
    std::vector<range> all = ranges_;
    all.insert(all.end(), other.ranges_.begin(), other.ranges_.end());
    return lctx_charset(all);
}

lctx_charset lctx_charset::operator~() const {
    std::vector<range> gaps;
    uint64_t next = 0;
    for (const range & one : ranges_) {
        if (next < one.first) {
            gaps.emplace_back((uint32_t)next, one.first - 1);
        }
        next = (uint64_t)one.second + 1;
    }
    if (next <= UINT32_MAX) {
        gaps.emplace_back((uint32_t)next, UINT32_MAX);
    }
    return lctx_charset(gaps);
}

lctx_splitter::lctx_splitter(const std::u32string & expression) : code_(parser(expression).parse()) {
    for (instruction & i : code_) {
        if (i.what == op::run && i.most == ANY_NUMBER) {
            i.memo = n_run_++;
        } else if (i.what == op::loop) {
            i.memo = n_loop_++;
        }
    }
}

void lctx_splitter::split(const uint32_t * text, size_t n, std::vector<size_t> & lengths) const {
    search found(code_, n_run_, n_loop_, text, n);
    size_t done = 0;
    const auto append = [&](size_t begin, size_t end) {
        if (begin > done) {
            lengths.push_back(begin - done);
        }
        lengths.push_back(end - begin);
        done = end;
    };
    for (size_t begin = 0; begin <= n;) {
        const size_t end = found.match_at(begin);
        if (end == NONE) {
            begin++;
            continue;
        }
        append(begin, end);
        if (end > begin) {
            begin = end;
            continue;
        }
        const size_t longer = found.match_at(begin, true);  // after a match of nothing, one of something may begin here
        if (longer != NONE) {
            append(begin, longer);
        }
        begin = longer == NONE ? begin + 1 : longer;
    }
    if (done < n) {
        lengths.push_back(n - done);
    }
}

namespace {

std::shared_ptr<const lctx_splitter> splitter_of(const std::u32string & expression) {
    static std::mutex mutex;
    static std::map<std::u32string, std::shared_ptr<const lctx_splitter>> known;
    const std::lock_guard<std::mutex> lock(mutex);
    auto & found = known[expression];
    if (!found) {
        found = std::make_shared<lctx_splitter>(expression);
    }
    return found;
}

template <typename CHAR> std::vector<size_t> split_pieces(const std::basic_string<CHAR> & text,
                                                          const std::basic_string<CHAR> & expression,
                                                          const std::vector<size_t> & lengths) {
    using unsigned_char = std::make_unsigned_t<CHAR>;
    const auto code_point = [](CHAR c) { return (uint32_t)(unsigned_char)c; };
    std::u32string wanted(expression.size(), 0);
    std::transform(expression.begin(), expression.end(), wanted.begin(), code_point);
    std::vector<uint32_t> points(text.size());
    std::transform(text.begin(), text.end(), points.begin(), code_point);
    const auto splitter = splitter_of(wanted);
    std::vector<size_t> found;
    found.reserve(lengths.size());
    size_t first = 0;
    for (const size_t length : lengths) {
        splitter->split(points.data() + first, length, found);
        first += length;
    }
    return found;
}

}  // namespace

std::vector<size_t> lctx_split(const std::string & text, const std::string & expression,
                               const std::vector<size_t> & lengths) {
    return split_pieces(text, expression, lengths);
}

std::vector<size_t> lctx_split(const std::wstring & text, const std::wstring & expression,
                               const std::vector<size_t> & lengths) {
    return split_pieces(text, expression, lengths);
}
