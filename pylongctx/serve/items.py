"""Converting items and tools of OpenAI's Responses API to the messages and tools of a chat."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pylongctx.serve.blocks import text_of
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import MAX_ENTRIES, Unserved

Object = dict[str, Any]
TEXTS = ("input_text", "output_text", "text")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
STORED = ("item_reference",)  # references data stored on another server
# a custom tool becomes a function with one string argument
ONE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass
class RequestTools:
    """The tools of a request as functions, with their original kinds.

    Attributes
    ----------
    functions : list of dict
        RequestTools of a chat.
    custom : set of str
        Names of functions made from custom tools.
    namespaces : dict
        Namespaces of functions that have one.
    """

    functions: list[Object] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    namespaces: dict[str, str] = field(default_factory=dict)

    def add(self, where: str, tool: Any, unserved: Unserved) -> None:
        """Add a tool; tools that a server would run are not supported."""
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "function":
            self._add_function({name: value for name, value in tool.items() if name not in ("type", "strict")})
        elif kind == "custom":
            self._add_custom(where, tool, unserved)
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            for i, one in enumerate(tool["tools"]):
                n = len(self.functions)
                self.add(f"{where}.tools[{i}]", one, unserved)
                names = [function["function"].get("name") for function in self.functions[n:]]
                self.namespaces |= dict.fromkeys(names, str(tool.get("name")))
        else:
            unserved.note(where, f"{where}: type {kind!r} is not supported, only functions and custom tools are")

    def _add_function(self, function: Object) -> None:
        self.functions.append({"type": "function", "function": function})

    def _add_custom(self, where: str, tool: Mapping[str, Any], unserved: Unserved) -> None:
        wanted, description = tool.get("format") or {}, str(tool.get("description") or "")
        if wanted.get("type") == "grammar":
            unserved.note(f"{where}.format", f"{where}.format: the grammar is shown to the model, but not enforced")
            definition = f"The input follows this {wanted.get('syntax')} grammar:\n{wanted.get('definition')}"
            description = f"{description}\n{definition}".strip()
        self.custom.add(str(tool.get("name")))
        self._add_function({"name": tool.get("name"), "description": description, "parameters": ONE_TEXT})

    def choose(self, choice: Any) -> Any:
        """Return the tool choice of a chat, after removing tools that are not allowed."""
        if not isinstance(choice, Mapping):
            return choice
        if choice.get("type") != "allowed_tools":
            return {"type": "function", "function": {"name": choice.get("name")}}
        allowed = {one.get("name") for one in choice.get("tools") or ()}
        self.functions = [one for one in self.functions if one["function"].get("name") in allowed]
        return choice.get("mode") or "auto"


def chat_messages(instructions: str | None, items: Any, unserved: Unserved) -> Iterator[Object]:
    """Yield the messages of a chat; ApiError for unsupported items."""
    if instructions:
        yield {"role": "system", "content": instructions}
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    if not isinstance(items, list) or not items:
        raise invalid("input must be a text, or a list of at least one item", "input")
    if len(items) > MAX_ENTRIES["messages"]:
        raise invalid(f"input has {len(items)} items, more than {MAX_ENTRIES['messages']}", "input")
    said: list[Object] = []  # items of one message of the assistant
    for i, item in enumerate(items):
        message = _message(f"input[{i}]", item, unserved)
        if message is None:
            continue
        if message["role"] == "assistant":
            said.append(message)
            continue
        if said:
            yield _joined(said)
        said = []
        yield message
    if said:
        yield _joined(said)


def _message(where: str, item: Any, unserved: Unserved) -> Object | None:
    """Return the message of an input item, or the message that it is a part of; None if a chat has no equivalent."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), TEXTS, where)}
    if kind in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": [_call(kind, item)]}
    if kind is not None and kind.removesuffix("_output") in CALLS:
        output = text_of(item.get("output"), TEXTS, where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        return _thought(where, item, unserved)
    if not isinstance(kind, str) or kind in STORED:
        raise invalid(f"{where}: an item of type {kind!r} is not supported here", "input")
    unserved.note(where, f"{where}: an item of type {kind!r} is not supported here and is left out")
    return None


def _call(kind: str, item: Mapping[str, Any]) -> Object:
    name, arguments = item.get("name"), item.get("arguments") or "{}"
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""})
    elif kind == "local_shell_call":
        name, arguments = "local_shell", json.dumps(item.get("action") or {})
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _thought(where: str, item: Mapping[str, Any], unserved: Unserved) -> Object | None:
    thought = text_of(item.get("content"), ("reasoning_text",), where)
    thought = thought or text_of(item.get("summary"), ("summary_text",), where)
    if thought:
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    if item.get("encrypted_content"):
        reason = f"{where}: reasoning encrypted by another server is left out"
        unserved.note(f"{where}.encrypted_content", reason)
    return None


def _joined(parts: list[Object]) -> Object:
    """Return one message of the assistant from its reasoning, text and calls."""
    joined: Object = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
    if thoughts := [part["reasoning_content"] for part in parts if "reasoning_content" in part]:
        joined["reasoning_content"] = "".join(thoughts)
    if calls := [call for part in parts for call in part.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined
