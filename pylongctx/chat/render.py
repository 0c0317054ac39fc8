"""Rendering a chat request to a prompt and to the form of its answer."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pylongctx.chat.request import (
    SYSTEM,
    check_messages,
    choose_tools,
    is_strict,
    text_of_content,
    texts_of,
    wanted_schema,
)
from pylongctx.chat.template import ChatTemplate, Rendered
from pylongctx.chat.types import Message
from pylongctx.errors import LctxError

# markers of reasoning, for templates that open it in a way that llama.cpp does not detect
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<thought>": "</thought>", "<seed:think>": "</seed:think>"}


def render(template: ChatTemplate, given: Mapping[str, Any], prefills: bool = False) -> Rendered:
    """Render a conversation; ``given``: the keywords of ``create_chat_completion``.

    With ``prefills``, a last message of the assistant stays open: its reasoning and its text begin the answer.

    Raises
    ------
    ValueError
        When a message, a tool or a schema is invalid, or the template does not support the request.
    """
    tools, choice = choose_tools(*(given[name] for name in ("functions", "function_call", "tools", "tool_choice")))
    messages = check_messages(given["messages"], template.info["source"])
    request = {
        "messages": messages,
        "enable_thinking": given["enable_thinking"],
        "kwargs": dict(given["chat_template_kwargs"] or {}),
        "parallel_tool_calls": given["parallel_tool_calls"],
        "add_generation_prompt": given.get("add_generation_prompt", True),
    }
    begun = _begun(messages) if prefills and request["add_generation_prompt"] else None
    if begun is not None:
        request |= {"add_generation_prompt": False, "continue_final_message": True}
    if tools:
        request |= {"tools": tools, "tool_choice": choice}
    schema = wanted_schema(given["response_format"])
    if schema is not None:
        request["json_schema"] = schema
    if given.get("grammar") is not None and (schema is not None or (tools and choice != "none")):
        raise ValueError("grammar cannot be combined with tools or a response_format, which create their own grammar")
    if tools and choice == "required" and schema is not None:
        raise ValueError("a required tool call cannot be combined with a response_format: an answer is one of them")
    rendered = _with_systems(template, request, is_strict(given["response_format"]))
    if begun is not None:
        rendered = _after_thoughts(rendered, begun)
    if tools and choice == "required" and rendered.constraint is None:
        raise ValueError(
            "the chat template does not support tool calls, so none can be required; try chat_format='chatml'"
        )
    if tools and not template.info["caps"]["supports_tools"]:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        warnings.warn(
            f"the chat template does not show tools to the model, which cannot call {names}; try chat_format='chatml'",
            RuntimeWarning,
            stacklevel=5,
        )
    return rendered


def _begun(messages: Sequence[Message]) -> Message | None:
    """Return the last message if the answer continues it."""
    last = messages[-1]
    has_text = text_of_content(last["content"]) or last.get("reasoning_content")
    if last["role"] != "assistant" or last.get("tool_calls") or not has_text:
        return None
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise ValueError("messages: the last two are from the assistant, so there is nothing to answer")
    return last


def _with_systems(template: ChatTemplate, request: dict[str, Any], strict: bool) -> Rendered:
    """Render a request; system messages are merged if the template drops or refuses additional ones."""
    messages: list[Message] = request["messages"]
    at = [i for i, message in enumerate(messages) if message["role"] in SYSTEM]
    if at in ([], [0]):
        return template.render(request, strict)
    try:
        rendered = template.render(request, strict)
        if all(text_of_content(messages[i]["content"]).strip() in rendered.prompt for i in at):
            return rendered
    except LctxError as reason:
        rendered, refusal = None, reason
    said = "\n\n".join(text for i in at if (text := text_of_content(messages[i]["content"])))
    others = [message for message in messages if message["role"] not in SYSTEM]
    try:
        return template.render({**request, "messages": [{"role": "system", "content": said}, *others]}, strict)
    except LctxError:
        if rendered is None:
            raise refusal from None
        return rendered


def _after_thoughts(rendered: Rendered, begun: Message) -> Rendered:
    """Return a rendering whose prompt ends with the open message, after reasoning opened by the template.

    To detect how a template writes reasoning, llama.cpp has closed it.
    """
    text = "\n\n".join(texts_of(begun))
    head = rendered.prompt.removesuffix(text)
    opened = next((mark for mark in THOUGHTS if head.rstrip().endswith(mark)), None)
    if opened is None or not text:
        return rendered
    own = begun.get("reasoning_content") or ""
    return _prefilled(rendered, f"{own}\n{THOUGHTS[opened]}\n\n{text}", len(text))


def _prefilled(rendered: Rendered, more: str, n: int) -> Rendered:
    """Return a rendering in which another text replaces the last ``n`` characters of the answer's beginning."""

    def longer(text: str) -> str:
        return text[: len(text) - n] + more

    syntax = json.loads(rendered.syntax)
    syntax["generation_prompt"] = longer(syntax["generation_prompt"])
    constraint = json.loads(rendered.constraint) if rendered.constraint else None
    if constraint is not None:
        constraint["prefill"] = longer(constraint["prefill"])
    return replace(
        rendered,
        prompt=longer(rendered.prompt),
        syntax=json.dumps(syntax),
        constraint=None if constraint is None else json.dumps(constraint),
    )
