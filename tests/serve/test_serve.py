"""OpenAI's own client against the server: chat, completions, errors."""

import json

import numpy as np
import pytest
from llamas import TEXT, new
from needs import need
from serving import ALIAS, events, running

openai = need("server", "fastapi", "openai")

MESSAGES = [{"role": "user", "content": "It was the best of times, it was the worst of times."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"chapter": {"type": "integer", "minimum": 1, "maximum": 40}},
            "required": ["chapter"],
        },
    },
}


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture
def client(server):
    server.erase()
    return server.client


@pytest.fixture(scope="module")
def llama(embedded_model):
    with new(embedded_model) as llm:
        yield llm


def chat(client, **more):
    return client.chat.completions.create(**{"model": ALIAS, "messages": MESSAGES, "max_tokens": 12} | more)


def calling(llama):
    """Return arguments that make the model begin a call, which it would not do by itself, and end after it."""
    begin = llama.tokenize(b"<tool_call>\n", add_bos=False)
    assert len(begin) == len(set(begin))
    bias = {token: 1000 - 10 * i for i, token in enumerate(begin)} | {llama.token_eos(): 2000}
    return {
        "logit_bias": bias,
        "extra_body": {"repeat_penalty": 1e6},
        "max_tokens": 100,
        "temperature": 0,
        "tools": [TOOL],
    }


def complete(client, prompt=None, **more):
    given = {"model": ALIAS, "prompt": prompt or TEXT.decode(), "max_tokens": 12, "temperature": 0} | more
    return client.completions.create(**given)


def test_an_answer_is_that_of_llama(client, llama):
    llama.reset()
    expected = llama.create_chat_completion(MESSAGES, max_tokens=12, temperature=0)
    answer = chat(client, temperature=0)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == expected["choices"][0]["finish_reason"] == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert answer.model == ALIAS


def test_a_stream_is_the_whole_in_parts(client):
    whole = chat(client, temperature=0)
    chunks = list(chat(client, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 12


def test_the_temperature_is_that_of_llama_server(server):
    from pylongctx.serve.bodies import ChatBody

    body, own = ChatBody(messages=MESSAGES), {"temperature": 0.1}
    assert body.arguments({}, {}, server.host)["temperature"] == 0.8
    assert body.arguments(own, {}, server.host)["temperature"] == 0.1  # the server's own default
    assert ChatBody(messages=MESSAGES, temperature=0).arguments(own, {}, server.host)["temperature"] == 0


def test_a_required_tool_is_called(client, llama):
    answer = chat(client, tool_choice="required", **calling(llama)).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert 1 <= json.loads(answer.message.tool_calls[0].function.arguments)["chapter"] <= 40


def test_a_tool_call_is_streamed(client, llama):
    chunks = list(chat(client, tool_choice="required", stream=True, **calling(llama)))
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].function.name == "look_up"
    assert set(json.loads("".join(part.function.arguments for part in parts))) == {"chapter"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_follows_a_schema(client):
    schema = {"type": "object", "properties": {"guilty": {"type": "boolean"}}, "required": ["guilty"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    answer = chat(client, response_format=wanted, max_tokens=200, temperature=1.0)
    assert isinstance(json.loads(answer.choices[0].message.content)["guilty"], bool)


def test_several_choices_come_together(client):
    answer = chat(client, n=3, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1
    assert answer.usage.completion_tokens == 36


def test_several_choices_are_streamed_together(client):
    chunks = list(chat(client, n=2, temperature=0, stream=True))
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i) for i in range(2)]
    assert texts[0] == texts[1] != ""


def test_max_completion_tokens_is_the_newer_name(client):
    assert chat(client, max_completion_tokens=5).usage.completion_tokens == 5


def test_log_probabilities_of_a_chat_are_those_of_llama(client, llama):
    llama.reset()
    expected = llama.create_chat_completion(MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
    answer = chat(client, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
    found, wanted = answer.choices[0].logprobs.content, expected["choices"][0]["logprobs"]["content"]
    assert [token.token for token in found] == [token["token"] for token in wanted]
    np.testing.assert_allclose([token.logprob for token in found], [t["logprob"] for t in wanted], atol=1e-3)
    assert [len(token.top_logprobs) for token in found] == [3] * 4


def test_echo_with_log_probabilities_is_that_of_llama(client, llama):
    prompt = TEXT.decode()
    expected = llama.create_completion(prompt, echo=True, logprobs=2, max_tokens=1, temperature=0)["choices"][0]
    found = complete(client, echo=True, logprobs=2, max_tokens=1).choices[0]
    assert found.text == expected["text"]
    assert found.logprobs.tokens == expected["logprobs"]["tokens"]
    assert found.logprobs.text_offset == expected["logprobs"]["text_offset"]
    values = (found.logprobs.token_logprobs, expected["logprobs"]["token_logprobs"])
    np.testing.assert_allclose(*np.array(values, float), atol=1e-3)  # None of the first token is NaN
    assert found.logprobs.top_logprobs[5] == pytest.approx(expected["logprobs"]["top_logprobs"][5], abs=1e-3)


def test_every_token_that_was_sent_has_its_log_probability(client, llama):
    tokens = llama.tokenize(TEXT)
    answer = complete(client, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    found = complete(client, tokens, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    assert tokens[0] == llama.token_bos()
    assert len(found.token_logprobs) == len(tokens) + 1
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    np.testing.assert_allclose(found.token_logprobs[1:], answer.token_logprobs, atol=1e-5)


def test_a_prompt_can_be_scored_alone(client):
    answer = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == TEXT.decode()
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens - 1  # all but the BOS token


def test_prompts_come_in_batches_of_texts_or_tokens(client, llama):
    texts = ["It was the age of wisdom", "A tale", "Chapter one. The"]
    alone = [complete(client, text).choices[0].text for text in texts]
    assert [choice.text for choice in complete(client, texts).choices] == alone
    tokens = [llama.tokenize(text.encode(), special=True) for text in texts]
    answer = complete(client, tokens, n=2)
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_a_stop_string_ends_a_completion(client, server):
    text = complete(client).choices[0].text
    answer = complete(client, stop=[text[5:9]])
    assert answer.choices[0].text == text[:5]
    assert answer.choices[0].finish_reason == "stop"


def test_a_turn_evaluates_its_new_tokens_only(client, server):
    first = chat(client, temperature=0)  # drawn tokens may be others than those of their text
    more = [first.choices[0].message.model_dump(include={"role", "content"}), {"role": "user", "content": "Why?"}]
    answer = chat(client, temperature=0, messages=[*MESSAGES, *more])
    known = first.usage.total_tokens - 1  # the last token of an answer is chosen, not evaluated
    assert answer.usage.prompt_tokens_details.cached_tokens == known


def test_a_prompt_that_is_too_long_is_refused_as_llama_server_does(client):
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as caught:
        chat(client, messages=[{"role": "user", "content": "word " * 600}])
    assert caught.value.status_code == 400
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.type == "exceed_context_size_error"
    assert caught.value.body["n_ctx"] == 512
    assert caught.value.body["n_prompt_tokens"] > 512


@pytest.mark.parametrize(
    ("more", "param", "reason"),
    [
        ({"temperature": "hot"}, "temperature", "number"),
        ({"n": 0}, "n", "greater"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs", "100"),
        ({"extra_body": {"top_k": 2**40}}, None, "1099511627776"),
        ({"messages": []}, None, "at least one message"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format"),
        ({"tools": [TOOL], "extra_body": {"grammar": 'root ::= "a"'}}, None, "grammar"),
        ({"extra_body": {"longctx": {"trace": True}}}, None, "does not read chunks"),
        ({"stream": True, "tool_choice": "required"}, None, "needs tools"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(client, more, param, reason):
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        chat(client, **more)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("more", [{"n_keep": 4}, {"post_sampling_probs": True}, {"lora": [0]}])
def test_a_field_that_would_change_the_answer_is_refused_by_its_name(client, more):
    (name,) = more
    with pytest.raises(openai.BadRequestError, match=name) as caught:
        chat(client, extra_body=more)
    assert caught.value.param == name


def test_fields_that_ask_for_what_is_done_anyway_are_read(client):
    asked = {"user": "me", "n_keep": 0, "speculative.p_min": 0.5, "store": False, "unknown": None, "other": 0}
    assert chat(client, extra_body=asked).usage.completion_tokens == 12


UNSERVED = {"top_a": 0.2, "store": True, "truncation": "auto", "a\nb: \u00e4": 1}


@pytest.mark.parametrize("policy", ["warn", "ignore", "refuse"])
def test_a_field_without_effect_is_named_or_refused(policy, caplog):
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}
    with running(1, settings={"unknown_fields": policy}) as server:
        plain, asked = (server.http.post("/v1/chat/completions", json=one) for one in (body, body | UNSERVED))
        again = server.http.post("/v1/chat/completions", json=body | UNSERVED)
    assert "x-unserved-fields" not in plain.headers
    if policy == "refuse":
        assert asked.status_code == 400 and asked.json()["error"]["param"] == "top_a"
        return
    assert asked.json()["choices"] == plain.json()["choices"]
    named = asked.headers.get("x-unserved-fields")
    assert named == again.headers.get("x-unserved-fields")
    assert named == ("top_a, store, truncation, a%0Ab%3A %C3%A4" if policy == "warn" else None)
    lines = [record.getMessage() for record in caplog.records if "fields without effect" in record.getMessage()]
    assert len(lines) == (policy == "warn") and all("'truncation' is not supported" in line for line in lines)


def test_several_choices_with_a_seed_differ_and_come_again(client):
    asked = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 24}
    first, again = ([choice.message.content for choice in chat(client, **asked).choices] for _ in range(2))
    assert len(set(first)) == 3
    assert first == again
    alone = chat(client, **asked | {"n": 1, "seed": 6}).choices[0].message.content
    assert alone == first[1]


def test_the_first_delta_has_content_and_all_a_fingerprint(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": None}
    assert {chunk.system_fingerprint for chunk in chunks} == {chat(client).system_fingerprint}
    assert chunks[0].system_fingerprint.startswith("b")


def test_the_prompt_is_logged_for_debugging(server, client):
    asked = {"messages": MESSAGES, "max_tokens": 2}
    found = server.http.post("/v1/chat/completions", json=asked | {"verbose": True}).json()
    assert MESSAGES[0]["content"] in found["__verbose"]["prompt"]
    assert found["__verbose"]["tokens_evaluated"] == found["usage"]["prompt_tokens"]
    assert "__verbose" not in server.http.post("/v1/chat/completions", json=asked | {"verbose": False}).json()
    assert "__verbose" not in server.http.post("/v1/chat/completions", json=asked).json()


def test_the_tokens_of_a_conversation_are_counted(server, client):
    n = chat(client, max_tokens=1).usage.prompt_tokens
    counted = server.http.post("/v1/chat/completions/input_tokens", json={"messages": MESSAGES}).json()
    assert counted == {"input_tokens": n}
    counted = server.http.post("/v1/responses/input_tokens", json={"input": MESSAGES[0]["content"]}).json()
    assert counted["input_tokens"] == n


def test_an_answer_continues_with_what_the_assistant_has_begun(server, client):
    begun = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "It was"}, {"type": "text", "text": " an"}]},
    ]
    prompt = server.http.post("/apply-template", json={"messages": begun}).json()["prompt"]
    start = server.http.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
    assert prompt == start + "It was\n\n an"
    body = {"messages": begun, "continue_final_message": False}
    ended = server.http.post("/apply-template", json=body).json()["prompt"]
    assert ended.startswith(prompt.partition("It was")[0])
    assert ended.endswith("<|im_end|>\n<|im_start|>assistant\n")
    for more, status in (({"add_generation_prompt": False}, 200), ({"add_generation_prompt": True}, 400)):
        body = {"messages": begun, "continue_final_message": True, "max_tokens": 1} | more
        assert server.http.post("/v1/chat/completions", json=body).status_code == status
    assert chat(client, messages=begun).usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError, match="the last two"):
        chat(client, messages=[*begun, begun[-1]])


def test_progress_of_a_prompt_comes_first(server):
    server.erase()
    body = {"prompt": TEXT.decode() * 6, "max_tokens": 2, "stream": True, "return_progress": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        chunks = list(events(response))
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert [one["processed"] for one in progress] == [*range(0, progress[0]["total"], 64), progress[0]["total"]]
    assert all(chunk["choices"][0]["text"] == "" for chunk in chunks[: len(progress)])
    timings = chunks[-1]["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, progress[0]["total"], 2)


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id == ALIAS
    assert model.meta["n_ctx_train"] == 512
    assert client.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError, match=ALIAS):
        client.models.retrieve("gpt")
