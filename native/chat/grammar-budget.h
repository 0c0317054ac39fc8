// Limits how long a grammar may keep a sampler busy: upstream's search for what may come next has no bound of its own.
#pragma once

#include <cstddef>

// Time and memory that one grammar has. A token may take all that is left, and every token gives some back.
class lctx_grammar_budget {
  public:
    // While it lives, the calling thread's search spends from the budget; lctx_grammar_step throws lctx_grammar_slow
    // when nothing is left.
    class use {
      public:
        explicit use(lctx_grammar_budget & budget);
        ~use();
        use(const use &) = delete;

      private:
        lctx_grammar_budget * outer;
    };

    // Count a token that was chosen.
    void refill();

    // Count n elements of the search.
    void spend(size_t n);

  private:
    double left = 1.0;      // seconds of the processor
    double begun = 0.0;     // when the use began
    size_t n_elements = 0;  // since then
    size_t n_unseen = 0;    // of them since the last look at the clock
};
