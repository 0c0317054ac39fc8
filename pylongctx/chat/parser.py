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

    def feed(self, piece: str) -> list[dict[str, Any]]:
        """Read the next piece of the answer and return what is new: ``content``, ``reasoning_content``, ``tool_call``.

        A piece that goes on with what the answer is saying is all that is parsed. What may still turn out to be a mark
        of the template is held back.
        """
        data = piece.encode("utf-8", "replace")
        try:
            return _deltas(lib.lctx_parser_feed(self._handle, data, len(data)))
        except LctxError:
            return []  # the next characters may make sense of it

    def end(self, complete: bool) -> list[dict[str, Any]]:
        """Return what was held back of an answer that is complete, or was cut off.

        A model may write what is no answer by its template: then what could be read stands, and ``failure`` says why.
        """
        try:
            return _deltas(lib.lctx_parser_end(self._handle, complete))
        except LctxError as reason:
            if not complete:
                return []
            self.failure = str(reason)
            return self.end(complete=False)

    @property
    def n_parsed(self) -> int:
        """Return how many bytes were parsed so far, again included."""
        return int(lib.lctx_parser_parsed(self._handle))


def _deltas(found: Any) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = json.loads(take_text(found))
    return deltas
