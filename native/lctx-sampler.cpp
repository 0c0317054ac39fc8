// The C API: llama.cpp's sampler chain on one row of logits, and a grammar beside it.
#include "constraint.h"
#include "firewall.h"
#include "grammar.h"
#include "handles.h"
#include "log.h"
#include "nesting.h"

#include <algorithm>
#include <cmath>
#include <new>

struct lctx_sampler {
    const llama_vocab * vocab = nullptr;
    llama_sampler * chain = nullptr;
    bool remembers = false;  // the chain learns from what it is shown (mirostat): it may be run once per token only
    std::unique_ptr<lctx_constraint> constraint;
    std::vector<llama_token_data> candidates;
    std::string error;
};

namespace {

constexpr int32_t MAX_LAST_N = 1 << 22;  // tokens that penalties remember: llama.cpp takes the memory at once

llama_sampler * make_chain(const llama_vocab * vocab, const lctx_sampler_params & p) {
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    llama_sampler * chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (p.n_logit_bias > 0) {
        std::vector<llama_logit_bias> bias;
        for (int32_t i = 0; i < p.n_logit_bias; i++) {
            bias.push_back({p.logit_bias_tokens[i], p.logit_bias_values[i]});
        }
        llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(n_vocab, p.n_logit_bias, bias.data()));
    }
    llama_sampler_chain_add(chain, llama_sampler_init_penalties(n_vocab, std::min(p.penalty_last_n, MAX_LAST_N), p.repeat_penalty,
                                                                p.frequency_penalty, p.presence_penalty));
    if (p.temp == 0.0f) {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    } else if (p.temp < 0.0f) {
        llama_sampler_chain_add(chain, llama_sampler_init_dist(p.seed));
    } else if (p.mirostat_mode == 1) {
        llama_sampler_chain_add(chain, llama_sampler_init_mirostat(n_vocab, p.seed, p.mirostat_tau, p.mirostat_eta, 100));
    } else if (p.mirostat_mode == 2) {
        llama_sampler_chain_add(chain, llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta));
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_top_k(p.top_k));
        llama_sampler_chain_add(chain, llama_sampler_init_typical(p.typical_p, 1));
        llama_sampler_chain_add(chain, llama_sampler_init_top_p(p.top_p, 1));
        llama_sampler_chain_add(chain, llama_sampler_init_min_p(p.min_p, 1));
        llama_sampler_chain_add(chain, llama_sampler_init_temp(p.temp));
        llama_sampler_chain_add(chain, llama_sampler_init_dist(p.seed));
    }
    return chain;
}

bool any_left(const std::vector<llama_token_data> & candidates) {
    return std::any_of(candidates.begin(), candidates.end(), [](const llama_token_data & c) { return c.logit > -INFINITY; });
}

// The token that the chain chooses, among those that the grammar allows when restricted.
llama_token choose(lctx_sampler * s, const float * logits, int32_t n_vocab, bool restricted) {
    s->candidates.resize(n_vocab);
    for (int32_t i = 0; i < n_vocab; i++) {
        if (!(logits[i] < INFINITY)) {
            throw lctx_refusal("no token can be sampled: the logit of token " + std::to_string(i) +
                               (std::isnan(logits[i]) ? " is NaN" : " is infinite"));
        }
        s->candidates[i] = {i, logits[i], 0.0f};
    }
    if (!any_left(s->candidates)) {
        throw lctx_refusal("no token can be sampled: every logit is -inf");
    }
    llama_token_data_array array = {s->candidates.data(), s->candidates.size(), -1, false};
    if (restricted) {
        s->constraint->restrict(&array);
        if (!any_left(s->candidates)) {
            throw lctx_refusal("no token can be sampled: the grammar allows none of those that are left");
        }
    }
    llama_sampler_apply(s->chain, &array);
    if (array.selected < 0 || array.selected >= (int64_t)array.size) {
        throw lctx_refusal("no token can be sampled");
    }
    return array.data[array.selected].id;
}

// Asking the grammar about one token is cheap, about all of them is not: the chain goes first.
int32_t sample(lctx_sampler * s, const float * logits, int32_t n_vocab) {
    const bool first = s->constraint && s->remembers;
    llama_token token = choose(s, logits, n_vocab, first);
    if (s->constraint && !first && !s->constraint->allows(token)) {
        token = choose(s, logits, n_vocab, true);
    }
    if (s->constraint) {
        if (!s->constraint->allows(token)) {
            throw lctx_refusal("no token can be sampled: logit_bias forbids all that the grammar allows");
        }
        s->constraint->accept(token);
    }
    llama_sampler_accept(s->chain, token);
    return token;
}

}  // namespace

void lctx_sampler_params_default(lctx_sampler_params * params) {
    *params = {};
    params->seed = LLAMA_DEFAULT_SEED;
    params->top_k = 40;
    params->top_p = 0.95f;
    params->min_p = 0.05f;
    params->typical_p = 1.0f;
    params->temp = 0.8f;
    params->penalty_last_n = 64;
    params->repeat_penalty = 1.0f;
    params->mirostat_tau = 5.0f;
    params->mirostat_eta = 0.1f;
}

lctx_sampler * lctx_sampler_create(const lctx_model * model, const lctx_sampler_params * params) {
    lctx_sampler * s = new (std::nothrow) lctx_sampler;
    if (s && !lctx_guard(nullptr, [&] { s->chain = make_chain(model->vocab, *params); })) {
        delete s;
        return nullptr;
    }
    if (s) {
        s->vocab = model->vocab;
        s->remembers = params->mirostat_mode != 0;
    }
    return s;
}

int32_t lctx_sampler_constrain(lctx_sampler * sampler, const char * constraint) {
    lctx_log_begin();
    sampler->error.clear();
    const bool done = lctx_guard(&sampler->error, [&] {
        sampler->constraint = std::make_unique<lctx_constraint>(sampler->vocab, lctx_parse_json("the constraint", constraint));
    });
    return done ? LCTX_OK : LCTX_INVALID;
}

const char * lctx_sampler_error(const lctx_sampler * sampler) {
    return sampler->error.empty() ? nullptr : sampler->error.c_str();
}

int32_t lctx_sampler_sample(lctx_sampler * sampler, const float * logits, int32_t n_vocab) {
    int32_t token = -1;
    sampler->error.clear();
    lctx_guard(&sampler->error, [&] {
        try {
            token = sample(sampler, logits, n_vocab);
        } catch (const lctx_grammar_slow &) {
            token = -2;
            throw;
        }
    });
    return token;
}

void lctx_sampler_free(lctx_sampler * sampler) {
    if (sampler) {
        llama_sampler_free(sampler->chain);
        delete sampler;
    }
}
