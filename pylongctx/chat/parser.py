"""Parsing an answer into content, reasoning and tool calls with llama.cpp."""

import json
from typing import Any

from pylongctx._lib import error, ffi, lib, take_text, text
from pylongctx.errors import LctxError


class AnswerParser:
    """Owner of one ``lctx_parser``.

    Parameters
    ----------
    syntax : str
        The template's description of its answers, see ``Rendered.syntax``.

    Attributes
    ----------
    failure : str
        Why the complete answer does not follow the template; empty if it does.
    """

    def __init__(self, syntax: str) -> None:
        handle = lib.lctx_parser_create(syntax.encode())
        self._handle = ffi.gc(handle, lib.lctx_parser_free)
        self.failure = ""
        if failure := text(lib.lctx_parser_error(handle)):
            raise error(lib.LCTX_INVALID, failure)

    def feed(self, piece: str) -> list[dict[str, Any]]:
        """Parse the next piece of the answer and return its ``content``, ``reasoning_content`` and ``tool_call`` parts.

        If a piece continues the current text, only the piece is parsed. Text that may still become a marker of the
        template is held back.
        """
        data = piece.encode("utf-8", "replace")
        try:
            return _deltas(lib.lctx_parser_feed(self._handle, data, len(data)))
        except LctxError:
            return []  # more characters may complete it

    def end(self, complete: bool) -> list[dict[str, Any]]:
        """Return the text held back of an answer that is complete or was cut off.

        If the answer does not follow the template, the parsed part is kept and ``failure`` has the reason.
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
        """Return how many bytes were parsed so far, counting repeated parsing."""
        return int(lib.lctx_parser_parsed(self._handle))


def _deltas(found: Any) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = json.loads(take_text(found))
    return deltas
