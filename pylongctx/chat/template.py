"""Chat templates: from messages to a prompt, and to what the answer must look like; by llama.cpp."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pylongctx._lib import error, ffi, lib, take_text, text
from pylongctx.chat import formats
from pylongctx.engine.model import Model

OWN = "chat_template."  # begins the names of a model's own templates: chat_template.default, chat_template.tool_use


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it.

    Attributes
    ----------
    prompt : str
        Its text, without the BOS token where the vocabulary adds one.
    constraint : str or None
        The grammar of the answer, for a Sampler.
    preserved : list of str
        Texts of special tokens that belong to the answer's text.
    stops : list of str
        Strings that end the answer, beside the model's own end tokens.
    syntax : str
        How to read the answer, for an AnswerParser.
    """

    prompt: str
    constraint: str | None
    preserved: list[str]
    stops: list[str]
    syntax: str


class ChatTemplate:
    """Owner of one ``lctx_template``.

    Parameters
    ----------
    model : Model
        Must outlive the template.
    source : str or None
        Jinja text; None: the model's own, ChatML where it has none.
    stops : tuple of str
        More strings that end an answer.

    Raises
    ------
    InvalidInput
        When the template cannot be parsed.
    """

    def __init__(self, model: Model, source: str | None = None, stops: tuple[str, ...] = ()) -> None:
        handle = lib.lctx_template_create(model.handle, ffi.NULL if source is None else source.encode())
        self._handle = ffi.gc(handle, lib.lctx_template_free)
        self._stops = stops
        self._lock = threading.Lock()  # it renders one conversation at a time
        if failure := text(lib.lctx_template_error(handle)):
            raise error(lib.LCTX_INVALID, failure)

    @cached_property
    def info(self) -> dict[str, Any]:
        """``source``, ``own`` (whether the model or the caller gave it), ``caps`` (what it can render)."""
        found: dict[str, Any] = json.loads(take_text(lib.lctx_template_info(self._handle)))
        return found

    def render(self, request: Mapping[str, Any]) -> Rendered:
        """Render a request, see ``lctx_template_apply``; InvalidInput when the template refuses it."""
        try:
            with self._lock:
                answer = json.loads(take_text(lib.lctx_template_apply(self._handle, json.dumps(request).encode())))
        except ValueError as reason:
            raise error(lib.LCTX_INVALID, f"the chat template cannot render the messages: {reason}") from None
        return Rendered(
            prompt=answer["prompt"],
            constraint=json.dumps(answer["constraint"]) if answer["constraint"] else None,
            preserved=answer["preserved_tokens"],
            stops=[*answer["stops"], *self._stops],
            syntax=json.dumps(answer["syntax"]),
        )


class Templates:
    """The chat template of a model, found when it is first asked for.

    Parameters
    ----------
    model : Model
        Must outlive this object.
    name : str or None
        A named format, Jinja text, or ``chat_template.NAME`` of the model. None: the model's own template, else ChatML.
    """

    def __init__(self, model: Model, name: str | None) -> None:
        self.name = name
        self._model = model

    @cached_property
    def template(self) -> ChatTemplate:
        """The template; InvalidInput when it cannot be used, ValueError when the model has none of that name."""
        if self.name is None:
            own = ChatTemplate(self._model)
            return own if own.info["own"] else ChatTemplate(self._model, *formats.find("chatml"))
        if not self.name.startswith(OWN):
            return ChatTemplate(self._model, *formats.find(self.name))
        key, metadata = "tokenizer." + self.name.removesuffix(".default"), self._model.metadata()
        if key not in metadata:
            raise ValueError(f"chat_format={self.name!r}: the model has no template {key}")
        return ChatTemplate(self._model, metadata[key])
