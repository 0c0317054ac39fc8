"""Models in their own processes, loaded on request and unloaded to make room for others."""

import asyncio
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from pylongctx._lib import InvalidInput
from pylongctx._log import LOG
from pylongctx._platform import resident_bytes
from pylongctx._units import bytes_text
from pylongctx.catalog import CATALOG
from pylongctx.model_files.gguf import SPLIT_NAME
from pylongctx.serve.cards import Card, card_of
from pylongctx.serve.errors import ApiError, unavailable

FIRST_SHARD = re.compile(r"(.*)-00001-of-\d{5}\.gguf", re.DOTALL)
PROJECTOR = "mmproj"  # prefix of files with image projectors of other models
BACKLOG = 1024
TICK = 0.05  # minimum seconds between two looks for idle models
SLOW = 10.0  # seconds for a process to exit after its grace period
LAST_LINES = 20  # number of last lines of a process to keep


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded; ``word`` is an argument of ``pylongctx serve --model``, a path or a known name."""

    name: str
    word: str

    @property
    def path(self) -> str | None:
        """The file; None for a model of the catalogue that is not downloaded."""
        entry = None if Path(self.word).is_file() else CATALOG.get(self.word)
        found = self.word if entry is None else entry.path()
        return None if found is None else str(found)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        if self.path is None:
            return CATALOG[self.word].size
        card = self.card
        return card.size if card is not None else Path(self.path).stat().st_size

    @property
    def card(self) -> Card | None:
        """The description from its file; None if it is missing or unreadable."""
        try:
            return None if self.path is None else card_of(self.path)
        except InvalidInput:
            return None


class Shelf:
    """The models of folders, files and names, searched again on every access, and ``named`` ones by their own names.

    A named model replaces one of the same name. ValueError when there is none, or two others have the same name.
    """

    def __init__(self, words: Sequence[str], named: Mapping[str, str] = MappingProxyType({})) -> None:
        self._words = words
        self._named = {name: _named(name, word) for name, word in named.items()}
        found = [source for word in words for source in _sources(word)]
        if not (found or named):
            raise ValueError(f"there is no .gguf file in {', '.join(words)}")
        names = [source.name for source in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two models are called {twice!r}: rename a file")

    def sources(self) -> dict[str, ModelSource]:
        """Return all models by name; the first one of those with the same name."""
        found = dict(self._named)
        for word in self._words:
            for source in _sources(word):
                found.setdefault(source.name, source)
        return found


class OneModel:
    """A shelf of one model, which is used for any name in a request."""

    def __init__(self, name: str, word: str) -> None:
        self.only = ModelSource(name, word)

    def sources(self) -> dict[str, ModelSource]:
        """Return the model by its name."""
        return {self.only.name: self.only}


def _named(name: str, word: str) -> ModelSource:
    """Return a model with a name of its own; ValueError when its file does not exist."""
    if not Path(word).is_file() and word not in CATALOG:
        raise ValueError(f"the model {name!r}: {word!r} is neither a file nor a name that pylongctx get lists")
    return ModelSource(name, word)


def _sources(word: str) -> Iterator[ModelSource]:
    path = Path(word)
    if path.is_dir():
        for file in sorted(path.glob("*.gguf")):
            if _is_first(file.name):
                yield ModelSource(_name(file), str(file))
    elif word in CATALOG and not path.is_file():
        yield ModelSource(word, word)
    elif path.suffix == ".gguf":
        if path.is_file():
            yield ModelSource(_name(path), word)
    else:
        raise ValueError(f"{word!r} is neither a folder, a .gguf file nor a name that pylongctx get lists")


def _is_first(name: str) -> bool:
    """Return True if a file is a model, or the first file of a split model."""
    is_whole = not SPLIT_NAME.fullmatch(name)
    return not name.startswith(PROJECTOR) and (is_whole or FIRST_SHARD.fullmatch(name) is not None)


def _name(path: Path) -> str:
    split = FIRST_SHARD.fullmatch(path.name)
    return split[1] if split else path.stem


class Child:
    """A model and the process that serves it, on a socket that only this user can access.

    ``words`` are options of ``pylongctx serve`` for every model, and ``headers`` has an API key for own requests.
    """

    def __init__(self, source: ModelSource, address: str, words: Sequence[str], headers: Mapping[str, str]) -> None:
        self.source = source
        self.words = ["serve", *words, "--model", source.word, "--alias", source.name]
        self._address = address
        self._headers = headers
        # each request has its own connection, which is never stale
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(verify=False, uds=address, limits=limits)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._status = "unloaded"
        self._n_held = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._most_bytes = 0
        self.info: dict[str, Any] = {}  # its entry of /v1/models, while the model is loaded
        self.exit_code: int | None = None  # of the last process, if it exited by itself
        self.used = 0.0  # time of the start or end of the last request
        self.leaving = False  # whether the process is to end once its requests have ended
        self.is_sleeping = False  # whether it was unloaded because no request used it for long

    @property
    def status(self) -> str:
        """``unloaded``, ``loading`` or ``loaded``, as in llama-server; the process may have exited."""
        if self._status == "loaded" and self._process is not None and self._process.returncode is not None:
            self._ended(self._process.returncode)
        return self._status

    @property
    def is_idle(self) -> bool:
        """True if no request uses the model."""
        return self._idle.is_set()

    @property
    def n_bytes(self) -> int:
        """The actual or expected memory of the model: the size of its files, or of its process if that is more."""
        if self._process is not None and self._process.returncode is None:
            self._most_bytes = max(self._most_bytes, resident_bytes(self._process.pid))
        return max(self.source.size, self._most_bytes)

    def hold(self, quiet: bool = False) -> None:
        """Count a request; the model stays until ``release``. A quiet one does not count as use of the model."""
        self._n_held += 1
        self._idle.clear()
        self.used = self.used if quiet else time.monotonic()

    def release(self, quiet: bool = False) -> None:
        """Stop counting a request."""
        self._n_held -= 1
        self.used = self.used if quiet else time.monotonic()
        if not self._n_held:
            self._idle.set()

    async def ask(self, path: str) -> httpx.Response:
        """Return the response to an internal request."""
        return (await self.http.get(path, headers=self._headers)).raise_for_status()

    async def load(self) -> None:
        """Start the process, and wait until it has loaded the model; ApiError with its last output when it exits."""
        began, self._status = time.monotonic(), "loading"
        self.exit_code, self.is_sleeping = None, False
        self._last_lines.clear()
        try:
            await self._start()
            await self._wait()
        except BaseException:
            await self._kill()
            raise
        self._status = "loaded"
        LOG.info("loaded %s in %.1f s (%s)", self.source.name, time.monotonic() - began, bytes_text(self.n_bytes))

    async def _start(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._address)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(BACKLOG)
            number = str(listener.fileno())
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pylongctx", *self.words, "--socket", number),
                stdin=asyncio.subprocess.PIPE,  # end of file tells the process that this one is gone
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(int(number),),
                start_new_session=True,  # only this process handles Ctrl-C, and ends the others
            )
        self._reading = asyncio.ensure_future(self._read(self._process))

    async def _wait(self) -> None:
        assert self._process is not None
        ready = asyncio.ensure_future(self.ask("/v1/models"))
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                with suppress(httpx.TransportError):  # the process is about to exit
                    (self.info,) = ready.result().json()["data"]
                    return
            self._ended(await ended)
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.wait({ready, ended})
        await self._finish_reading()
        raise ApiError(500, "server_error", f"the model {self.source.name!r} cannot be loaded: {self.last_words}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Forward the output of the process, and keep its last lines."""
        assert process.stderr is not None
        rest = ""
        while data := await process.stderr.read(1 << 16):
            *lines, rest = (rest + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._last_lines.append(line)
                print(f"[{self.source.name}] {line}", file=sys.stderr, flush=True)

    async def _finish_reading(self) -> None:
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=1.0)

    @property
    def last_words(self) -> str:
        """The reason why the process exited, according to its output."""
        lines = [line for line in self._last_lines if line]
        errors = [line for line in lines if "error" in line.lower()] or lines
        said = re.sub(r"^pylongctx: (error: )?", "", errors[-1]) if errors else ""
        return said or f"its process ended with exit status {self.exit_code}"

    async def lost(self) -> ApiError:
        """Return the error for a request that the process did not answer."""
        name, process = self.source.name, self._process
        if process is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), SLOW)
        if self.status == "loaded":
            return ApiError(502, "server_error", f"the process of the model {name!r} closed the connection")
        again = "the next request starts it again"
        return ApiError(502, "server_error", f"the process of the model {name!r} ended ({self._how()}); {again}")

    def _how(self) -> str:
        code = self.exit_code or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    async def idle(self) -> None:
        """Wait until no request uses the model."""
        await self._idle.wait()

    async def unload(self, grace: float) -> None:
        """Wait until no request uses the model, and end its process."""
        self.leaving = True
        try:
            await self.idle()
            await self.end(grace)
        finally:
            self.leaving = False

    async def end(self, grace: float) -> None:
        """End the process after a grace period for its answers."""
        process = self._process
        if process is not None and process.returncode is None:
            self._status = "unloaded"
            LOG.info("unloading %s", self.source.name)
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace + SLOW)
        await self._kill()

    async def _kill(self) -> None:
        process, self._status, self.info = self._process, "unloaded", {}
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self._finish_reading()

    def _ended(self, code: int) -> None:
        """Record that the process exited by itself."""
        self._status, self.exit_code, self.info = "unloaded", code, {}
        LOG.warning("the process of the model %s ended (%s)", self.source.name, self._how())


@dataclass(frozen=True)
class Limits:
    """Limits on loaded models; 0: no limit."""

    n: int = 0
    memory: int = 0  # bytes
    grace: float = 10.0  # seconds for the answers of a process that must end
    idle: float = math.inf  # seconds without a request after which a model is unloaded


class Children:
    """The processes of all models, within the limits; ``slot_folder`` has a subfolder of saved sequences per model.

    ``words`` are the options of all processes, and ``presets`` returns more for the name of a model.
    """

    def __init__(
        self,
        words: Sequence[str],
        limits: Limits,
        keys: Sequence[str] = (),
        slot_folder: Path | None = None,
        presets: Callable[[str], Sequence[str]] = lambda name: (),
    ) -> None:
        self.limits = limits
        self._words = list(words)
        self._headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self._slot_folder = slot_folder
        self._presets = presets
        self._folder = tempfile.TemporaryDirectory(prefix="pylongctx-")  # 0700
        if keys:  # passed in a file, since other users can see the options of a process
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
            words = [*self._presets(source.name), *self._words, *own]
            self._children[source] = Child(source, address, words, self._headers)
        return self._children[source]

    def loaded(self) -> list[Child]:
        """Return the children with loaded models."""
        return [child for child in self._children.values() if child.status == "loaded"]

    @asynccontextmanager
    async def using(self, source: ModelSource, quiet: bool = False) -> AsyncIterator[Child]:
        """Load a model if needed, and keep it loaded during the block; ApiError when it cannot be loaded.

        A ``quiet`` use of a loaded model does not keep it from being idle.
        """
        child = self.of(source)
        quiet = quiet and child.status == "loaded" and not child.leaving
        if child.status == "loaded" and not child.leaving:
            child.hold(quiet)
        else:
            await self._open(child)
        try:
            yield child
        finally:
            child.release(quiet)

    async def sleep_when_idle(self) -> None:
        """Unload models that no request has used for the time of the limits; runs until it is cancelled."""
        while True:
            now = time.monotonic()
            left = [child.used + self.limits.idle - now for child in self.loaded() if child.is_idle]
            await asyncio.sleep(max(TICK, min(left, default=self.limits.idle)))
            for child in filter(self._sleeps, self.loaded()):
                async with self._door:
                    if self._sleeps(child):
                        LOG.info("%s was idle for %g s", child.source.name, self.limits.idle)
                        child.is_sleeping = True  # from now on, so that no question wakes it
                        await child.unload(self.limits.grace)

    def _sleeps(self, child: Child) -> bool:
        return child.status == "loaded" and child.is_idle and time.monotonic() - child.used >= self.limits.idle

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

        ApiError when the limits do not allow the model alone.
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
