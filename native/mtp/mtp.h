// The block of a model that predicts the token after the next one (MTP, NextN): from a token and the hidden state
// before it. It has a context of its own, which follows what the context of the model evaluates, and drafts from there.
#pragma once

#include "llama.h"

#include <cstdint>
#include <vector>

// Throws lctx_refusal when the drafts of a model cannot be served.
void lctx_check_mtp(const llama_model & model);

class lctx_mtp {
  public:
    // ctx: of type MTP, with llama.cpp's own cache, which can be cut anywhere; it is freed with this.
    explicit lctx_mtp(llama_context * ctx);
    ~lctx_mtp();
    lctx_mtp(const lctx_mtp &) = delete;
    lctx_mtp & operator=(const lctx_mtp &) = delete;

    llama_context * context() const { return ctx; }

    // Take the tokens that the model has just evaluated, with their hidden states, float[n_tokens][n_embd]. The state
    // before the first token of a sequence is zero if it is not known: at the beginning, or after tokens that were
    // evaluated elsewhere or long ago. Throws lctx_refusal; the sequences of the batch then end before it.
    void follow(const llama_batch & batch, const float * hidden);

    // Return whether the hidden state of a position is known, so that a step can take the token after it.
    bool knows(int32_t seq, int32_t pos) const;

    // Evaluate one token of each sequence, each an output; logits are in the context then. Returns the status of
    // llama_decode.
    int32_t step(const llama_batch & batch);

    // Forget the positions of a sequence from n on, which may be more than there are.
    void cut(int32_t seq, int32_t n);

    // Make dst the first n positions of src, all with n < 0.
    void copy(int32_t src, int32_t dst, int32_t n);

    // Forget everything; has_nan: what was NaN as well.
    void clear(bool has_nan);

  private:
    // Hidden states of consecutive positions: those of the last batch and the one before it, then those of steps.
    struct states {
        int32_t first = 0;
        std::vector<float> rows;
    };

    int32_t end(int32_t seq) const;
    const float * row(int32_t seq, int32_t pos) const;
    const float * begin(int32_t seq, int32_t pos);
    void append(int32_t seq, const float * hidden);
    int32_t decode(const llama_batch & batch);

    llama_context * ctx;
    size_t n_embd;
    std::vector<states> seqs;
    std::vector<float> before;  // of each token of a batch, the state before it
};
