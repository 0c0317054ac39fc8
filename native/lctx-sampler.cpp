// The C API: llama.cpp's sampler chain on one row of logits, together with a grammar.
#include "base/firewall.h"
#include "base/log.h"
#include "chat/constraint.h"
#include "chat/grammar.h"
#include "chat/nesting.h"
#include "handles.h"
#include "lctx-sampling.h"

#include <algorithm>
#include <cmath>
#include <new>

struct lctx_sampler {
    const llama_vocab * vocab = nullptr;
    llama_sampler * chain = nullptr;
    bool remembers = false;  // the chain learns from what it is shown (mirostat): it may be run once per token only
    std::unique_ptr<lctx_constraint> constraint;
    bool greedy = false;  // the chain compares logits, and makes no probabilities
    std::vector<llama_token_data> candidates;
    llama_token_data_array left = {};  // those of them that the chain chose from
    std::string error;
};

namespace {

constexpr int32_t MAX_LAST_N = 1 << 22;      // tokens that penalties remember: llama.cpp takes the memory at once
constexpr int32_t MAX_DRY_LAST_N = 1 << 20;  // the same of DRY

constexpr const char * PENALTIES = "ed";
constexpr const char * EVERY_SAMPLER = "edskypmxta";  // by llama.cpp's letters, in its order

llama_sampler * make_bias(const llama_vocab * vocab, const lctx_sampler_params & p) {
    std::vector<llama_logit_bias> bias;
    for (int32_t i = 0; i < p.n_logit_bias; i++) {
        bias.push_back({p.logit_bias_tokens[i], p.logit_bias_values[i]});
    }
    return llama_sampler_init_logit_bias(llama_vocab_n_tokens(vocab), (int32_t)bias.size(), bias.data());
}

// Negative and NaN settings are off: they would make logits that cannot be sorted.
llama_sampler * make_dry(const llama_vocab * vocab, const lctx_sampler_params & p) {
    const float multiplier = p.dry_multiplier > 0.0f && p.dry_base >= 1.0f ? p.dry_multiplier : 0.0f;
    std::vector<const char *> breakers(p.dry_breakers, p.dry_breakers + std::max(0, p.n_dry_breakers));
    llama_sampler * dry =
        llama_sampler_init_dry(vocab, multiplier, p.dry_base, std::max(0, p.dry_allowed_length),
                               std::min(p.dry_penalty_last_n, MAX_DRY_LAST_N), breakers.data(), breakers.size());
    for (int32_t i = 0; i < p.n_before; i++) {
        llama_sampler_accept(dry, p.before[i]);
    }
    return dry;
}

llama_sampler * make_sampler(char letter, const llama_vocab * vocab, const lctx_sampler_params & p) {
    const size_t min_keep = std::max(1, p.min_keep);
    switch (letter) {
        case 'e':
            return llama_sampler_init_penalties(llama_vocab_n_tokens(vocab), std::min(p.penalty_last_n, MAX_LAST_N),
                                                p.repeat_penalty, p.frequency_penalty, p.presence_penalty);
        case 'd': return make_dry(vocab, p);
        case 's': return llama_sampler_init_top_n_sigma(p.top_n_sigma);
        case 'k': return llama_sampler_init_top_k(p.top_k);
        case 'y': return llama_sampler_init_typical(p.typical_p, min_keep);
        case 'p': return llama_sampler_init_top_p(p.top_p, min_keep);
        case 'm': return llama_sampler_init_min_p(p.min_p, min_keep);
        case 'x': return llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, min_keep, p.seed);
        case 't': return llama_sampler_init_temp_ext(p.temp, p.dynatemp_range, p.dynatemp_exponent);
        default:  throw lctx_refusal(std::string("there is no sampler '") + letter + "'");
    }
}

bool is_mirostat(const lctx_sampler_params & p) {
    return p.temp >= 0.0f && (p.mirostat_mode == 1 || p.mirostat_mode == 2);
}

bool is_greedy(const lctx_sampler_params & p) {
    return p.temp == 0.0f && (is_mirostat(p) || !(p.samplers || p.xtc_probability > 0.0f || p.dynatemp_range > 0.0f));
}

// The sampler that chooses the token.
llama_sampler * make_last(const llama_vocab * vocab, const lctx_sampler_params & p, bool adapts) {
    if (is_greedy(p)) {
        return llama_sampler_init_greedy();
    }
    if (is_mirostat(p)) {
        return p.mirostat_mode == 2 ? llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta)
                                    : llama_sampler_init_mirostat(llama_vocab_n_tokens(vocab), p.seed, p.mirostat_tau,
                                                                  p.mirostat_eta, 100);
    }
    return adapts ? llama_sampler_init_adaptive_p(p.adaptive_target, p.adaptive_decay, p.seed)
                  : llama_sampler_init_dist(p.seed);
}

void fill_chain(llama_sampler * chain, const llama_vocab * vocab, const lctx_sampler_params & p) {
    const bool alone = is_greedy(p) || is_mirostat(p) || p.temp < 0.0f;
    const std::string letters = alone ? PENALTIES : p.samplers ? p.samplers : EVERY_SAMPLER;
    if (p.n_logit_bias > 0) {
        llama_sampler_chain_add(chain, make_bias(vocab, p));
    }
    bool adapts = false;
    for (const char letter : letters) {
        if (letter == 'a') {
            adapts = p.adaptive_target >= 0.0f;  // it chooses, so it is last
        } else {
            llama_sampler_chain_add(chain, make_sampler(letter, vocab, p));
        }
    }
    llama_sampler_chain_add(chain, make_last(vocab, p, adapts));
}

bool any_left(const std::vector<llama_token_data> & candidates) {
    return std::any_of(candidates.begin(), candidates.end(),
                       [](const llama_token_data & c) { return c.logit > -INFINITY; });
}

// The token that the chain chooses, among those that the grammar allows when restricted.
llama_token choose(lctx_sampler * s, const float * logits, int32_t n_vocab, bool restricted) {
    s->left = {};
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
    s->left = array;
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
    params->top_n_sigma = -1.0f;
    params->xtc_threshold = 0.1f;
    params->temp = 0.8f;
    params->dynatemp_exponent = 1.0f;
    params->adaptive_target = -1.0f;
    params->adaptive_decay = 0.9f;
    params->penalty_last_n = 64;
    params->repeat_penalty = 1.0f;
    params->dry_base = 1.75f;
    params->dry_allowed_length = 2;
    params->dry_penalty_last_n = 64;
    params->mirostat_tau = 5.0f;
    params->mirostat_eta = 0.1f;
}

lctx_sampler * lctx_sampler_create(const lctx_model * model, const lctx_sampler_params * params) {
    lctx_sampler * s = new (std::nothrow) lctx_sampler;
    const bool done = s && lctx_guard(nullptr, [&] {
                          s->chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
                          fill_chain(s->chain, model->vocab, *params);
                      });
    if (!done) {
        lctx_sampler_free(s);
        return nullptr;
    }
    s->vocab = model->vocab;
    s->remembers = params->mirostat_mode != 0;
    s->greedy = is_greedy(*params);
    return s;
}

int32_t lctx_sampler_constrain(lctx_sampler * sampler, const char * constraint) {
    lctx_log_begin();
    sampler->error.clear();
    const bool done = lctx_guard(&sampler->error, [&] {
        sampler->constraint =
            std::make_unique<lctx_constraint>(sampler->vocab, lctx_parse_json("the constraint", constraint));
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

int32_t lctx_sampler_choose(lctx_sampler * sampler, const float * logits, int32_t n_vocab) {
    int32_t token = -1;
    sampler->error.clear();
    lctx_guard(&sampler->error, [&] { token = choose(sampler, logits, n_vocab, false); });
    return token;
}

void lctx_sampler_accept(lctx_sampler * sampler, int32_t token) {
    llama_sampler_accept(sampler->chain, token);
}

int32_t lctx_sampler_probs(const lctx_sampler * sampler, float * probs, int32_t n_vocab) {
    const llama_token_data_array & left = sampler->left;
    if (!left.data || n_vocab != (int32_t)sampler->candidates.size()) {
        return LCTX_INVALID;
    }
    std::fill(probs, probs + n_vocab, 0.0f);
    if (sampler->greedy) {
        probs[left.data[left.selected].id] = 1.0f;
        return LCTX_OK;
    }
    for (size_t i = 0; i < left.size; i++) {
        probs[left.data[i].id] = left.data[i].p;
    }
    return LCTX_OK;
}

void lctx_sampler_free(lctx_sampler * sampler) {
    if (sampler) {
        llama_sampler_free(sampler->chain);
        delete sampler;
    }
}
