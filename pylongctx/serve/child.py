"""A model in its own process, which serves it on a socket."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from pylongctx._log import LOG
from pylongctx._units import bytes_text
from pylongctx.serve.errors import ApiError
from pylongctx.serve.shelf import ModelSource

BACKLOG = 1024
SLOW = 10.0  # seconds for a process to exit after its grace period
LAST_LINES = 20  # number of last lines of a process to keep
PAGE_SIZE = os.sysconf("SC_PAGESIZE")


class Child:
    """A model and the process that serves it, on a socket that only this user can access.

    Parameters
    ----------
    source : ModelSource
        The model.
    address : str
        Path of the socket.
    words : sequence of str
        Options of ``pylongctx serve`` for every model.
    headers : mapping
        Headers of this program's own requests: an API key.

    Attributes
    ----------
    http : httpx.AsyncClient
        The HTTP client for the process.
    status : str
        ``unloaded``, ``loading`` or ``loaded``, as in llama-server.
    info : dict
        The entry of ``/v1/models`` of the process, while the model is loaded.
    exit_code : int or None
        The exit status of the last process, if it exited by itself.
    used : float
        Time of the start or end of the last request, by the monotonic clock.
    leaving : bool
        Whether the process is to end once its requests have ended.
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
        self.info: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.used = 0.0
        self.leaving = False

    @property
    def status(self) -> str:
        """The state of the process, which may have exited."""
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
            with suppress(OSError, ValueError, IndexError):  # the process has exited, or there is no /proc
                pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
                self._most_bytes = max(self._most_bytes, pages * PAGE_SIZE)
        return max(self.source.size, self._most_bytes)

    def hold(self) -> None:
        """Count a request; the model stays until ``release``."""
        self._n_held += 1
        self._idle.clear()
        self.used = time.monotonic()

    def release(self) -> None:
        """Stop counting a request."""
        self._n_held -= 1
        self.used = time.monotonic()
        if not self._n_held:
            self._idle.set()

    async def ask(self, path: str) -> httpx.Response:
        """Return the response to an internal request."""
        return (await self.http.get(path, headers=self._headers)).raise_for_status()

    async def load(self) -> None:
        """Start the process, and wait until it has loaded the model; ApiError with its last output when it exits."""
        began, self._status = time.monotonic(), "loading"
        self.exit_code = None
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
