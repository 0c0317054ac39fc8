"""AsyncLlama: the answers of Llama, several at once, that end when no caller waits for them."""

import asyncio

import pytest
from llamas import TEXT, new

from pylongctx import AsyncLlama
from pylongctx.errors import PromptTooLong

SIZES = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPTS = [TEXT.decode()[5 * i :] for i in range(6)]
ASKED = {"max_tokens": 12, "temperature": 0.0}
CHAT = {"messages": [{"role": "user", "content": "Name a color."}], "max_tokens": 6, "temperature": 0.0}


@pytest.fixture(scope="module")
def alone(embedded_f32):
    with new(embedded_f32) as llm:
        return [llm(prompt, **ASKED)["choices"][0]["text"] for prompt in PROMPTS], llm.create_chat_completion(**CHAT)


def on(path, use, n_parallel=2, **given):
    """Run a coroutine function on an AsyncLlama."""

    async def run():
        async with AsyncLlama(str(path), n_parallel=n_parallel, **SIZES | given) as llm:
            return await use(llm)

    return asyncio.run(run())


async def joined(chunks, kind="text"):
    return "".join([chunk["choices"][0][kind] async for chunk in chunks])


def test_concurrent_answers(embedded_f32, alone):
    async def use(llm):
        whole = [llm.create_completion(prompt, **ASKED) for prompt in PROMPTS]
        streams = [await llm.create_completion(prompt, stream=True, **ASKED) for prompt in PROMPTS]
        found = await asyncio.gather(*whole, *map(joined, streams), llm.create_chat_completion(**CHAT))
        return [one["choices"][0]["text"] for one in found[:6]], found[6:12], found[12], llm._engine.counters.steps

    whole, streams, chat, steps = on(embedded_f32, use)
    assert whole == streams == alone[0]
    assert chat["choices"][0]["message"] == alone[1]["choices"][0]["message"]
    assert steps < 2 * len(PROMPTS) * ASKED["max_tokens"]  # they ran together


def test_a_list_of_prompts(embedded_f32, alone):
    answer = on(embedded_f32, lambda llm: llm.create_completion(PROMPTS, **ASKED))
    assert [choice["text"] for choice in answer["choices"]] == alone[0]


def test_streams_of_chats(embedded_f32, alone):
    async def use(llm):
        chunks = [chunk async for chunk in await llm.create_chat_completion(stream=True, **CHAT)]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    assert on(embedded_f32, use) == alone[1]["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cancelled_frees_its_sequence(embedded_f32, stream):
    async def use(llm):
        endless = {"max_tokens": 400, "temperature": 0.0, "logit_bias": {llm._host.model.info.token_eos: -1e4}}

        async def read():
            if stream:
                return await joined(await llm.create_completion(PROMPTS[0], stream=True, **endless))
            return await llm.create_completion(PROMPTS[0], **endless)

        task = asyncio.create_task(read())
        while not llm._engine.counters.generated_tokens:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.create_completion(PROMPTS[1], max_tokens=1)  # with one sequence it waits for the other's end
        return llm._engine.counters

    counters = on(embedded_f32, use, n_parallel=1)
    assert counters.generated_tokens < 400
    assert counters.cancelled + counters.completed == 2


def test_a_stream_that_is_closed_early(embedded_f32, alone):
    async def use(llm):
        chunks = await llm.create_completion(PROMPTS[0], stream=True, max_tokens=400)
        assert (await anext(chunks))["choices"]
        await chunks.aclose()
        return await llm.create_completion(PROMPTS[1], **ASKED)

    assert on(embedded_f32, use, n_parallel=1)["choices"][0]["text"] == alone[0][1]


def test_errors(embedded_f32):
    async def use(llm):
        with pytest.raises(PromptTooLong):
            await llm.create_completion([7] * 5000)
        with pytest.raises(ValueError, match="stream=True takes one prompt"):
            await joined(await llm.create_completion(PROMPTS, stream=True))
        await llm.close()
        await llm.close()
        with pytest.raises(RuntimeError, match="this AsyncLlama is closed"):
            await llm.create_completion("a")

    on(embedded_f32, use)
    with pytest.raises(TypeError, match="Llama has no argument n_contexts"):
        AsyncLlama(str(embedded_f32), n_contexts=5)
