"""Untrusted input in worker processes that can be stopped: chat templates, JSON schema grammars, model files."""

import atexit
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pylongctx._closed import at_exit
from pylongctx._lib import error, lib, library_path
from pylongctx._platform import has_data

PROGRAM = Path(__file__).with_name("worker.py")
CPU_SECONDS = 5  # limit of one call
WALL_CLOCK_FACTOR = 10  # wall-clock limit as a multiple of the CPU limit, for busy machines
MEMORY = 2**31  # bytes, in addition to those of the library
MAX_TEXT = 64 * 2**20  # bytes of an answer
MAX_WORKERS = 4  # concurrent calls
LENGTH = struct.Struct("<Q")

Parts = Sequence[str]


class _Stopped(Exception):  # noqa: N818 - reads as what happened
    """The worker exited or was killed before it answered."""


class _Worker:
    """A process that answers calls one after the other."""

    def __init__(self) -> None:
        if not sys.executable:
            raise RuntimeError("sys.executable is empty, so no Python program can be started to render chat templates")
        limits = [str(number) for number in (MEMORY, MAX_TEXT)]
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 - ``end`` closes it
        # no debugger on an abort, no GPU, which is not needed, and no layers of Vulkan, which may write to stdout
        quiet = {
            "GGML_NO_BACKTRACE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "VK_INSTANCE_LAYERS": "",
            "VK_LOADER_LAYERS_DISABLE": "~all~",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), str(library_path()), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            bufsize=0,
            env=os.environ | quiet,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, parts: Parts, seconds: int) -> tuple[bool, str]:
        """Return whether the call succeeded, and its text or the reason of the failure."""
        until = time.monotonic() + WALL_CLOCK_FACTOR * seconds
        assert self._process.stdin is not None
        texts = [text.encode("utf-8", "surrogateescape") for text in parts]
        data = b"".join(LENGTH.pack(len(text)) + text for text in texts)
        try:
            self._process.stdin.write(LENGTH.pack(seconds) + LENGTH.pack(len(texts)) + data)
        except BrokenPipeError:
            raise _Stopped from None
        ok, size = struct.unpack("<BQ", self._read(9, until))
        return bool(ok), self._read(size, until).decode("utf-8", "replace")

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        found = bytearray()
        while len(found) < size:
            left = until - time.monotonic()
            if left <= 0 or not has_data(self._process.stdout, left):
                raise TimeoutError
            piece = self._process.stdout.read(min(size - len(found), 2**20))
            if not piece:
                raise _Stopped
            found += piece
        return bytes(found)

    def end(self) -> str:
        """Kill the process and return how it ended."""
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with self._messages as messages:
            messages.seek(0)
            found = re.findall(rb"GGML_ASSERT\(.*\) failed|fatal error.*", messages.read())
        return _why(code, found[-1].decode("utf-8", "replace") if found else "")


class _Pool:
    """The workers of this process, started on demand and kept."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._idle: list[_Worker] = []
        self._room = threading.BoundedSemaphore(MAX_WORKERS)

    def call(self, what: str, parts: Parts, seconds: int) -> str:
        with self._room:
            worker = self._take()
            try:
                ok, answer = worker.ask(parts, seconds)
            except TimeoutError:
                worker.end()
                raise error(lib.LCTX_INVALID, f"{what} takes too long and was stopped") from None
            except _Stopped:
                if at_exit():
                    raise SystemExit from None
                raise error(lib.LCTX_INVALID, f"{what} {worker.end()}") from None
            except BaseException:
                worker.end()  # its late answer would be taken for that of the next call
                raise
            self._idle.append(worker)
        if not ok:
            raise error(lib.LCTX_INVALID, answer)
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _take(self) -> _Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return _Worker()
            if worker.is_alive:
                return worker
            worker.end()


_pool = _Pool()


def _why(code: int, message: str) -> str:
    if sys.platform != "win32" and code == -signal.SIGXCPU:
        return "takes too long and was stopped"
    if code == -signal.SIGSEGV:
        return "recurses endlessly or nests too deeply"
    ended = f"signal {-code}" if code < 0 else f"exit {code}"
    return f"crashes llama.cpp: {message or ended}"


def guarded(what: str, *parts: str, seconds: int | None = None) -> str:
    """Run a call in a worker and return its text.

    ``parts`` are the name of a call of ``worker.py`` and its arguments. Raises InvalidInput, with ``what`` as the
    subject of its message, when the call fails, crashes its worker, or exceeds ``seconds`` of CPU time (None:
    ``CPU_SECONDS``), ``MEMORY`` or ``MAX_TEXT``.
    """
    global _pool
    if _pool.pid != os.getpid():  # after a fork: the workers belong to the parent
        _pool = _Pool()
    return _pool.call(what, parts, CPU_SECONDS if seconds is None else seconds)


@atexit.register
def _close() -> None:
    if _pool.pid == os.getpid():
        _pool.close()
