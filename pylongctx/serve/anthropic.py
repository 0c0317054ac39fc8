"""Converting messages of Anthropic's API to those of a chat."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pylongctx.serve.blocks import text_of
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import Unserved

Message = dict[str, Any]
TEXTS = ("text",)
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
DOCUMENT = {"type", "source", "title", "context", "citations", "cache_control"}


def chat_messages(system: Any, messages: list[Any], unserved: Unserved) -> Iterator[Message]:
    """Yield the messages of a chat; ApiError for unsupported content."""
    if system:
        yield {"role": "system", "content": text_of(system, TEXTS, "system")}
    for i, message in enumerate(messages):
        where, content, role = f"messages[{i}]", message.get("content"), message.get("role")
        if not isinstance(content, list):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield from _said(where, content, unserved)
        elif role == "user":
            yield from _asked(where, content)
        else:
            yield {"role": role, "content": text_of(content, TEXTS, where)}


def _asked(where: str, parts: list[Any]) -> Iterator[Message]:
    """Yield the messages of a user's parts: texts, and each tool result as a separate message."""
    texts: list[Any] = []
    for part in parts:
        if _kind(part) != "tool_result":
            texts.append(part)
            continue
        if texts:
            yield {"role": "user", "content": _read(texts, where)}
        texts = []
        result = _result(part.get("content"), where)
        yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result}
    if texts:
        yield {"role": "user", "content": _read(texts, where)}


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _read(parts: list[Any], where: str) -> str | list[Message]:
    """Return joined texts, or chat parts if there are documents."""
    if not any(_kind(part) == "document" for part in parts):
        return text_of(parts, TEXTS, where)
    found: list[Message] = []
    for part in parts:
        if _kind(part) == "document":
            found += _document(part, where)
        else:
            found.append({"type": "text", "text": text_of([part], TEXTS, where)})
    return found


def _document(part: Mapping[str, Any], where: str) -> list[Message]:
    source, title = part.get("source"), part.get("title")
    if _kind(source) != "text" or not isinstance(source, Mapping) or not isinstance(source.get("data"), str):
        raise invalid(f"{where}: only documents with a source of type text are supported", "messages")
    if unknown := part.keys() - DOCUMENT:
        raise invalid(f"{where}: {min(unknown)} of a document is not supported", "messages")
    document = {"type": "document", "text": source["data"]}
    return [{"type": "text", "text": f"{title}\n"}, document] if title else [document]


def _result(content: Any, where: str) -> str:
    """Return the text of a tool's result."""
    if not isinstance(content, list):
        return text_of(content, TEXTS, where)
    return "\n".join(_result_part(part, where) for part in content)


def _result_part(part: Any, where: str) -> str:
    kind = _kind(part)
    if kind == "tool_reference":
        return f"tool: {part.get('tool_name')}"
    if kind == "search_result":
        texts = text_of(part.get("content"), TEXTS, where)
        return "\n".join(str(one) for one in (part.get("title"), part.get("source"), texts) if one)
    if kind == "document":
        return "".join(str(one["text"]) for one in _document(part, where))
    return text_of([part], TEXTS, where)


def _said(where: str, parts: list[Any], unserved: Unserved) -> Iterator[Message]:
    """Yield the messages of an assistant's parts; a result of a server tool ends a message."""
    own: list[Any] = []
    for part in parts:
        kind = str(_kind(part))
        if kind == "redacted_thinking":
            unserved.note(f"{where}.redacted_thinking", f"{where}: redacted thinking is encrypted and left out")
        elif kind.endswith("_tool_result"):
            yield _answer(where, own)
            own = []
            content = json.dumps(_readable(part.get("content")), ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content}
        else:
            own.append(part)
    if own or not parts:
        yield _answer(where, own)


def _readable(content: Any) -> Any:
    """Return the content of a result without encrypted parts."""
    if isinstance(content, Mapping):
        return {name: _readable(value) for name, value in content.items() if not name.startswith("encrypted")}
    return [_readable(one) for one in content] if isinstance(content, list) else content


def _answer(where: str, parts: list[Any]) -> Message:
    """Return one message of an assistant."""
    thoughts = [part for part in parts if _kind(part) == "thinking"]
    calls = [part for part in parts if _kind(part) in CALLS]
    texts = [part for part in parts if _kind(part) not in ("thinking", *CALLS)]
    message: Message = {"role": "assistant", "content": text_of(texts, TEXTS, where)}
    if thoughts:
        message["reasoning_content"] = "".join(str(part.get("thinking", "")) for part in thoughts)
    if calls:
        message["tool_calls"] = [_call(part) for part in calls]
    return message


def _call(part: Mapping[str, Any]) -> Message:
    function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
    return {"id": part.get("id"), "type": "function", "function": function}


def chat_tools(tools: list[Any], unserved: Unserved) -> list[Message]:
    """Return the tools with a schema; others are built into Anthropic's API and unknown to the model."""
    return [_tool(tool) for i, tool in enumerate(tools) if _is_served(i, tool, unserved)]


def _is_served(i: int, tool: Mapping[str, Any], unserved: Unserved) -> bool:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        unserved.note(f"tools[{i}]", f"tools[{i}]: type {kind!r} is not supported, only custom tools are")
    return bool(kind == "custom")


def _tool(tool: Mapping[str, Any]) -> Message:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def chat_choice(choice: Mapping[str, Any]) -> Message:
    """Return the fields of a chat for a choice of tools."""
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    words: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if kind not in words:
        raise invalid(f"tool_choice must have type auto, any, tool or none, not {kind!r}", "tool_choice")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": words[kind], **alone}
