"""Chat handlers: functions that answer chats instead of a template, as in llama_cpp."""

from collections.abc import Callable
from typing import Any

# llama_cpp's protocol: handler(llama=..., messages=..., and the other arguments of create_chat_completion by name)
Handler = Callable[..., Any]

_HANDLERS: dict[str, Handler] = {}


def register_chat_completion_handler(name: str) -> Callable[[Handler], Handler]:
    """Return a decorator that registers a function as the handler of ``chat_format=name``.

    Raises
    ------
    ValueError
        When the name is already registered.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> @register_chat_completion_handler("parrot")
    ... def parrot(llama, messages, **kwargs):
    ...     return {"choices": [{"message": {"role": "assistant", "content": messages[-1]["content"]}}]}
    >>> with Llama("model.gguf", chat_format="parrot", n_ctx=512, verbose=False) as talking:
    ...     answer = talking.create_chat_completion([{"role": "user", "content": "Hello"}])
    >>> answer["choices"][0]["message"]["content"]
    'Hello'
    >>> unregister_chat_completion_handler("parrot")
    """

    def register(handler: Handler) -> Handler:
        if name in _HANDLERS:
            raise ValueError(f"a chat handler named {name!r} is already registered")
        _HANDLERS[name] = handler
        return handler

    return register


def unregister_chat_completion_handler(name: str) -> None:
    """Remove a handler; KeyError when there is none.

    Examples
    --------
    >>> register = register_chat_completion_handler("parrot")
    >>> handler = register(lambda **arguments: {})
    >>> unregister_chat_completion_handler("parrot")
    """
    del _HANDLERS[name]


def registered_handler(name: str | None) -> Handler | None:
    """Return the handler of a name."""
    return _HANDLERS.get(name) if name else None
