"""A model that is called from inside of its own callbacks says so at once, instead of waiting for itself."""

import asyncio
import threading

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx import AsyncLlama, LlamaRAMCache

pytestmark = pytest.mark.check

PATIENCE = 60.0
NESTED = "called the same model"
CHAT = [{"role": "user", "content": "a"}]
# what a callback may do to its model
CALLS = {
    "completion": lambda llm: llm("a", max_tokens=1),
    "stream": lambda llm: list(llm("a", max_tokens=1, stream=True)),
    "chat": lambda llm: llm.create_chat_completion(CHAT, max_tokens=1),
    "many": lambda llm: llm.complete_many(["a", "b"], max_tokens=1),
    "generate": lambda llm: next(llm.generate([1, 7])),
    "eval": lambda llm: llm.eval([1]),
    "rows": lambda llm: list(llm.eval_rows([1, 7])),
    "prefill": lambda llm: llm.prefill([1, 7]),
    "reset": lambda llm: llm.reset(),
    "sample": lambda llm: llm.sample(),
    "save": lambda llm: llm.save_state(),
    "shorten": lambda llm: setattr(llm, "n_tokens", 0),
}


def in_time(function):
    """Return the result of a function, or its exception; fails when it hangs."""
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as reason:
            found.append(reason)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it hangs"
    return found[0]


def callbacks(llm, call):
    """Yield how a call is made that runs another one inside of a callback."""

    def processor(tokens, row):
        call(llm)
        return row

    def criterion(tokens, row):
        call(llm)
        return False

    yield lambda: llm("It was", max_tokens=4, logits_processor=processor)
    yield lambda: llm("It was", max_tokens=4, stopping_criteria=criterion)
    yield lambda: llm.create_chat_completion(CHAT, max_tokens=4, logits_processor=processor)
    yield lambda: llm.complete_many(["It was", "It is"], max_tokens=4, logits_processor=processor)
    yield lambda: llm.complete_many(["It was", "It is"], max_tokens=4, progress=lambda i, n: call(llm))
    yield lambda: [llm.eval([1, 7]), llm.sample(logits_processor=processor)]


@pytest.fixture(scope="module", params=[1, 2])
def llm(request, embedded_model):
    with new(embedded_model, n_parallel=request.param) as llm:
        llm.set_cache(LlamaRAMCache(2**24))
        yield llm


@pytest.mark.parametrize("name", CALLS)
def test_a_nested_call_is_refused_at_once(llm, name):
    for outer in callbacks(llm, CALLS[name]):
        found = in_time(outer)
        assert isinstance(found, RuntimeError) and NESTED in str(found), found
        assert llm("It was", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", ["completion", "eval", "reset"])
def test_progress_is_a_callback(embedded_model, name):
    calls = []

    def progress(done, total):
        if calls:
            calls.pop()(llm)

    with new(embedded_model, progress_callback=progress) as llm:
        for outer in (lambda: llm(TEXT.decode(), max_tokens=2), lambda: llm.eval(llm.tokenize(TEXT))):
            llm.reset()
            calls.append(CALLS[name])
            found = in_time(outer)
            assert isinstance(found, RuntimeError) and NESTED in str(found), found


def test_a_draft_model_is_a_callback(embedded_model):
    refusals = []

    def draft(input_ids, **kwargs):
        try:
            llm("a", max_tokens=1)
        except RuntimeError as reason:
            refusals.append(str(reason))
        return np.empty(0, np.int32)

    with new(embedded_model) as llm:
        llm.draft_model = draft
        assert in_time(lambda: llm("It was", max_tokens=4))["usage"]["completion_tokens"] == 4
    assert refusals and all(NESTED in one for one in refusals)


def test_what_only_reads_may_be_called(llm):
    def processor(tokens, row):
        seen.append((llm.n_tokens, llm.tokenize(b"a"), llm.detokenize([300]), llm.token_eos()))
        return row

    seen = []
    assert in_time(lambda: llm("It was", max_tokens=3, logits_processor=processor))["choices"]
    assert len(seen) == 3


def test_another_object_may_be_called(llm, embedded_model):
    with new(embedded_model) as other:

        def processor(tokens, row):
            other("It was", max_tokens=1)
            return row

        found = in_time(lambda: llm("It was", max_tokens=2, logits_processor=processor))
    assert found["usage"]["completion_tokens"] == 2


def test_coroutines_too(embedded_model):
    async def main():
        async with AsyncLlama(str(embedded_model), n_parallel=2, n_ctx=512, verbose=False) as llm:

            def processor(tokens, row):
                asyncio.run(llm.create_completion("a", max_tokens=1))
                return row

            others = asyncio.create_task(llm.create_completion("It is", max_tokens=20))
            with pytest.raises(RuntimeError, match=NESTED):
                await llm.create_completion("It was", max_tokens=4, logits_processor=processor)
            return (await others)["usage"]["completion_tokens"]

    assert in_time(lambda: asyncio.run(asyncio.wait_for(main(), PATIENCE))) == 20
