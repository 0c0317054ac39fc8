"""Answers as blocks of reasoning, text and tool calls, for APIs with this form."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pylongctx.chat.tools import readable

Event = dict[str, Any]


@dataclass
class Block:
    """A part of an answer."""

    kind: str  # thinking, text or call
    index: int
    text: str = ""  # of a call the arguments
    id: str = ""  # of a call, like the name
    name: str = ""
    cut: bool = False  # whether the answer reached its limit in this block

    @property
    def arguments(self) -> Any:
        """The arguments of a call as an object; see ``readable`` for those that the answer was cut off in."""
        return json.loads(readable(self.text))


class Blocks(ABC):
    """Converts the deltas of a chat completion to events; ``blocks`` has the blocks so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._key: Any = None

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a delta."""
        for key, text, more in _pieces(delta):
            if key != self._key:
                yield from self.end()
                yield from self._begun(key, more)
            if text:
                self.blocks[-1].text += text
                yield from self._grown(self.blocks[-1], text)

    def finish(self, cut: bool = False) -> Iterator[Event]:
        """Yield the events at the end of an answer, which has at least an empty text."""
        if not self.blocks:
            yield from self._begun(("text",), {})
        self.blocks[-1].cut = cut
        yield from self.end()

    def _begun(self, key: tuple[Any, ...], more: Event) -> Iterator[Event]:
        self._key = key
        self.blocks.append(Block(key[0], len(self.blocks), **more))
        yield from self._opened(self.blocks[-1])

    def end(self) -> Iterator[Event]:
        """Yield the events at the end of the open block."""
        if self._key is not None:
            self._key = None
            yield from self._closed(self.blocks[-1])

    @abstractmethod
    def _opened(self, block: Block) -> Iterator[Event]:
        """Yield the events of a new block."""

    @abstractmethod
    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        """Yield the events of new text."""

    @abstractmethod
    def _closed(self, block: Block) -> Iterator[Event]:
        """Yield the events of a complete block."""


def blocks_of(message: Mapping[str, Any], cut: bool = False) -> list[Block]:
    """Return the blocks of a whole answer; at least an empty text."""
    found: list[Block] = []
    for key, text, more in _pieces(message):
        found.append(Block(key[0], len(found), text, **more))
    found = found or [Block("text", 0)]
    found[-1].cut = cut
    return found


def _pieces(delta: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], str, Event]]:
    """Yield (block, text, fields of a new block)."""
    if delta.get("reasoning_content"):
        yield ("thinking",), delta["reasoning_content"], {}
    if delta.get("content"):
        yield ("text",), delta["content"], {}
    for i, call in enumerate(delta.get("tool_calls") or ()):
        function = call["function"]
        more = {"id": call.get("id", ""), "name": function.get("name", "")}
        yield ("call", call.get("index", i)), function["arguments"], more
