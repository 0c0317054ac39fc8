"""Chat completions: messages in, OpenAI's dicts out. The model's words are nonsense; how they are handled is not."""

import json

import numpy as np
import pytest
from chat_templates import THINKING, TOOLS
from llamas import new, script
from needs import need

from pylongctx import Llama, LlamaGrammar, register_chat_completion_handler, unregister_chat_completion_handler
from pylongctx.errors import ContextFull, InvalidInput

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "It was the best of"}]


def chat(llm, messages=MESSAGES, **kwargs):
    return llm.create_chat_completion(messages, **{"max_tokens": 20, "temperature": 0.0} | kwargs)


def content(answer):
    return answer["choices"][0]["message"]["content"]


def joined(chunks, name="content"):
    return "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in chunks if chunk["choices"])


# ---- dicts ----


def test_an_answer(llm):
    done = chat(llm)
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIt was the best of<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    assert llm.apply_template(MESSAGES) == prompt
    n_prompt = 1 + len(llm.tokenize(prompt.encode(), add_bos=False, special=True))
    assert done["object"] == "chat.completion"
    assert done["usage"]["prompt_tokens"] == n_prompt
    assert done["usage"]["total_tokens"] == n_prompt + done["usage"]["completion_tokens"]
    choice = done["choices"][0]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert done["usage"]["completion_tokens"] == 20
    plain = llm(prompt, max_tokens=20, temperature=0.0)["choices"][0]["text"]
    assert choice["message"]["content"] == plain
    assert json.loads(json.dumps(done)) == done


@pytest.mark.parametrize("template", [None, TOOLS, THINKING])
@pytest.mark.parametrize("kwargs", [{}, {"stop": ["the"]}, {"seed": 3, "temperature": 1.5}, {"logprobs": True}])
def test_a_stream_joins_to_the_whole(embedded_model, template, kwargs):
    with new(embedded_model, chat_format=template) as llm:
        whole = chat(llm, **kwargs)
        chunks = list(chat(llm, stream=True, **kwargs))
    assert joined(chunks) == content(whole)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    if kwargs.get("logprobs"):
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        tokens = [token["token"] for part in parts for token in part["content"]]
        assert tokens == [token["token"] for token in whole["choices"][0]["logprobs"]["content"]]


def test_usage_in_a_chunk_of_its_own(llm):
    chunks = list(chat(llm, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_the_shapes_are_those_of_llama_cpp(llm):
    """A pydantic model of llama_cpp's TypedDicts would need its library: the keys are compared by name."""
    import ast

    from test_surface import source

    classes = {node.name: node for node in source("llama_types").body if isinstance(node, ast.ClassDef)}

    def keys(name: str) -> set[str]:
        bases = set().union(*(keys(base.id) for base in classes[name].bases if base.id in classes))
        return bases | {node.target.id for node in classes[name].body if isinstance(node, ast.AnnAssign)}

    done, chunks = chat(llm, logprobs=True, top_logprobs=2), list(chat(llm, stream=True))
    assert set(done) == keys("CreateChatCompletionResponse")
    assert set(done["choices"][0]) == keys("ChatCompletionResponseChoice")
    assert set(done["choices"][0]["message"]) <= keys("ChatCompletionResponseMessage")
    assert set(done["choices"][0]["logprobs"]) == keys("ChatCompletionLogprobs")
    assert set(done["choices"][0]["logprobs"]["content"][0]) == keys("ChatCompletionLogprobToken")
    assert set(done["usage"]) == keys("CompletionUsage")
    assert set(chunks[1]) == keys("CreateChatCompletionStreamResponse")
    assert set(chunks[1]["choices"][0]) == keys("ChatCompletionStreamResponseChoice")


# ---- sampling ----


def test_seed_and_stop(llm):
    assert content(chat(llm, seed=7, temperature=1.0)) == content(chat(llm, seed=7, temperature=1.0))
    whole = content(chat(llm))
    word = whole[5:8]
    done = chat(llm, stop=word)
    assert content(done) == whole[: whole.index(word)]
    assert done["choices"][0]["finish_reason"] == "stop"


def test_the_end_of_a_turn_stops(llm):
    done = chat(llm, max_tokens=90, logits_processor=script(llm, " fine.<|im_end|> and more"))
    assert content(done).strip() == "fine."
    assert done["choices"][0]["finish_reason"] == "stop"


def test_processors_criteria_and_bias(llm):
    def stop(ids, logits):
        return len(ids) >= seen[0] + 3

    def count(ids, logits):
        seen.append(len(ids))
        return logits

    seen = []
    done = chat(llm, stopping_criteria=stop, logits_processor=[count], logit_bias={300: 100.0})
    assert done["usage"]["completion_tokens"] == 3
    assert content(done) == (llm.detokenize([300]) * 3).decode()


def test_logprobs_equal_a_softmax_of_the_scores(embedded_model):
    with new(embedded_model, logits_all=True) as llm:
        done = chat(llm, logprobs=True, top_logprobs=4, max_tokens=6)
        tokens, n_prompt = llm.input_ids[: llm.n_tokens], done["usage"]["prompt_tokens"]
        rows = Llama.logits_to_logprobs(llm.scores)
        found = done["choices"][0]["logprobs"]["content"]
        assert len(found) == 6
        for i, entry in enumerate(found[:-1]):
            row, token = rows[n_prompt + i - 1], tokens[n_prompt + i]
            assert entry["logprob"] == pytest.approx(row[token], rel=1e-4)
            assert bytes(entry["bytes"]) == llm.session.model.piece(int(token))
            best = [top["logprob"] for top in entry["top_logprobs"]]
            np.testing.assert_allclose(best, np.sort(row)[::-1][:4], rtol=1e-4)
    assert "".join(entry["token"] for entry in found) == content(done)


# ---- JSON ----

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("template", [None, TOOLS, THINKING])
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        {"type": "json_object", "schema": PERSON},
    ],
)
def test_json_by_schema(embedded_model, template, response_format):
    with new(embedded_model, chat_format=template) as llm:
        for seed in range(3):
            kwargs = {"response_format": response_format, "seed": seed, "temperature": 1.0, "max_tokens": 400}
            done = chat(llm, **kwargs)
            if template is THINKING and done["choices"][0]["finish_reason"] == "length":
                continue  # it thinks about something else
            person = json.loads(content(done))
            assert person["name"] in ("Ann", "Bob")
            assert type(person["age"]) is int
            assert 1 <= person["age"] <= 99
            assert joined(chat(llm, stream=True, **kwargs)) == content(done)


def test_json_object_is_any_object(llm):
    text = content(chat(llm, response_format={"type": "json_object"}, max_tokens=60, temperature=1.0, seed=1))
    assert text.lstrip().startswith("{")


def test_text_is_not_a_constraint(llm):
    assert content(chat(llm, response_format={"type": "text"})) == content(chat(llm))


def test_a_grammar(llm):
    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"')
    assert content(chat(llm, grammar=grammar)) in ("yes", "no")


# ---- thoughts ----


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart(embedded_model, stream):
    said = " <think>\nHm, two.\n</think>\n\nIt is 2."
    with new(embedded_model, chat_format=THINKING) as llm:
        answer = chat(llm, stream=stream, max_tokens=99, logits_processor=script(llm, said))
        if stream:
            chunks = list(answer)
            assert joined(chunks, "reasoning_content").strip() == "Hm, two."
            assert joined(chunks).strip() == "It is 2."
        else:
            message = answer["choices"][0]["message"]
            assert message["reasoning_content"].strip() == "Hm, two."
            assert message["content"].strip() == "It is 2."


def test_thinking_can_be_turned_off(embedded_model):
    with new(embedded_model, chat_format=THINKING) as llm:
        assert "</think>" not in llm.apply_template(MESSAGES)
        assert llm.apply_template(MESSAGES, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


# ---- templates and handlers ----


def test_the_template_of_the_format(embedded_model):
    with new(embedded_model, chat_format="llama-3") as llm:
        assert llm.apply_template(MESSAGES[1:]).startswith("<|start_header_id|>user<|end_header_id|>\n\nIt was")
        assert llm.apply_template(MESSAGES[1:], add_generation_prompt=False).endswith("of<|eot_id|>")
    with new(embedded_model, chat_format="{{ messages[0].content }}{{ key }}") as llm:
        assert llm.apply_template(MESSAGES, chat_template_kwargs={"key": 7}) == "Be brief.7"


def test_a_handler_answers_instead(embedded_model):
    def handler(*, llama, messages, **kwargs):
        assert set(kwargs) >= {"tools", "tool_choice", "response_format", "grammar", "logprobs"}
        return llama, messages[-1]["content"], kwargs["temperature"]

    with new(embedded_model, chat_handler=handler) as llm:
        assert chat(llm) == (llm, "It was the best of", 0.0)
    register_chat_completion_handler("mine")(handler)
    try:
        with pytest.raises(ValueError, match="already registered"):
            register_chat_completion_handler("mine")(handler)
        with new(embedded_model, chat_format="mine") as llm:
            assert chat(llm, temperature=0.5)[2] == 0.5
    finally:
        unregister_chat_completion_handler("mine")


def test_objects_of_openai(llm):
    need("server", "openai")
    done = llm.create_chat_completion_openai_v1(MESSAGES, max_tokens=3, temperature=0.0)
    assert done.choices[0].message.content == content(chat(llm, max_tokens=3))
    chunks = list(llm.create_chat_completion_openai_v1(MESSAGES, max_tokens=3, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_without_openai(llm, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openai.types.chat", None)
    with pytest.raises(ImportError, match="pip install openai"):
        llm.create_chat_completion_openai_v1(MESSAGES)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "at least one message"),
        ({"messages": ["hello"]}, r"messages\[0\] must be a dict"),
        ({"messages": [{"role": "usr", "content": "x"}]}, r"messages\[0\]: unknown role 'usr'; roles are assistant"),
        ({"messages": [{"content": "x"}]}, "unknown role None"),
        ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]: content must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string, not None"),
        ({"response_format": {"type": "xml"}}, "must have type text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "json_schema needs"),
        ({"response_format": {"type": "json_object", "schema": {"type": "nonsense"}}}, "nonsense"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "must be an object, not 123"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, r"must be an object, not \[\]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": None}}}, "must be an object, not None"),
        ({"tools": [{"type": "other"}]}, r"tools\[0\] must be"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f', which is not one of the tools"),
        ({"tool_choice": "perhaps"}, "tool_choice must be"),
        ({"grammar": "root ::= x"}, "no rule named x"),
        ({"grammar": 'root ::= "x"', "response_format": {"type": "json_object"}}, "cannot be combined"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be"),
        ({"temperature": float("nan")}, "temp must be a finite number"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_is_lost(llm, kwargs, message):
    before = content(chat(llm))
    with pytest.raises(ValueError, match=message):
        chat(llm, **kwargs)
    assert content(chat(llm)) == before


def test_a_conversation_that_is_too_long(llm):
    with pytest.raises(ContextFull, match="exceed context window of 512"):
        chat(llm, [{"role": "user", "content": "word " * 600}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}", "cannot be read"),
        ("{{ messages[0].content | nonsense }}", "nonsense"),
        ("{{ raise_exception('never ' + messages[0].role) }}", "never"),
    ],
)
def test_a_broken_template(embedded_model, template, message):
    with new(embedded_model, chat_format=template) as llm:
        with pytest.raises(InvalidInput, match=message):
            chat(llm)
        assert llm("It was", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_unknown_format(embedded_model):
    with pytest.raises(ValueError, match=r"unknown chat_format.*chatml"):
        new(embedded_model, chat_format="nonsense")
    with pytest.raises(ValueError, match=r"no template"):
        new(embedded_model, chat_format="chat_template.rag")


def test_a_vocabulary_alone_renders(embedded_model):
    with Llama(str(embedded_model), vocab_only=True, verbose=False) as llm:
        assert "Be brief." in llm.apply_template(MESSAGES)
        with pytest.raises(RuntimeError, match="vocab_only"):
            chat(llm)
