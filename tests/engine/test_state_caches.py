"""Caches of states: what is found, what a failing disk costs, and what goes when they are full."""

import errno
import os
from itertools import islice

import numpy as np
import pytest
from test_state import METHODS, TEXT, new, used  # noqa: F401

from pylongctx import LlamaCache, LlamaDiskCache, LlamaRAMCache, LlamaState


@pytest.fixture(params=["ram", "disk"])
def make_cache(request, tmp_path):
    def make(**kwargs):
        return LlamaRAMCache(**kwargs) if request.param == "ram" else LlamaDiskCache(str(tmp_path / "cache"), **kwargs)

    return make


def test_llama_cache_is_the_cache_in_memory():
    assert LlamaCache is LlamaRAMCache


def evaluated(llm, prompt, **kwargs):
    """Return how many tokens of a prompt a completion evaluates."""
    steps = []
    llm.session.progress = lambda done, total: steps.append(done)
    before = steps.copy()
    decode, counted = llm.session.context.decode, []
    llm.session.context.decode = lambda part, *rest: (counted.append(len(part)), decode(part, *rest))
    try:
        text = llm(prompt, max_tokens=3, temperature=0.0, **kwargs)["choices"][0]["text"]
    finally:
        del llm.session.context.decode
        llm.session.progress = None
    assert before == []
    return text, sum(counted)


class BrokenCache(LlamaRAMCache):
    """A user's cache, whose ``ways`` (read, write) fail."""

    def __init__(self, *ways):
        super().__init__()
        self.ways = ways

    def __getitem__(self, key):
        if "read" in self.ways:
            raise TimeoutError("nobody answers")
        return super().__getitem__(key)

    def __setitem__(self, key, value):
        if "write" in self.ways:
            raise ConnectionError("nobody listens")
        super().__setitem__(key, value)


def full_disk(folder, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    return LlamaDiskCache(str(folder))


def vanished(folder, _):
    cache = LlamaDiskCache(str(folder))
    folder.rmdir()
    return cache


BROKEN = {
    "full disk": full_disk,
    "vanished": vanished,
    **{" ".join(ways): lambda *_, ways=ways: BrokenCache(*ways) for ways in (["read"], ["write"], ["read", "write"])},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_cache_that_fails_loses_no_answer(embedded_model, tmp_path, monkeypatch, broken, caplog):
    """Completions and chats, whole and streamed, are those without a cache; the log says it once."""
    messages = [{"role": "user", "content": "It was"}]

    def answers(llm):
        for call, asked in ((llm, "It was the best of"), (llm.create_chat_completion, messages)):
            for stream in (False, True):
                for limit in (0, 4) if call is llm else (1, 4):
                    done = call(asked, max_tokens=limit, temperature=0.0, stream=stream)
                    yield [chunk["choices"][0] for chunk in (done if stream else [done])]

    with new(embedded_model) as llm:
        want = list(answers(llm))
        llm.reset()
        llm.set_cache(BROKEN[broken](tmp_path / "cache", monkeypatch))
        caplog.clear()
        assert list(answers(llm)) == want
        assert {answer[-1]["finish_reason"] for answer in want} == {"length"}
        (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert warning.startswith(f"the cache {type(llm.cache).__name__} cannot be ")
        llm.set_cache(BrokenCache("write"))
        llm("Another one", max_tokens=1)
        assert len([one for one in caplog.records if "cannot be" in one.getMessage()]) == 2  # another cache
    assert not list((tmp_path / "cache").glob("*"))


def test_a_folder_that_can_only_be_read_is_a_cache(embedded_model, tmp_path, monkeypatch):
    with new(embedded_model) as llm:
        llm.set_cache(LlamaDiskCache(str(tmp_path)))
        want = llm("It was the best of", max_tokens=4, temperature=0.0)["choices"]
        llm.reset()
        monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
        before = llm.session.n_evaluated
        assert llm("It was the best of", max_tokens=4, temperature=0.0)["choices"] == want
        assert llm.session.n_evaluated - before < 5


def test_a_file_that_another_process_removes_is_not_a_state(embedded_model, tmp_path, monkeypatch):
    with new(embedded_model) as llm:
        cache = LlamaDiskCache(str(tmp_path))
        for n in (3, 5):
            llm.eval([7] * (n - llm.n_tokens))
            cache[[7] * n] = llm.save_state()
        load = LlamaState.load

        def removed(path):
            if load(path).n_tokens == 5:
                path.unlink()
            return load(path)

        monkeypatch.setattr(LlamaState, "load", removed)
        assert cache[[7] * 9].n_tokens == 3


@pytest.mark.parametrize("method", METHODS[:-1])
def test_a_cached_prompt_is_not_evaluated_again(embedded_model, make_cache, method):
    first, second = TEXT.decode() * 2 + "One", "Another story: " + TEXT.decode()
    with new(embedded_model, method=method) as llm:
        llm.set_cache(make_cache())
        expected, n_first = evaluated(llm, first)
        evaluated(llm, second)
        assert len(llm.tokenize(first.encode())) <= n_first
        longer = first + expected
        fresh = len(llm.tokenize(longer.encode())) - len(llm.tokenize(first.encode()))
        _, n = evaluated(llm, longer)
        assert n <= fresh + 3 + 1


def test_what_is_in_memory_is_used_when_longer(embedded_model, make_cache):
    prompt = TEXT.decode()
    with new(embedded_model) as llm:
        llm.set_cache(make_cache())
        llm(prompt[:20], max_tokens=1)
        evaluated(llm, prompt)
        llm.load_state = None  # calling it would raise
        assert evaluated(llm, prompt)[1] <= 3


def test_streams_fill_the_cache_too(embedded_model, make_cache):
    with new(embedded_model) as llm:
        cache = make_cache()
        llm.set_cache(cache)
        tokens = llm.tokenize(TEXT)
        assert tokens not in cache
        for _ in llm(TEXT.decode(), max_tokens=2, stream=True):
            pass
        assert tokens in cache
        assert cache[tokens].input_ids.tolist()[: len(tokens)] == tokens
        llm.set_cache(None)
        llm.reset()
        llm(TEXT.decode(), max_tokens=2)


def test_capacity_counts_real_bytes(used, make_cache):  # noqa: F811
    _, state = used
    cache = make_cache(capacity_bytes=int(2.5 * state.nbytes))
    for i in range(4):
        cache[[i, 1, 2]] = state
        assert state.nbytes * 0.9 < cache.cache_size <= cache.capacity_bytes
    assert cache.cache_size > 1.9 * state.nbytes
    cache.capacity_bytes = 0
    cache[[1]] = state
    assert cache.cache_size == 0


def test_the_least_recently_used_goes_first(used):  # noqa: F811
    _, state = used
    cache = LlamaRAMCache(capacity_bytes=int(2.5 * state.nbytes))
    cache[[1, 1]], cache[[2, 2]] = state, state
    assert cache[[1, 1, 9]] is state
    cache[[3, 3]] = state
    assert [1] in cache
    assert [2] not in cache
    with pytest.raises(KeyError):
        cache[[2]]


def test_the_disk_cache_outlives_the_process_and_drops_damaged_files(used, tmp_path):  # noqa: F811
    _, state = used
    ids = state.input_ids.tolist()
    LlamaDiskCache(str(tmp_path))[ids] = state
    again = LlamaDiskCache(str(tmp_path))
    np.testing.assert_array_equal(again[[*ids, 1]].llama_state, state.llama_state)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(KeyError):
        again[ids]
    assert not list(tmp_path.iterdir())
    (tmp_path / "short.lctxstate").write_bytes(b"LCTX")
    assert ids not in again


def test_a_state_of_another_method_is_a_miss(embedded_model):
    cache = LlamaRAMCache()
    for method in ("full", "window"):
        with new(embedded_model, method=method) as llm:
            llm.set_cache(cache)
            assert evaluated(llm, TEXT.decode())[1] >= len(llm.tokenize(TEXT))


@pytest.mark.parametrize("settings", [{"n_ctx": 64}, {"n_ctx": 512, "n_ubatch": 64}])
def test_a_state_that_does_not_fit_is_a_miss(embedded_model, make_cache, settings):
    cache, method = make_cache(), "selfextend,group_size=8,neighbor_window=64"
    with new(embedded_model, n_ctx=512, method=method) as llm:
        llm.set_cache(cache)
        llm(TEXT.decode() * 3, max_tokens=2)
    with new(embedded_model, method=method, **settings) as llm:
        llm.set_cache(cache)
        assert llm(TEXT.decode()[:100], max_tokens=2)["usage"]["completion_tokens"] == 2


def test_each_state_that_cannot_be_loaded_is_tried_once(embedded_model, make_cache, monkeypatch):
    prompt, tried = TEXT.decode(), []
    with new(embedded_model) as llm:
        expected, n = evaluated(llm, prompt)
        llm.set_cache(make_cache())
        llm.prefill(llm.tokenize(TEXT)[:-9])
        llm.states.remember()
        llm.prefill(llm.tokenize(TEXT)[:-5])
        llm.checkpoint()
        llm.reset()

        def refuse(tokens, *_):
            tried.append(len(tokens))
            raise MemoryError

        monkeypatch.setattr(llm.session, "load", refuse)
        assert evaluated(llm, prompt) == (expected, n)
        assert tried == [len(llm.tokenize(TEXT)) - 5, len(llm.tokenize(TEXT)) - 9]


def test_generation_continues_alike(embedded_model):
    with new(embedded_model, method="selfextend") as llm:
        prompt = llm.tokenize(TEXT)
        llm.eval(prompt)
        state = llm.save_state()
        expected = list(islice(llm.generate([], temp=0.0, reset=False), 8))
        llm.load_state(state)
        assert list(islice(llm.generate([], temp=0.0, reset=False), 8)) == expected


def test_generate_continues_from_what_is_evaluated_and_a_completion_from_the_checkpoint(embedded_model):
    with new(embedded_model) as llm:
        tokens = llm.tokenize(TEXT)
        llm.eval(tokens)
        llm.checkpoint()
        for run, n in (
            (lambda: next(llm.generate(tokens, temp=0.0)), len(tokens)),
            (lambda: llm(tokens, max_tokens=1), 0),
        ):
            llm.reset()
            before = llm.session.n_evaluated
            run()
            assert llm.session.n_evaluated - before == n
