"""llama.cpp's samplers: each against its formula, and how they are asked for."""

import numpy as np
import pytest

from pylongctx.completions.request import SamplerOptions
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.params import SAMPLERS, SamplingParams, sampler_names
from pylongctx.engine.sampling.sampler import Sampler

N_STEPS = 200


@pytest.fixture(scope="module")
def model(embedded_model):
    model = Model(str(embedded_model), {"vocab_only": True})
    yield model
    model.close()


@pytest.fixture
def logits(model):
    return np.random.default_rng(3).normal(size=model.info.n_vocab).astype(np.float32) * 3


def softmax(logits):
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    return shifted / shifted.sum()


def chosen(model, logits, before=(), **settings):
    """Return the probabilities by which a token was chosen, and the token."""
    sampler = Sampler(model, SamplingParams(seed=1, **settings), before=before)
    token = sampler.sample(logits)
    return np.exp(sampler.logprobs(len(logits)).astype(np.float64)), token


# ---- formulas ----


def test_temperature(model, logits):
    found, _ = chosen(model, logits, samplers=["temperature"], temp=0.6)
    np.testing.assert_allclose(found, softmax(logits / 0.6), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("n", [2.0, 3.1])
def test_top_n_sigma(model, logits, n):
    found, _ = chosen(model, logits, samplers="s", top_n_sigma=n)
    kept = logits >= logits.max() - n * logits.std()
    assert 1 < kept.sum() < len(logits)
    np.testing.assert_allclose(found, softmax(np.where(kept, logits, -np.inf)), rtol=1e-4, atol=1e-9)


def test_xtc_leaves_out_the_likeliest_but_one(model, logits):
    logits[[7, 8, 9]] = logits.max() + np.array([1.0, 2.0, 0.5], np.float32)
    above = np.flatnonzero(softmax(logits) >= 0.05)
    assert set(above) >= {7, 8, 9}
    found, _ = chosen(model, logits, samplers="x", xtc_probability=1.0, xtc_threshold=0.05)
    kept = np.ones(len(logits), bool)
    kept[above] = False
    kept[above[logits[above].argmin()]] = True
    np.testing.assert_allclose(found, softmax(np.where(kept, logits, -np.inf)), rtol=1e-4, atol=1e-9)


def test_xtc_comes_as_often_as_asked(model):
    logits = np.full(model.info.n_vocab, -20, np.float32)
    logits[[3, 4]] = 1, 0  # without XTC 3 has a probability of 0.73
    sampler = Sampler(model, SamplingParams(seed=5, temp=1.0, xtc_probability=0.3))
    n, left_out = 400, 0
    for _ in range(n):
        sampler.sample(logits)
        left_out += bool(np.isneginf(sampler.logprobs(len(logits))[3]))
    assert abs(left_out - 0.3 * n) < 4 * np.sqrt(n * 0.3 * 0.7)


@pytest.mark.parametrize(("range_", "exponent"), [(0.4, 1.0), (2.0, 0.5)])
def test_dynamic_temperature(model, logits, range_, exponent):
    found, _ = chosen(model, logits, samplers="t", temp=0.8, dynatemp_range=range_, dynatemp_exponent=exponent)
    p = softmax(logits)
    entropy = -(p * np.log(p)).sum() / np.log(len(p))
    low, high = max(0.0, 0.8 - range_), 0.8 + range_
    np.testing.assert_allclose(found, softmax(logits / (low + (high - low) * entropy**exponent)), rtol=1e-3, atol=1e-9)


def test_adaptive_p(model, logits):
    target, decay = 0.2, 0.5
    params = SamplingParams(seed=1, samplers=["adaptive_p"], adaptive_target=target, adaptive_decay=decay)
    sampler, p = Sampler(model, params), softmax(logits)
    weighted, total = target / (1 - decay), 1 / (1 - decay)
    for _ in range(5):
        distance = np.abs(p - np.clip(2 * target - weighted / total, 0, 1)) / 0.3
        wanted = softmax(5 - 10 * distance**2 / (1 + distance))
        token = sampler.sample(logits)
        np.testing.assert_allclose(np.exp(sampler.logprobs(len(logits))), wanted, rtol=1e-3, atol=1e-9)
        weighted, total = p[token] + decay * weighted, 1 + decay * total


def repeated(history, breakers):
    """Return how many tokens of the end of a history come before each token elsewhere in it."""
    reach = next((i for i, token in enumerate(reversed(history)) if token in breakers), len(history))
    found: dict[int, int] = {}
    for i in range(1, len(history)):
        n = 0
        while n < min(i, reach) and history[i - 1 - n] == history[-1 - n]:
            n += 1
        found[history[i]] = max(n, found.get(history[i], 0))
    return found


@pytest.mark.parametrize("with_breaker", [False, True])
@pytest.mark.parametrize("last_n", [9, 60])
def test_dry(model, logits, with_breaker, last_n):
    random = np.random.default_rng(last_n)
    newline = model.tokenize(b"\n", False)[-1]
    breaks = {token for token in range(model.info.n_vocab) if b"\n" in model.piece(token, True)}
    assert newline in breaks
    alphabet = [newline, *(token for token in range(20, 23) if token not in breaks)][not with_breaker :]
    settings = {"dry_multiplier": 0.7, "dry_base": 1.5, "dry_allowed_length": 2, "dry_penalty_last_n": last_n}
    penalized = 0
    for _ in range(60):
        history = random.choice(alphabet, size=random.integers(3, 80)).tolist()
        found, _ = chosen(model, logits, history, samplers="d", dry_sequence_breakers=["\n"], **settings)
        expected = logits.astype(np.float64)
        for token, n in repeated(history[-last_n:], breaks).items():
            if n >= 2 and token not in breaks:
                expected[token] -= 0.7 * 1.5 ** (n - 2)
                penalized += 1
        np.testing.assert_allclose(found, softmax(expected), rtol=1e-3, atol=1e-9)
    assert penalized > 5


@pytest.mark.parametrize("penalizes", [False, True])
def test_penalties_of_the_text_so_far(model, logits, penalizes):
    """The last three tokens count, each as often as it is there, as in llama-server."""
    before = [9, 5, 7, 5]
    settings = {"repeat_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "penalty_last_n": 3}
    params = SamplingParams(seed=1, samplers=["penalties"], dry_multiplier=0.0, **settings)
    sampler = Sampler(model, params, before=before, penalizes_before=penalizes)
    sampler.sample(logits)
    want = logits.astype(np.float64)
    for token, n in ((5, 2), (7, 1)) if penalizes else ():
        want[token] = want[token] * 1.3 if want[token] <= 0 else want[token] / 1.3
        want[token] -= n * 0.5 + 0.2
    found = np.exp(sampler.logprobs(len(logits)).astype(np.float64))
    np.testing.assert_allclose(found, softmax(want), rtol=1e-4, atol=1e-9)


def test_a_grammar_begins_after_the_text_that_is_penalized(model, logits):
    held = '{"grammar": "root ::= \\"a\\""}'
    sampler = Sampler(model, SamplingParams(seed=1), held, model.tokenize(b"It was", False, False), True)
    assert model.detokenize([sampler.sample(logits)]) == b"a"


def test_dry_sees_what_is_penalized_once(model, logits):
    """The history reaches DRY with the other penalties, and not a second time."""
    before, settings = [8, 9, 7, 8, 9], {"temp": 0.0, "dry_multiplier": 99.0}
    logits[[7, 8]] = logits.max() + np.array([2.0, 1.0], np.float32)
    sampler = Sampler(model, SamplingParams(seed=1, **settings), before=before, penalizes_before=True)
    assert sampler.sample(logits) == 8


def test_dry_counts_what_it_has_chosen(model, logits):
    logits[[30, 31]] = logits.max() + 50
    sampler = Sampler(model, SamplingParams(seed=1, samplers="d", dry_multiplier=1000.0, dry_sequence_breakers=[]))
    tokens = [sampler.sample(logits) for _ in range(9)]
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    assert len(set(trigrams)) == len(trigrams)
    assert set(tokens[:4]) == {30, 31}


def test_the_order_counts(model, logits):
    settings = {"temp": 0.5, "top_p": 0.6}
    first, second = (chosen(model, logits, samplers=names, **settings)[0] for names in ("tp", "pt"))
    order = np.argsort(-logits)

    def kept(p):
        return set(order[: np.searchsorted(np.cumsum(p[order]), 0.6) + 1].tolist())

    assert set(np.flatnonzero(first)) == kept(softmax(logits / 0.5))
    assert set(np.flatnonzero(second)) == kept(softmax(logits))
    assert len(kept(softmax(logits))) > len(kept(softmax(logits / 0.5)))


def test_the_given_number_of_tokens_is_kept(model, logits):
    for settings in ({"top_p": 0.01}, {"min_p": 0.99}, {"typical_p": 0.01}):
        assert (chosen(model, logits, temp=1.0, min_keep=5, **settings)[0] > 0).sum() == 5
        assert (chosen(model, logits, temp=1.0, **settings)[0] > 0).sum() < 5


@pytest.mark.parametrize("more", [{}, {"samplers": ["temperature"]}, {"xtc_probability": 1.0, "samplers": "t"}])
def test_temperature_0_is_greedy(model, logits, more):
    found, token = chosen(model, logits, temp=0.0, **more)
    assert token == logits.argmax()
    assert found[token] == 1.0
    assert (found > 0).sum() == 1


def test_samplers_that_were_asked_for_run_at_temperature_0_too(model, logits):
    logits[[7, 8]] = logits.max() + np.array([2.0, 1.0], np.float32)
    assert chosen(model, logits, temp=0.0, xtc_probability=1.0)[1] == 8
    assert chosen(model, logits, [8, 9, 7, 8, 9], temp=0.0, dry_multiplier=99.0)[1] == 8  # 7 would repeat 8 9 7


def test_nothing_runs_without_samplers(model, logits):
    np.testing.assert_allclose(chosen(model, logits, samplers=[])[0], softmax(logits), rtol=1e-4, atol=1e-9)


def test_before_the_first_token_there_are_no_probabilities(model, logits):
    sampler = Sampler(model, SamplingParams(seed=1))
    with pytest.raises(ValueError, match="no token was sampled yet"):
        sampler.logprobs(len(logits))


# ---- how they are asked for ----


@pytest.mark.parametrize("ask", ["completion", "generate", "further", "sample"])
def test_dry_sees_the_text_so_far(llm, ask):
    a, b, c, d = llm.tokenize(b"the thief of times", add_bos=False)[:4]
    text = [1, a, b, c, d, b, a, b]

    def likeliest(input_ids, logits):
        logits[:] = 0
        logits[[c, d]] = 10, 5
        return logits

    def answer(**more):
        more |= {"logits_processor": likeliest}
        llm.reset()
        if ask == "completion":
            generation = llm.generation(text, max_tokens=1, temperature=0, **more)
            list(generation.parts())
            return generation.tokens[0]
        if ask == "generate":
            return next(llm.generate(text, temp=0, **more))
        if ask == "further":
            llm.eval(text[:-1])
            return next(llm.generate(text[-1:], reset=False, temp=0, **more))
        llm.eval(text)
        return llm.sample(temp=0, **more)

    assert answer() == c
    assert answer(dry_multiplier=100.0, dry_sequence_breakers=[]) == d
    assert answer(dry_multiplier=100.0, dry_sequence_breakers=[], dry_penalty_last_n=3) == c


def test_dry_sees_the_conversation(llm):
    messages = [{"role": "user", "content": "assistant\nthe thief"}]
    text = llm.tokenize(llm.apply_template(messages).encode(), special=True)
    begins = next(i for i in range(len(text)) if text[i : i + 2] == text[-2:])
    known, other = text[begins + 2], llm.tokenize(b"times", add_bos=False)[0]

    def likeliest(input_ids, logits):
        logits[:] = 0
        logits[[known, other]] = 10, 5
        return logits

    def answer(**more):
        more |= {"logits_processor": likeliest, "max_tokens": 1, "temperature": 0}
        return llm.create_chat_completion(messages, **more)["choices"][0]["message"]["content"].strip()

    assert answer() == llm.detokenize([known]).decode().strip()
    assert answer(dry_multiplier=100.0, dry_sequence_breakers=[]) == llm.detokenize([other]).decode().strip()


def test_the_neutral_values_change_nothing(llm):
    neutral = {name: getattr(SamplingParams(seed=0), name) for name in SamplerOptions.__annotations__}
    every = neutral | {"samplers": list(SAMPLERS)}
    for settings in ({"seed": 4}, {"temperature": 0.0}, {"seed": 4, "mirostat_mode": 2}):
        found = [
            llm.create_completion("It was", max_tokens=24, **settings, **more)["choices"][0]["text"]
            for more in ({}, neutral, every)
        ]
        assert len(set(found)) == 1


def test_chats_and_single_steps_take_them(llm, prompt):
    asked = {"messages": [{"role": "user", "content": "It was the best of"}], "max_tokens": 8, "seed": 3}
    hot, held, cold = (
        llm.create_chat_completion(**asked, **more)["choices"][0]["message"]["content"]
        for more in ({"temperature": 2.0}, {"temperature": 2.0, "top_n_sigma": 1e-6}, {"temperature": 0})
    )
    assert hot != held == cold
    generated = llm.generate(prompt, temp=1.5, samplers=["top_k"], top_k=1)
    first = next(generated)
    llm.reset()
    llm.eval(prompt)
    assert first == int(llm.scores[-1].argmax()) == llm.sample(temp=1.5, top_n_sigma=1e-6)


def test_a_handler_gets_what_was_asked_for(llm, monkeypatch):
    seen = []
    monkeypatch.setattr(llm, "chat_handler", lambda **given: seen.append(given) or {})
    llm.create_chat_completion([], dry_multiplier=0.8)
    llm.create_chat_completion([])
    assert seen[0]["dry_multiplier"] == 0.8
    assert not seen[1].keys() & SamplerOptions.__annotations__.keys()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("edskypmxta", tuple(SAMPLERS)),
        (["top-k", "TOPP", "min_p", "typ", "temp", "nucleus"][:5], ("top_k", "top_p", "min_p", "typ_p", "temperature")),
        (["nucleus", "typical_p", "topnsigma", "adaptive-p"], ("top_p", "typ_p", "top_n_sigma", "adaptive_p")),
        ([], ()),
    ],
)
def test_names_of_samplers(given, names):
    assert sampler_names(given) == names


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"samplers": "kz"}, ValueError, "samplers: there is no 'z'; there are penalties .e., dry"),
        ({"samplers": ["top_k", "infill"]}, ValueError, "samplers: there is no 'infill'"),
        ({"samplers": ["top_k", "topk"]}, ValueError, "samplers: top_k is given twice"),
        ({"xtc_probability": 1.1}, ValueError, "xtc_probability must be from 0 to 1, not 1.1"),
        ({"xtc_threshold": -0.1}, ValueError, "xtc_threshold must be from 0 to 1"),
        ({"dynatemp_range": -1}, ValueError, "dynatemp_range must be from 0 to 1000"),
        ({"dynatemp_exponent": float("nan")}, ValueError, "dynatemp_exponent must be a finite number"),
        ({"top_n_sigma": float("inf")}, ValueError, "top_n_sigma must be a finite number"),
        ({"temperature": 1e39}, ValueError, "temp must be a finite number"),
        ({"adaptive_target": 2}, ValueError, "adaptive_target must be"),
        ({"adaptive_decay": 1}, ValueError, "adaptive_decay must be from 0 to 0.99"),
        ({"dry_multiplier": -1}, ValueError, "dry_multiplier must be at least 0"),
        ({"dry_base": 0.5}, ValueError, "dry_base must be at least 1"),
        ({"dry_allowed_length": -1}, ValueError, "dry_allowed_length must be at least 0"),
        ({"dry_allowed_length": 1.5}, TypeError, "dry_allowed_length: "),
        ({"dry_penalty_last_n": -1}, ValueError, "dry_penalty_last_n must be at least 0"),
        ({"dry_penalty_last_n": 2**40}, OverflowError, "dry_penalty_last_n: "),
        ({"top_k": 2**40}, OverflowError, "top_k: "),
        ({"top_k": 10**400}, ValueError, "top_k must be a finite number"),
        ({"top_k": "5"}, TypeError, "top_k must be a number, not '5'"),
        ({"min_keep": -1}, ValueError, "min_keep must be at least 0"),
        ({"dry_sequence_breakers": "abc"}, TypeError, "dry_sequence_breakers must be a list of strings"),
        ({"dry_sequence_breakers": [""]}, ValueError, "dry_sequence_breakers: '' must have 1 to 40 bytes"),
        ({"dry_sequence_breakers": ["x" * 41]}, ValueError, "dry_sequence_breakers: 'xxx"),
        ({"dry_sequence_breakers": ["a\0b"]}, ValueError, "dry_sequence_breakers: "),
        ({"dry_sequence_breakers": ["\ud800"]}, ValueError, "dry_sequence_breakers: "),
        (
            {"dry_sequence_breakers": ["a"] * 65},
            ValueError,
            "dry_sequence_breakers: 65 are more than the maximum of 64",
        ),
        ({"dry_multiplyer": 1}, TypeError, "there is no argument 'dry_multiplyer'"),
    ],
)
def test_what_makes_no_sense_is_named(llm, given, error, message):
    with pytest.raises(error, match=message):
        llm.create_completion("It was", max_tokens=1, **given)
    with pytest.raises(error, match=message):
        llm.create_chat_completion([{"role": "user", "content": "It was"}], max_tokens=1, **given)
