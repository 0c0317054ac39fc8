"""Work for strangers: templates and schemas that would recurse, run for ever or take all memory are exceptions."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import gguf
import pytest
import tiny_gguf
from chat_templates import TOOLS
from llamas import new
from needs import need

from pylongctx import LlamaGrammar
from pylongctx.chat.answer import AnswerParser
from pylongctx.chat.template import ChatTemplate
from pylongctx.completions.grammar import schema_to_gbnf
from pylongctx.errors import InvalidInput
from pylongctx.guarded import process

USER = [{"role": "user", "content": "Hello"}]
RECURSES = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
LOOPS = "".join("{% for i in range(30000) %}" for _ in range(3)) + "{% endfor %}" * 3
GROWS = (
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
NESTED = "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(process, "CPU_SECONDS", 1)


@pytest.mark.parametrize("template", [RECURSES, LOOPS, GROWS, NESTED], ids=["recurses", "loops", "grows", "nested"])
def test_a_hostile_template_is_refused(llm, template):
    start = time.monotonic()
    with pytest.raises(InvalidInput, match=r"the chat template|too much memory"):
        ChatTemplate(llm._model, template).render({"messages": USER})
    assert time.monotonic() - start < 60
    assert ChatTemplate(llm._model, "{{ messages[0].content }}").render({"messages": USER}).prompt == "Hello"


def test_the_template_of_a_file_is_refused_too(tmp_path):
    def add(writer):
        writer.add_chat_template(RECURSES)

    path = with_metadata(tmp_path / "recurses.gguf", add)
    with new(path, n_ctx=64) as llm:
        with pytest.raises(InvalidInput, match="recurses endlessly"):
            llm.create_chat_completion(USER, max_tokens=1)
        assert llm("ab", max_tokens=1)["usage"]["completion_tokens"] == 1


def with_metadata(path: Path, add) -> Path:
    source = tiny_gguf.make_model(path.with_suffix(".base"))
    reader, writer = gguf.GGUFReader(str(source)), gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    add(writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_models_own_template_for_tools(tmp_path, llm):
    def add(writer):
        writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with new(with_metadata(tmp_path / "two.gguf", add), n_ctx=64) as two:
        assert two.apply_template(USER) == "plain"
        with pytest.warns(RuntimeWarning, match="does not show tools"):
            assert two.apply_template(USER, tools=[tool]) == "tools"


def test_a_hostile_schema_is_refused():
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20000)}}
    with pytest.raises(InvalidInput, match=r"the grammar of the JSON schema takes too long|too much memory"):
        schema_to_gbnf(json.dumps(schema))
    assert schema_to_gbnf('{"type": "boolean"}').startswith("root")


DEEP = "[" * 29000 + "]" * 29000


def calls(arguments: str) -> list[dict]:
    function = {"name": "f", "arguments": arguments}
    return [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]},
    ]


@pytest.mark.parametrize("arguments", [DEEP, '{"a":' * 29000 + "1" + "}" * 29000, "[" * 29000])
def test_deep_arguments_are_shown_as_text(llm, arguments):
    shown = json.loads(re.search(r"<tool_call>(.*)</tool_call>", llm.apply_template(calls(arguments)), re.DOTALL)[1])
    assert shown["arguments"] == {"arguments": arguments}
    assert llm.apply_template(calls('{"a": "' + "[" * 300 + '"}'))  # in a string, brackets are characters


def test_deep_json_of_every_kind_is_refused(llm):
    deep: dict = {}
    for _ in range(400):
        deep = {"items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    refused = {"messages": USER, "max_tokens": 1}
    for asked in (
        {"tools": [tool]},
        {"response_format": {"type": "json_object", "schema": deep}},
        {"chat_template_kwargs": {"x": deep}},
        {"messages": [*calls("{}"), {"role": "tool", "tool_call_id": "x", "content": "[" * 300 + "]" * 300}]},
    ):
        with pytest.raises(ValueError, match=r"nests deeper|nested"):
            llm.create_chat_completion(**{**refused, **asked})
    with pytest.raises(ValueError, match="nests deeper"):
        LlamaGrammar.from_json_schema(json.dumps(deep))
    for _ in range(100000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="recursion"):
        llm.create_chat_completion(USER, response_format={"type": "json_object", "schema": deep}, max_tokens=1)


def test_a_server_answers_after_deep_arguments():
    need("server", "fastapi", "httpx")
    from serving import running

    with running() as server:
        asked = server.http.post("/v1/chat/completions", json={"messages": calls(DEEP), "max_tokens": 1})
        assert asked.status_code == 400 and asked.json()["error"]["code"] == "context_length_exceeded"
        assert DEEP in server.http.post("/apply-template", json={"messages": calls(DEEP)}).json()["prompt"]
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("n", [900, 1100, 200000])
def test_an_answer_that_nests_deeply_is_not_a_crash(llm, n):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    syntax = ChatTemplate(llm._model, TOOLS).render({"messages": USER, "tools": [tool]}).syntax
    parser = AnswerParser(syntax)
    pieces = ['<tool_call>\n{"name": "f", "arguments": {"a": ', "[" * n, "]" * n, "}}\n</tool_call>"]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.end(complete=True)
    arguments = "".join(delta["tool_call"]["arguments"] for delta in deltas)
    if n < 1000:
        assert arguments == '{"a": ' + "[" * n + "]" * n + "}"
    else:
        assert parser.failure == "the answer opens more than 1000 brackets in each other"
        assert arguments == '{"a":'


def test_calls_at_a_time_do_not_mix(llm):
    template = ChatTemplate(llm._model, "{{ messages[0].content }}")
    found: dict[int, str] = {}

    def render(i):
        for _ in range(5):
            found[i] = template.render({"messages": [{"role": "user", "content": f"number {i}"}]}).prompt
            assert found[i] == f"number {i}"

    threads = [threading.Thread(target=render, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"number {i}" for i in range(8)}


def test_a_worker_that_was_killed_is_replaced(llm):
    template = ChatTemplate(llm._model, "{{ messages[0].content }}")
    for worker in process._pool._idle:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert template.render({"messages": USER}).prompt == "Hello"


def test_a_warm_worker_costs_little(llm):
    template = ChatTemplate(llm._model, "{{ messages[0].content }}")
    start = time.process_time()
    for _ in range(50):
        template.render({"messages": USER})
    assert time.process_time() - start < 1.0
