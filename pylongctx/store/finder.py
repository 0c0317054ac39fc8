"""The store as a source of KV entries: the stored prefix of a prompt, and its blocks in order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._log import LOG
from pylongctx.engine.reuse import Load, Piece, Source
from pylongctx.engine.saved_state import LlamaState, read_tokens
from pylongctx.errors import LctxError
from pylongctx.store.folder import Folder
from pylongctx.store.layout import BLOCK, DIGEST, POINT, ROWS, TAIL, Layout, chain
from pylongctx.store.store import KVStore

HEAD = 16  # bytes of a tail before its rows

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Place:
    """A possible end of a stored prefix: after some whole blocks, or after the tail that follows them."""

    names: list[str]  # of the blocks
    end: int  # tokens
    kind: str  # of the file that completes it, for ROWS that of the last block
    name: str
    held: int  # tokens that the sequence already holds


class BlockLost(Exception):  # noqa: N818 - reads as what happened
    """A block is missing, damaged, or belongs to another model."""

    def __init__(self, name: str) -> None:
        super().__init__(f"block {name[:8]} is lost")
        self.name = name


class Finder(Source):
    """A ``Source`` of the stored prefix of a prompt, in files of the same model, method, settings and owner."""

    name, slow = "the KV store", True

    def __init__(self, store: KVStore, layout: Layout, identity: Mapping[str, Any]) -> None:
        self.whole = layout.has_points
        self._store, self._layout, self._identity = store, layout, identity
        self._lost: set[str] = set()
        self._failed = False

    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the longest stored prefix of a prompt; its key is a ``Place``."""
        place = None if self._failed else next(self._places(tokens, held), None)
        if place is None or place.end <= held:
            return None
        first = 0 if self.whole else held // BLOCK * BLOCK
        return Piece(self, first, place.end, (place, tokens[: place.end]), logits=place.kind == TAIL)

    def planned(self, tokens: Tokens, pieces: Sequence[Piece]) -> None:
        """Count a prompt without a stored prefix, and record the use of its blocks."""
        piece = next((one for one in pieces if one.source is self), None)
        held = pieces[0].end if pieces and not pieces[0].first else 0
        self._store.usage.misses += piece is None and len(tokens) // BLOCK * BLOCK > held
        names = chain(self._identity, tokens, BLOCK)
        self._store.use([*names, piece.key[0].name] if piece is not None and piece.key[0].kind == TAIL else names)

    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield a load for each block; the last one has the data that completes them."""
        place, tokens = piece.key
        usage, started, border = self._store.usage, time.monotonic(), len(place.names) * BLOCK
        done = None
        if place.kind != ROWS:  # first, so that blocks are not loaded unnecessarily
            done = self._read(place.name, place.kind, tokens, border if place.kind == TAIL else border - BLOCK)
        seconds = 0.0
        for start in range(piece.first, border, BLOCK) if self._layout.has_rows else ():
            state = self._read(place.names[start // BLOCK], ROWS, tokens[: start + BLOCK], start)
            seconds += _seconds(state)
            yield Load(state.input_ids, state.llama_state)
        if done is not None:
            share = 1 if self._layout.has_rows else place.end / len(done.input_ids)  # a state has all tokens
            seconds += _seconds(done) * share * (place.kind == TAIL or not self._layout.has_rows)
            yield self._completing(done, place, tokens)
        usage.hits += 1
        usage.tokens += place.end - place.held
        usage.seconds_saved += seconds - (time.monotonic() - started)

    def fail(self, piece: Piece, reason: Exception) -> bool:
        """Search again without a lost block; without the store if its blocks do not fit."""
        if isinstance(reason, BlockLost):
            self._lost.add(reason.name)
        else:
            self._failed = True
            LOG.info("blocks of the KV store cannot be used: %s", reason)
        return True

    def _places(self, tokens: Tokens, held: int) -> Iterator[Place]:
        """Yield the possible ends of the stored prefix, the longest first."""
        names = chain(self._identity, tokens, BLOCK)
        n_block = next((i for i, name in enumerate(names) if name in self._lost), len(names))
        if self._layout.has_rows:
            n_block = next((i for i in range(held // BLOCK, n_block) if not self._has(names[i], ROWS)), n_block)
        for i in range(n_block, 0, -1):
            blocks, border = names[:i], i * BLOCK
            for n_tail, path in sorted(tails(self._store.folder, blocks[-1], tokens[border:]), reverse=True):
                if path.stem not in self._lost:
                    yield Place(blocks, border + n_tail, TAIL, path.stem, held)
            if border <= held:
                return
            kind = POINT if self._layout.has_points else ROWS
            if kind == ROWS or self._has(blocks[-1], POINT):
                yield Place(blocks, border, kind, blocks[-1], held)

    def _has(self, name: str, kind: str) -> bool:
        return name not in self._lost and self._store.folder.has(name, kind)

    def _completing(self, state: LlamaState, place: Place, tokens: Tokens) -> Load:
        """Return the load of a tail or a point."""
        rows, point = split(state.llama_state) if place.kind == TAIL else (state.llama_state[:0], state.llama_state)
        if not self._layout.has_rows:
            return Load(tokens, state=point, logits=state.logits)
        return Load(state.input_ids, rows, foreign=point if self._layout.has_points else point[:0], logits=state.logits)

    def _read(self, name: str, kind: str, tokens: Tokens, first: int) -> LlamaState:
        """Return the file of the part of the text from ``first`` to the end of ``tokens``."""
        state = self._store.read(name, kind)
        sound = state is not None and np.array_equal(state.input_ids, tokens[first:])
        if state is None or not sound or not self._identity.items() <= state.identity.items():
            raise BlockLost(name)
        return state


def tail_name(block: str, tokens: Tokens) -> str:
    """Return the name of a tail that follows a block."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=DIGEST)
    return f"{block}-{digest.hexdigest()}"


def tails(folder: Folder, block: str, rest: Tokens) -> list[tuple[int, Path]]:
    """Return the lengths and files of a block's tails that match a text."""
    found = [(_tokens_of(path), path) for path in folder.tails(block)]
    return [(len(tail), path) for tail, path in found if len(tail) and np.array_equal(tail, rest[: len(tail)])]


def joined(rows: NDArray[np.uint8], point: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the content of a tail: the length of its rows, the rows, and its point."""
    return np.concatenate([np.array([len(rows), 0], np.uint64).view(np.uint8), rows, point])


def split(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the rows of a tail, and its point; the inverse of ``joined``."""
    n_rows = int(data[:8].view(np.uint64)[0]) if len(data) >= HEAD else len(data)
    return data[HEAD : HEAD + n_rows], data[HEAD + n_rows :]


def _tokens_of(path: Path) -> Tokens:
    """Return the tokens of a tail; empty when it is damaged, missing or unreadable."""
    try:
        return read_tokens(path)
    except (LctxError, ValueError, OSError, MemoryError):
        return np.empty(0, np.int32)


def _seconds(state: LlamaState) -> float:
    """Return the time that the evaluation of a file's tokens took."""
    seconds = state.identity.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0
