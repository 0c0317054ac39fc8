"""Checks of the arguments of create_chat_completion, and their conversion for templates."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pylongctx.chat.types import Message

SYSTEM = ("system", "developer")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def check_messages(messages: Any, source: str) -> list[Message]:
    """Return the messages with OpenAI's functions as tools and with tool calls in OpenAI's form.

    Raises
    ------
    ValueError
        When a message is invalid; a role must be one of OpenAI's, or one named in the template.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a list of at least one message")
    checked = [_check_message(i, message, source) for i, message in enumerate(messages)]
    ids: list[str] = []  # ids of calls without a result
    for i, message in enumerate(checked):
        if message["role"] == "assistant":
            calls = [_check_call(i, j, call) for j, call in enumerate(_calls(i, message))]
            ids = [call["id"] for call in calls]
            message.pop("tool_calls", None)
            if calls:
                message["tool_calls"] = calls
        elif message["role"] == "tool":
            expected = ids.pop(0) if ids else ""
            message["tool_call_id"] = message.get("tool_call_id") or expected
    return checked


def _calls(i: int, message: Message) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"messages[{i}].tool_calls must be a list, not {type(calls).__name__}")
    return calls


def _check_call(i: int, j: int, call: Any) -> dict[str, Any]:
    """Return a call in OpenAI's form, completing a missing type or id, or missing empty arguments."""
    unnamed = f"call{i % 1000:03}{j % 100:02}"  # deterministic; Mistral's templates require nine characters
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages[{i}].tool_calls[{j}] must have a function with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    made = {"name": function["name"], "arguments": arguments if arguments.strip() else "{}"}
    return {**call, "type": "function", "id": call.get("id") or unnamed, "function": made}


def texts_of(message: Any) -> Iterator[str]:
    """Yield the texts of a message; none of other values."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [{"text": content}] if isinstance(content, str) else content if isinstance(content, list | tuple) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    yield from (text for text in texts if isinstance(text, str))


def text_size(messages: Any) -> int:
    """Return a lower bound of the bytes in the texts of messages, ignoring other values.

    Examples
    --------
    >>> text_size([{"role": "user", "content": "Why?"}, {"role": "user", "content": [{"type": "text", "text": "So"}]}])
    6
    """
    found = messages if isinstance(messages, list | tuple) else ()
    return sum(len(text.encode()) for message in found for text in texts_of(message))


def text_of_content(content: Any) -> str:
    """Return the text of a message's content, joining its text parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _check_message(i: int, message: Any, source: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}] must be a dict, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or (role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source):
        raise ValueError(f"messages[{i}]: unknown role {role!r}; roles are {', '.join(sorted(ROLES))}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        _check_parts(i, content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"messages[{i}]: content must be text or a list of text parts, not {type(content).__name__}")
    return _without_functions({"content": None, **message})


def _check_parts(i: int, parts: Sequence[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise ValueError(
                f"messages[{i}]: a content part of type {kind!r} cannot be read, only text; "
                "for images pass a chat_handler that supports them"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{i}]: the text of a content part must be a string, not {part.get('text')!r}")


def _without_functions(message: dict[str, Any]) -> Message:
    """Return a message with OpenAI's older function calls as tool calls; the function's name is the call's id."""
    if message["role"] == "function":
        return message | {"role": "tool", "tool_call_id": message.get("name", "")}
    call = message.pop("function_call", None)
    if call is not None:
        message["tool_calls"] = [{"type": "function", "id": call["name"], "function": dict(call)}]
    return message


def choose_tools(functions: Any, function_call: Any, tools: Any, tool_choice: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the tools and the choice: auto, none or required. A tool named by the choice is the only one returned.

    Raises
    ------
    ValueError
        When a tool is not a function, or the choice is invalid.
    """
    if functions:
        tools = [{"type": "function", "function": function} for function in functions]
        tool_choice = function_call
        if isinstance(function_call, Mapping):
            tool_choice = {"type": "function", "function": function_call}
    tools = [_check_tool(i, tool) for i, tool in enumerate(tools or [])]
    if isinstance(tool_choice, Mapping):
        name = (tool_choice.get("function") or {}).get("name")
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise ValueError(f"tool_choice names {name!r}, which is not one of the tools")
        return named, "required"
    choice = tool_choice or "auto"
    if choice not in ("auto", "none", "required"):
        raise ValueError(f"tool_choice must be 'auto', 'none', 'required' or name a function, not {tool_choice!r}")
    if choice == "required" and not tools:
        raise ValueError("tool_choice='required' needs tools")
    return tools, choice


def _check_tool(i: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or tool.get("type") != "function":
        raise ValueError(f"tools[{i}] must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _checked(schema: Any) -> Any:
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"the schema of response_format must be an object, not {schema!r}")
    return schema


def wanted_schema(response_format: Any) -> Any:
    """Return the JSON schema of an answer; None for plain text; json_object allows any object."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return {"type": "object"} if schema is None or schema == {} else _checked(schema)
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        if isinstance(wrapper, Mapping) and "schema" in wrapper:
            return _checked(wrapper["schema"])
        raise ValueError("response_format json_schema needs {'json_schema': {'schema': ...}}")
    raise ValueError(f"response_format must have type text, json_object or json_schema, not {response_format!r}")


def is_strict(response_format: Any) -> bool:
    """Return True if a schema that cannot be fully enforced is refused: unless ``strict`` is false in the request."""
    wrapper = (response_format or {}).get("json_schema")
    return all(one.get("strict") is not False for one in (response_format, wrapper) if isinstance(one, Mapping))
