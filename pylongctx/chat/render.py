"""From a chat request to a prompt, and to what the answer must look like."""

import warnings
from collections.abc import Mapping
from typing import Any

from pylongctx.chat.request import check_messages, choose_tools, is_strict, wanted_schema
from pylongctx.chat.template import ChatTemplate, Rendered


def render(template: ChatTemplate, given: Mapping[str, Any]) -> Rendered:
    """Return a conversation as the model reads it; ``given``: the keywords of ``create_chat_completion``.

    Raises
    ------
    ValueError
        When a message, a tool or a schema is not usable, or the template cannot do what is asked.
    """
    tools, choice = choose_tools(*(given[name] for name in ("functions", "function_call", "tools", "tool_choice")))
    request = {
        "messages": check_messages(given["messages"], template.info["source"]),
        "enable_thinking": given["enable_thinking"],
        "kwargs": dict(given["chat_template_kwargs"] or {}),
        "parallel_tool_calls": given["parallel_tool_calls"],
        "add_generation_prompt": given.get("add_generation_prompt", True),
    }
    if tools:
        request |= {"tools": tools, "tool_choice": choice}
    schema = wanted_schema(given["response_format"])
    if schema is not None:
        request["json_schema"] = schema
    if given.get("grammar") is not None and (schema is not None or (tools and choice != "none")):
        raise ValueError("grammar cannot be combined with tools or a response_format, which make one of their own")
    if tools and choice == "required" and schema is not None:
        raise ValueError("a required tool call cannot be combined with a response_format: an answer is one of them")
    rendered = template.render(request, strict=is_strict(given["response_format"]))
    if tools and choice == "required" and rendered.constraint is None:
        raise ValueError("the chat template knows no tool calls, so none can be required; try chat_format='chatml'")
    if tools and not template.info["caps"]["supports_tools"]:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        warnings.warn(
            f"the chat template does not show tools to the model, which cannot know of {names}; "
            "try chat_format='chatml'",
            RuntimeWarning,
            stacklevel=5,
        )
    return rendered
