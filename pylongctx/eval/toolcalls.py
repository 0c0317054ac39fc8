"""Tool calls after a long text: which are valid, and which are the right ones.

The text stands before each of 100 requests, which need one call of one of ten tools. A call is valid when it names a
tool and its arguments hold the tool's schema, and right when tool and arguments are the expected ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pylongctx.eval.files import published
from pylongctx.eval.haystack import N_PER_TOKEN, SYNTHETIC, load_text
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record, Sample, SingleModel, Vocabulary, memory
from pylongctx.llama import Llama

SYSTEM = "Do what the user asks for at the end of the message: call one tool."
CHOICES = ("auto", "required")
RESERVED_TOKENS = 4096  # tokens of a context for tools, request and answer
TYPES = {"string": str, "integer": int}


@dataclass(frozen=True)
class ToolCalls(SingleModel):
    """Call the right tool after a text of ``length`` tokens.

    Attributes
    ----------
    tests : int
        Requests, of 100.
    choice : str
        "auto": the model calls a tool by itself; "required": a grammar lets it write nothing but a call.
    haystack : str
        The text: "synthetic", a text file or a folder of them.
    """

    reads_once: ClassVar[bool] = True
    caption: ClassVar[str] = "percent of the calls that are right"
    tests: int = 100
    choice: str = "auto"
    haystack: str = SYNTHETIC
    max_tokens: int = 96

    def __post_init__(self) -> None:
        if self.choice not in CHOICES:
            raise ValueError(f"choice must be one of {', '.join(CHOICES)}, not {self.choice!r}")
        n = len(published("toolcalls")["requests"])
        if not 1 <= self.tests <= n:
            raise ValueError(f"tests must be 1 to {n}, not {self.tests}")

    @property
    def name(self) -> str:
        """The task, and a choice other than auto."""
        return "toolcalls" + (f"-{self.choice}" if self.choice != "auto" else "")

    def n_ctx(self, vocabulary: Vocabulary, samples: Sequence[Sample], length: int) -> int:
        """Return the length and the room for tools, request and answer."""
        return length + RESERVED_TOKENS

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per request, all on one text."""
        tokens = vocabulary.tokenize(load_text(self.haystack, length * N_PER_TOKEN, seed))[:length]
        text = vocabulary.detokenize(tokens)
        return [self._sample(text, length, i) for i in range(self.tests)]

    def _sample(self, text: str, length: int, i: int) -> Sample:
        request = published("toolcalls")["requests"][i]
        expected = json.dumps({"name": request["name"], "arguments": request["arguments"]})
        prompt = f"{text}\n\n{request['text']}"
        facts, n = {"tool": request["name"]}, self.max_tokens
        return Sample(f"{length}-{i}", prompt, answers=(expected,), max_tokens=n, facts=facts, shared=len(text))

    def run(self, llm: Llama, vocabulary: Vocabulary, sample: Sample) -> Record:
        """Ask for one call; the cached prefix of the text stays."""
        start, before = time.perf_counter(), llm.session.n_evaluated
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": str(sample.prompt)}]
        tools = published("toolcalls")["tools"]
        given: dict[str, Any] = {"tools": tools, "tool_choice": self.choice, "parallel_tool_calls": False}
        found = llm.create_chat_completion(messages, temperature=0.0, max_tokens=sample.max_tokens, **given)
        seconds = time.perf_counter() - start
        message, usage = found["choices"][0]["message"], found["usage"]
        call = called(message)
        n_read = llm.session.n_evaluated - before - max(0, usage["completion_tokens"] - 1)
        facts = {"n_tokens": usage["total_tokens"], "answers": list(sample.answers), **sample.facts}
        facts |= {"answer": json.dumps(call) if call else message.get("content") or ""}
        scores = {"score": float(call == json.loads(sample.answers[0])), "valid": float(is_valid(call, tools))}
        return {**facts, **scores, "seconds": round(seconds, 4), "tokens_read": n_read, **memory(llm)}

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the share of right calls and of valid ones."""
        return {name: mean(record[name] for record in records) for name in ("score", "valid")}


def called(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return name and arguments of a message's only tool call; None for none, several, or arguments without JSON."""
    calls = message.get("tool_calls") or []
    if len(calls) != 1:
        return None
    function = calls[0]["function"]
    try:
        return {"name": function["name"], "arguments": json.loads(function["arguments"])}
    except ValueError:
        return None


def is_valid(call: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a call names a tool and its arguments hold the tool's schema."""
    known = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    if call is None or call["name"] not in known or not isinstance(call["arguments"], Mapping):
        return False
    fields, given = known[call["name"]], call["arguments"]
    return given.keys() == fields.keys() and all(_holds(given[name], fields[name]) for name in fields)


def _holds(value: Any, field: Mapping[str, Any]) -> bool:
    is_type = isinstance(value, TYPES[field["type"]]) and not isinstance(value, bool)
    return is_type and value in field.get("enum", [value])
