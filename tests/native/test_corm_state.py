"""Saved states and checkpoints of heads that evict."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from test_corm import ALL, METHODS, open_llama, random_tokens
from thinning import thin

from pylongctx import Llama
from pylongctx.errors import InvalidInput

# ---- saved states ----


@thin
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kv_type", ["f32", "q4_0"])
@pytest.mark.parametrize("n", [1, 95, 96, 97, 144])  # 96 and 144: many evictions are due and not done
def test_a_restored_object_continues_with_the_same_logits(model_path, name, kv_type, n):
    tokens, settings = random_tokens(3), {"type_k": kv_type, "type_v": kv_type}
    path, spec = model_path("llama-wide"), ALL[name].text()
    with open_llama(path, spec, **settings) as one, open_llama(path, spec, **settings) as other:
        other.eval(tokens[50:100])  # is replaced
        one.eval(tokens[:n])
        other.load_state(one.save_state())
        for llm in (one, other):
            feed_rest(llm, tokens[n:])
        np.testing.assert_array_equal(other.scores[n:], one.scores[n:])
        np.testing.assert_array_equal(other.kv_usage().rows, one.kv_usage().rows)


def feed_rest(llm: Llama, tokens: list[int]) -> None:
    for token in tokens[:20]:
        llm.eval([token])
    llm.eval(tokens[20:])


@pytest.mark.parametrize("other", [
    "full",
    "corm,window=12,recent=16,evict_every=2",
    "corm,window=13,recent=16,evict_every=1",
    "selfextend,group_size=5,neighbor_window=21+corm,window=12,recent=16,evict_every=1",
])  # fmt: skip
def test_a_state_of_other_settings_is_refused(model_path, other):
    with open_llama(model_path("llama"), METHODS["corm"].text()) as one, open_llama(model_path("llama"), other) as two:
        one.eval(random_tokens(0, 50))
        with pytest.raises(ValueError, match="method"):
            two.load_state(one.save_state())
        two.eval(random_tokens(0, 50))


def test_a_damaged_state_is_refused_or_harmless(model_path):
    rng, tokens = np.random.default_rng(0), random_tokens(0)
    with open_llama(model_path("llama"), METHODS["corm-every16"].text()) as llm:
        llm.eval(tokens[:150])
        state = llm.save_state()
        for i in range(150):
            data = state.llama_state.copy()
            data[rng.integers(0, 400 if i % 2 else len(data), 4)] = rng.integers(0, 256, 4)
            try:
                llm.load_state(replace(state, llama_state=data[: rng.integers(1, len(data))] if i % 3 == 0 else data))
            except ValueError:
                assert llm.n_tokens == 0
            llm.eval(tokens[150:170])
            assert (llm.kv_usage().rows <= llm.n_tokens).all()
            llm.reset()


# ---- checkpoints ----

FIRST, SECOND = [66, 67, 68, 69, 70, 71, 72], [80, 81, 82, 83, 84]  # two last turns


@contextmanager
def counted(llm: Llama) -> Iterator[list[int]]:
    """Collect how many tokens every step evaluates."""
    decode, sizes = llm.session.context.decode, []
    llm.session.context.decode = lambda part, *rest: (sizes.append(len(part)), decode(part, *rest))
    try:
        yield sizes
    finally:
        del llm.session.context.decode


def complete(llm: Llama, prompt: list[int], n: int = 1, **settings) -> str:
    return llm(prompt, max_tokens=n, temperature=0.0, logit_bias={2: -1e9}, **settings)["choices"][0]["text"]


@thin
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [96, 101])
@pytest.mark.parametrize("looks", [False, True])
def test_a_checkpoint_continues_like_a_fresh_run(model_path, name, n, looks):
    """Bit for bit, also the second time, whether or not the eviction that is due was done before."""
    tokens, path, spec = random_tokens(4), model_path("llama"), ALL[name].text()
    with open_llama(path, spec) as llm, open_llama(path, spec) as fresh:
        llm.eval(tokens[:n])
        if looks:
            llm.kv_usage()
        llm.checkpoint()
        for last in (tokens[n:150], tokens[10:90]):
            complete(llm, tokens[:n] + FIRST, 40)
            assert llm.n_tokens > n + 40
            llm.restore()
            assert list(llm.eval_tokens) == tokens[:n]
            llm.eval(last)
            fresh.reset()
            for part in (tokens[:n], last):
                fresh.eval(part)
            np.testing.assert_array_equal(llm.scores[n:], fresh.scores[n:])
            np.testing.assert_array_equal(llm.kv_usage().rows, fresh.kv_usage().rows)


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_continues_from_the_checkpoint(model_path, name):
    prompt, path, spec = random_tokens(5, 100), model_path("llama"), ALL[name].text()
    with open_llama(path, spec) as llm, open_llama(path, spec) as fresh:
        llm.eval(prompt)
        llm.checkpoint()
        complete(llm, prompt + FIRST, 50)
        assert llm.kv_usage().rows.max() < llm.n_tokens  # something left that cannot come back
        with counted(llm) as sizes:
            text = complete(llm, prompt + SECOND)
        assert sum(sizes) == len(SECOND)
        fresh.eval(prompt)
        assert complete(fresh, prompt + SECOND) == text
        np.testing.assert_array_equal(llm.scores[len(prompt) :], fresh.scores[len(prompt) :])
        assert complete(llm, prompt + SECOND, 20) == complete(fresh, prompt + SECOND, 20)
        assert list(llm.eval_tokens) == list(fresh.eval_tokens)
        np.testing.assert_array_equal(llm.scores[len(prompt) :], fresh.scores[len(prompt) :])


def test_without_a_checkpoint_all_is_evaluated_again(model_path):
    prompt = random_tokens(5, 100)
    with open_llama(model_path("llama"), METHODS["corm"].text()) as llm:
        llm.eval(prompt)
        complete(llm, prompt + FIRST, 50)
        with counted(llm) as sizes:
            complete(llm, prompt + SECOND)
        assert sum(sizes) == len(prompt + SECOND)


def test_progress_begins_at_the_checkpoint(model_path):
    calls, prompt = [], random_tokens(5, 100)
    progress = {"progress_callback": lambda done, total: calls.append((done, total)), "n_ubatch": 2}
    with open_llama(model_path("llama"), METHODS["corm-every16"].text(), **progress) as llm:
        llm.eval(prompt)
        llm.checkpoint()
        complete(llm, prompt + FIRST, 50)
        calls.clear()
        complete(llm, prompt + SECOND)
    assert calls == [(done, 105) for done in (102, 104, 105)]


def test_the_prompt_of_the_checkpoint_is_not_evaluated_at_all(model_path):
    prompt = random_tokens(5, 100)
    with open_llama(model_path("llama"), METHODS["corm"].text()) as llm:
        want = complete(llm, prompt, 30)
        llm.reset()
        complete(llm, prompt)
        llm.checkpoint()
        complete(llm, prompt + FIRST, 50)
        with counted(llm) as sizes:
            assert complete(llm, prompt, 30) == want
        assert sum(sizes) == 29  # those of the answer, except the last


def test_a_stream_continues_from_the_checkpoint(model_path):
    prompt = random_tokens(5, 100)
    with open_llama(model_path("llama"), METHODS["corm"].text()) as llm:
        llm.eval(prompt)
        llm.checkpoint()
        want = complete(llm, prompt + SECOND, 10)
        complete(llm, prompt + FIRST, 50)
        with counted(llm) as sizes:
            chunks = llm(prompt + SECOND, max_tokens=10, temperature=0.0, logit_bias={2: -1e9}, stream=True)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want
        assert sum(sizes) == len(SECOND) + 9


def test_what_is_in_memory_is_used_when_longer(model_path):
    prompt = random_tokens(5, 100)
    with open_llama(model_path("llama"), METHODS["corm"].text()) as llm:
        llm.eval(prompt)
        llm.checkpoint()
        complete(llm, prompt + FIRST, 20)
        said = list(llm.eval_tokens)
        with counted(llm) as sizes:
            complete(llm, said + SECOND)
        assert sum(sizes) == len(SECOND)


def test_a_prompt_that_begins_otherwise_does_not_use_the_checkpoint(model_path):
    tokens, path, spec = random_tokens(5), model_path("llama"), METHODS["corm"].text()
    with open_llama(path, spec) as llm, open_llama(path, spec) as fresh:
        llm.eval(tokens[:100])
        llm.checkpoint()
        complete(llm, tokens[:100] + FIRST, 50)
        for other in (tokens[:99] + SECOND, tokens[50:150], tokens[:60]):
            fresh.reset()
            with counted(llm) as sizes:
                text = complete(llm, other)
            assert sum(sizes) == len(other)
            assert text == complete(fresh, other)
            np.testing.assert_array_equal(llm.scores, fresh.scores)


def test_the_last_checkpoint_counts(model_path):
    tokens = random_tokens(6)
    with open_llama(model_path("llama"), METHODS["h2o"].text()) as llm:
        llm.eval(tokens[:50])
        first = llm.checkpoint()
        llm.eval(tokens[50:120])
        second, row = llm.checkpoint(), llm.scores[-1].copy()
        for _ in range(2):
            llm.reset()
            llm.restore()
            assert list(llm.eval_tokens) == tokens[:120]
            np.testing.assert_array_equal(llm.scores[-1], row)
        llm.restore(first)
        assert list(llm.eval_tokens) == tokens[:50]
        llm.eval(tokens[50:120])
        np.testing.assert_array_equal(llm.scores[-1], row)
        llm.restore()
        assert llm.n_tokens == second.n_tokens == 120


def test_a_checkpoint_takes_what_is_held(model_path):
    """Not what the whole text would take."""
    tokens = random_tokens(6)
    with open_llama(model_path("llama"), METHODS["h2o"].text()) as llm:
        llm.eval(tokens)
        usage, state = llm.kv_usage(), llm.checkpoint()
        assert state.llama_state_size < usage.bytes + 1024
        assert state.llama_state_size < 0.6 * usage.full_bytes


def test_no_checkpoint_is_said(model_path):
    tokens = random_tokens(6, 60)
    with open_llama(model_path("llama"), METHODS["corm"].text()) as llm:
        llm.eval(tokens)
        with pytest.raises(RuntimeError, match=r"checkpoint\(\)") as reason:
            llm.restore()
        assert not isinstance(reason.value, ValueError)
        assert list(llm.eval_tokens) == tokens


@pytest.mark.parametrize(("model", "name", "settings", "named"), [
    ("llama-mha", "corm", {}, "another model: .* this model is"),
    ("llama", "corm-every16", {}, "method"),
    ("llama", "selfextend-corm", {}, "method"),
    ("llama", "corm", {"type_v": "f16"}, "type_v"),
])  # fmt: skip
def test_a_checkpoint_of_another_is_refused(model_path, model, name, settings, named):
    tokens = random_tokens(6)
    with (
        open_llama(model_path("llama"), METHODS["corm"].text()) as llm,
        open_llama(model_path(model), METHODS[name].text(), **settings) as other,
    ):
        for one in (llm, other):
            one.eval(tokens[:100])
            one.checkpoint()
        with pytest.raises(InvalidInput, match=named):
            llm.restore(other.checkpoint())
        assert llm.n_tokens == 0
        llm.restore()  # its own is still there
        assert list(llm.eval_tokens) == tokens[:100]
