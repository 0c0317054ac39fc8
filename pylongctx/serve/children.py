"""Models in their own processes, loaded on request and unloaded to make room for others."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pylongctx._units import bytes_text
from pylongctx.serve.child import Child
from pylongctx.serve.errors import ApiError, unavailable
from pylongctx.serve.shelf import ModelSource


@dataclass(frozen=True)
class Limits:
    """Limits on loaded models.

    Attributes
    ----------
    n : int
        Maximum models; 0: no limit.
    memory : int
        Maximum bytes; 0: no limit.
    grace : float
        Seconds for the answers of a process that must end.
    """

    n: int = 0
    memory: int = 0
    grace: float = 10.0


class Children:
    """The processes of all models, within the limits.

    Parameters
    ----------
    words : sequence of str
        Options of ``pylongctx serve`` for every model.
    limits : Limits
        The limits.
    keys : sequence of str
        API keys of clients, passed to processes in a file, since their options are visible to other users.
    slot_folder : Path or None
        Folder with a subfolder per model for saved sequences.
    """

    def __init__(
        self, words: Sequence[str], limits: Limits, keys: Sequence[str] = (), slot_folder: Path | None = None
    ) -> None:
        self.limits = limits
        self._words = list(words)
        self._headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self._slot_folder = slot_folder
        self._folder = tempfile.TemporaryDirectory(prefix="pylongctx-")  # 0700
        if keys:
            path = Path(self._folder.name, "keys")
            path.write_text("\n".join(keys), encoding="utf-8")
            self._words += ["--api-key-file", str(path)]
        self._children: dict[ModelSource, Child] = {}
        self._door = asyncio.Lock()  # one model is loaded or unloaded at a time, in order of arrival
        self._opening: set[asyncio.Future[None]] = set()

    def of(self, source: ModelSource) -> Child:
        """Return the child of a model, loaded or not."""
        if source not in self._children:
            address = f"{self._folder.name}/{len(self._children)}"
            own = ["--slot-save-path", str(self._slot_folder / source.name)] if self._slot_folder else []
            self._children[source] = Child(source, address, [*self._words, *own], self._headers)
        return self._children[source]

    def loaded(self) -> list[Child]:
        """Return the children with loaded models."""
        return [child for child in self._children.values() if child.status == "loaded"]

    @asynccontextmanager
    async def using(self, source: ModelSource) -> AsyncIterator[Child]:
        """Load a model if needed, and keep it loaded during the block; ApiError when it cannot be loaded."""
        child = self.of(source)
        if child.status == "loaded" and not child.leaving:
            child.hold()
        else:
            await self._open(child)
        try:
            yield child
        finally:
            child.release()

    async def unload(self, source: ModelSource) -> None:
        """Unload a model once no request uses it."""
        async with self._door:
            await self.of(source).unload(self.limits.grace)

    async def close(self) -> None:
        """End all processes."""
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        children = self._children.values()
        await asyncio.gather(*(child.end(self.limits.grace) for child in children))
        await asyncio.gather(*(child.http.aclose() for child in children))
        self._folder.cleanup()

    async def _open(self, child: Child) -> None:
        """Load and hold a model. If the request is cancelled, loading continues in the background."""
        await self._door.acquire()
        others: list[Child] = []
        try:
            others = self._in_the_way(child)
            for other in others:
                other.leaving = True
            for other in others:
                await other.idle()
        except BaseException:
            self._leave(others)
            raise
        opening = asyncio.ensure_future(self._exchange(child, others))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:  # the next request finds the model loaded
            opening.add_done_callback(partial(_let_go, child))
            raise

    async def _exchange(self, child: Child, others: list[Child]) -> None:
        """Unload models to make room, then load and hold a model."""
        try:
            for other in others:
                await other.end(self.limits.grace)
            if child.status != "loaded":
                await child.load()
                await self._make_room(child)  # now its actual memory is known
            child.hold()
        finally:
            self._leave(others)

    def _leave(self, others: list[Child]) -> None:
        for other in others:
            other.leaving = False
        self._door.release()

    async def _make_room(self, child: Child) -> None:
        """Unload models that do not fit together with a model; ApiError if it does not fit alone."""
        try:
            for other in self._in_the_way(child):
                await other.unload(self.limits.grace)
        except ApiError:
            await child.end(self.limits.grace)
            raise

    def _in_the_way(self, child: Child) -> list[Child]:
        """Return the models to unload for a model: idle ones first, then the least recently used.

        Raises
        ------
        ApiError
            When the limits do not allow the model alone.
        """
        wanted, memory = child.n_bytes, self.limits.memory
        if memory and wanted > memory:
            name, sizes = child.source.name, f"{bytes_text(wanted)}, more than the {bytes_text(memory)}"
            raise unavailable(f"the model {name!r} takes {sizes} of --models-memory: increase it")
        others = [other for other in self.loaded() if other is not child]
        others.sort(key=lambda other: (not other.is_idle, other.used))
        found: list[Child] = []
        while others and not self._fits(wanted, others):
            found.append(others.pop(0))
        return found

    def _fits(self, wanted: int, others: list[Child]) -> bool:
        most, memory = self.limits.n, self.limits.memory
        n_bytes = wanted + sum(other.n_bytes for other in others)
        return (not most or len(others) < most) and (not memory or n_bytes <= memory)


def _let_go(child: Child, opening: "asyncio.Future[None]") -> None:
    """Release a model of a cancelled request, if it was loaded."""
    if not opening.cancelled() and opening.exception() is None:
        child.release()
