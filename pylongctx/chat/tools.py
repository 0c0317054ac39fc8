"""Tools and calls of a conversation: every form in which clients send them becomes OpenAI's form of functions."""

import json
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
# a custom tool becomes a function with one string argument
INPUT = "input"
ONE_TEXT = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
UNREAD = "arguments"  # the name under which arguments that are not a JSON object are shown to the model
WORDS = {"auto": "auto", "none": "none", "required": "required", "any": "required"}  # any is Mistral's and Anthropic's


def choose_tools(functions: Any, function_call: Any, tools: Any, tool_choice: Any) -> tuple[list[Object], str]:
    """Return the tools as functions and the choice: auto, none or required.

    Of a choice that names tools, only these are returned. ValueError when a tool is not a function or a custom tool, or
    the choice is invalid.
    """
    if functions:
        tools = [{"type": "function", "function": function} for function in functions]
        tool_choice = function_call
    tools = [_check_tool(i, tool) for i, tool in enumerate(tools or [])]
    if isinstance(tool_choice, Mapping):
        tools, tool_choice = _named(tools, tool_choice)
    choice = WORDS.get(tool_choice or "auto") if isinstance(tool_choice, str | None) else None
    if choice is None:
        raise ValueError(
            f"tool_choice must be 'auto', 'none', 'required', 'any' or name a function, not {tool_choice!r}"
        )
    if choice == "required" and not tools:
        raise ValueError("tool_choice='required' needs tools")
    return tools, choice


def _named(tools: list[Object], choice: Mapping[str, Any]) -> tuple[list[Object], Any]:
    """Return the tools that a choice names, and the word for it; a word may also be its type, as in Anthropic's API."""
    kind = choice.get("type")
    if kind == "allowed_tools":
        own = _inner(choice, "allowed_tools")
        names = [_name(one) for one in own.get("tools") or () if _name(one) is not None]  # others run on other servers
        return [_find(tools, name)[0] for name in dict.fromkeys(names)], own.get("mode") or "auto"
    name = _name(choice)
    return (tools, kind) if name is None and kind in WORDS else (_find(tools, name), "required")


def _find(tools: list[Object], name: Any) -> list[Object]:
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise ValueError(f"tool_choice names {name!r}, which is not one of the tools")
    return found[:1]


def _inner(one: Any, kind: str) -> Mapping[str, Any]:
    """Return the object with the name of a tool: inside of the tool, or in the form of /v1/responses the tool."""
    inner = one.get(kind) if isinstance(one, Mapping) else None
    return inner if isinstance(inner, Mapping) else one if isinstance(one, Mapping) else {}


def _name(one: Any) -> Any:
    return _inner(one, _kind(one)).get("name")


def _kind(one: Any) -> str:
    return "custom" if isinstance(one, Mapping) and one.get("type") == "custom" else "function"


def _check_tool(i: int, tool: Any) -> Object:
    kind = _kind(tool)
    inner = {name: value for name, value in _inner(tool, kind).items() if name != "type"}
    if not isinstance(tool, Mapping) or not isinstance(inner.get("name"), str) or tool.get("type") != kind:
        raise ValueError(
            f"tools[{i}] must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, "
            "or {'type': 'custom', 'custom': {'name': ...}}"
        )
    return custom_function(inner) if kind == "custom" else _function(inner)


def _function(function: Mapping[str, Any]) -> Object:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**function, "parameters": parameters}}


# ---- custom tools ----


def custom_function(tool: Mapping[str, Any]) -> Object:
    """Return a custom tool as a function; a grammar of its input is shown to the model.

    Examples
    --------
    >>> custom_function({"name": "shell"})["function"]["parameters"]["required"]
    ['input']
    """
    description = str(tool.get("description") or "")
    if (grammar := custom_grammar(tool)) is not None:
        definition = f"The input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        description = f"{description}\n{definition}".strip()
    return _function({"name": tool["name"], "description": description, "parameters": ONE_TEXT})


def custom_grammar(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the grammar of a custom tool's input, which is not enforced; None without one."""
    form = _inner(tool, "custom").get("format")
    return _inner(form, "grammar") if isinstance(form, Mapping) and form.get("type") == "grammar" else None


def custom_names(tools: Any) -> frozenset[str]:
    """Return the names of the custom tools of a request."""
    return frozenset(_name(tool) for tool in tools or () if _kind(tool) == "custom")


def custom_input(arguments: str) -> str:
    """Return the input in the arguments of a custom tool's call; all of them if the answer was cut off.

    Examples
    --------
    >>> custom_input('{"input": "ls"}'), custom_input('{"inp')
    ('ls', '{"inp')
    """
    found = json_object(arguments)
    return str(found[INPUT]) if found is not None and INPUT in found else arguments


# ---- calls in messages ----


def check_call(i: int, j: int, call: Any) -> Object:
    """Return a call of a message in OpenAI's form, completing a missing type or id.

    Arguments that are not a JSON object, such as those of a call that was cut off, become a text in one, since
    templates fail on them and the conversation could never continue.
    """
    unnamed = f"call{i % 1000:03}{j % 100:02}"  # deterministic; Mistral's templates require nine characters
    kind = _kind(call)
    function = call.get(kind) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages[{i}].tool_calls[{j}] must have a function with a name")
    if kind == "custom":
        function = {"name": function["name"], "arguments": {INPUT: function.get("input") or ""}}
    made = {"name": function["name"], "arguments": readable(function.get("arguments"))}
    others = {name: value for name, value in call.items() if name != "custom"}
    return {**others, "type": "function", "id": call.get("id") or unnamed, "function": made}


def readable(arguments: Any) -> str:
    """Return the JSON text of an object that has the arguments of a call.

    Examples
    --------
    >>> readable('{"n": 7}'), readable('{"n": 7')
    ('{"n": 7}', '{"arguments": "{\\"n\\": 7"}')
    """
    if isinstance(arguments, str):
        if not arguments.strip():
            return "{}"
        if json_object(arguments) is not None:
            return arguments
    elif arguments is None or isinstance(arguments, Mapping):
        return json.dumps(arguments or {}, ensure_ascii=False)
    return json.dumps({UNREAD: arguments}, ensure_ascii=False)


def json_object(text: str) -> Object | None:
    """Return the object of a JSON text; None for other values, and for what llama.cpp does not read as JSON.

    Examples
    --------
    >>> json_object('{"n": 7}'), json_object('{"n": 7'), json_object('{"n": NaN}'), json_object("7")
    ({'n': 7}, None, None, None)
    """
    try:
        found = json.loads(text, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()  # fails on half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
