"""The messages of a conversation before they are rendered: their size, and an answer that was begun."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pylongctx.chat.render import render
from pylongctx.chat.template import ChatTemplate, Rendered

BREAK = "\n\n"  # between the parts of a message that is gone on with, as in llama-server


def text_size(messages: Any) -> int:
    """Return the bytes of the texts of messages, at least; what is no message counts nothing.

    Examples
    --------
    >>> text_size([{"role": "user", "content": "Why?"}, {"role": "user", "content": [{"type": "text", "text": "So"}]}])
    6
    """
    found = messages if isinstance(messages, list | tuple) else ()
    return sum(len(text.encode()) for message in found if isinstance(message, Mapping) for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def render_prefilled(template: ChatTemplate, given: Mapping[str, Any]) -> Rendered:
    """Return a conversation as the model reads it, see ``render``; a last message of the assistant is not ended.

    Raises
    ------
    ValueError
        When the two last messages are the assistant's.
    """
    messages = given["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not (isinstance(last, Mapping) and last.get("role") == "assistant" and _texts(last)) or last.get("tool_calls"):
        return render(template, given)
    if not given.get("add_generation_prompt", True):
        return render(template, given)
    before = messages[:-1]
    if before and isinstance(before[-1], Mapping) and before[-1].get("role") == "assistant":
        raise ValueError("messages: the last two are the assistant's, so there is nothing to answer")
    rendered = render(template, {**given, "messages": before})
    return replace(rendered, prompt=rendered.prompt + BREAK.join(_texts(last)))
