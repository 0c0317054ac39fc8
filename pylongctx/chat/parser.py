"""Reading an answer: content, reasoning, tool calls; by llama.cpp."""

import json
from typing import Any

from pylongctx._lib import error, ffi, lib, take_text, text
from pylongctx.errors import LctxError


class AnswerParser:
    """Owner of one ``lctx_parser``.

    Parameters
    ----------
    syntax : str
        What a template says about its answers, see ``Rendered.syntax``.

    Attributes
    ----------
    failure : str
        Why the complete answer could not be read as the template says; empty when it could.
    """

    def __init__(self, syntax: str) -> None:
        handle = lib.lctx_parser_create(syntax.encode())
        self._handle = ffi.gc(handle, lib.lctx_parser_free)
        self.failure = ""
        if failure := text(lib.lctx_parser_error(handle)):
            raise error(lib.LCTX_INVALID, failure)

    def feed(self, answer: str, final: bool = False) -> list[dict[str, Any]]:
        """Read the whole answer so far and return what is new: ``content``, ``reasoning_content``, ``tool_call``.

        A model may write what is no answer by its template: then what could be read stands, and ``failure`` says why.
        """
        data = answer.encode("utf-8", "replace")
        try:
            deltas = take_text(lib.lctx_parser_feed(self._handle, data, len(data), final))
        except LctxError as reason:
            if not final:
                return []  # the next characters may make sense of it
            self.failure = str(reason)
            return self.feed(answer)
        found: list[dict[str, Any]] = json.loads(deltas)
        return found
