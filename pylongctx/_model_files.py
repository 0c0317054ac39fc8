"""Which model the files hold: digests of their headers, of some pages of every tensor, and of every byte."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pylongctx._cache_folder import cache_folder
from pylongctx._gguf import Layout, file_id, layout_of, shards
from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.errors import LctxError

FORMAT = 2  # of identities; raise it when one of them gives other rows, as where llama.cpp changes a model's graph
PAGE, N_PAGES = 4096, 8  # bytes of a page, and pages of each tensor that are read whenever a model is opened
LEAST_PRIORITY = 19
PIECE = 1 << 20  # bytes that are hashed at a time
SETTLED = 2 * 10**9  # ns since the last write: a file system may give two writes within less the same time


class ModelFiles:
    """All files of a model, as they were when it was opened.

    Parameters
    ----------
    path : str
        The GGUF file, or the first of several.

    Attributes
    ----------
    paths : list of str
        All files.
    tensors : list of str
        The names of all tensors.
    header, pages : str
        Digests of all bytes before the data of tensors, and of the sizes and ``N_PAGES`` pages of each tensor.

    Raises
    ------
    InvalidInput
        When a file is missing, or cannot be read as GGUF.
    """

    def __init__(self, path: str) -> None:
        path = os.path.abspath(path)
        first = layout_of(path)
        self.paths = shards(path, first.n_split)
        self._found = stats(self.paths)
        layouts = [first, *map(layout_of, self.paths[1:])]
        self.tensors = [name for layout in layouts for name in layout.starts]
        self.header, self.pages = _quick(self.paths, layouts)
        self._guard = threading.Lock()
        self._weights = ""

    def check(self) -> None:
        """Raise InvalidInput when the files were written or replaced since."""
        check_unchanged(self.paths, self._found)

    def weights(self) -> str:
        """Return a digest of every byte. It is remembered in the cache folder, so that files are read once.

        Raises
        ------
        InvalidInput
            When it is not known yet and the files changed since they were opened.
        """
        with self._guard:
            if not self._weights:
                self._weights = self._recalled() or self._computed()
            return self._weights

    def prepare(self) -> None:
        """Compute ``weights`` in a thread, so that it is known when it is needed."""
        threading.Thread(target=self._prepare, name="pylongctx-weights", daemon=True).start()

    def _prepare(self) -> None:
        # the priority of this thread alone: a prompt goes first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        with suppress(LctxError):  # a caller that needs it gets the reason
            self.weights()

    def _computed(self) -> str:
        self.check()
        began = time.time_ns()
        LOG.info("%s is hashed, once: what a KV store holds belongs to one model", self.paths[0])
        digest = digest_of(self.paths)
        self.check()
        if began - max(max(found.st_mtime_ns, found.st_ctime_ns) for found in self._found) > SETTLED:
            with suppress(OSError):  # no such folder can be made: it is computed again in the next process
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.write_text(digest)
        return digest

    def _recalled(self) -> str:
        try:
            found = self._note.read_text()
        except (OSError, ValueError):
            return ""
        return found if re.fullmatch("[0-9a-f]{64}", found) else ""

    @property
    def _note(self) -> Path:
        """The file that remembers ``weights``."""
        name = repr((FORMAT, list(map(file_id, self._found)), self.header, self.pages))
        return cache_folder() / "weights" / hashlib.sha256(name.encode()).hexdigest()


def stats(paths: Sequence[str]) -> list[os.stat_result]:
    """Return the state of some files; InvalidInput when one is missing."""
    try:
        return [os.stat(path) for path in paths]
    except OSError as reason:
        raise error(lib.LCTX_INVALID, f"a file of the model is missing: {reason}") from None


def check_unchanged(paths: Sequence[str], before: Sequence[os.stat_result]) -> None:
    """Raise InvalidInput when one of some files was written or replaced."""
    for path, old, new in zip(paths, before, stats(paths), strict=True):
        if file_id(old) != file_id(new):
            reason = "changed after it was opened, so nothing says which weights are in use; open it again"
            raise error(lib.LCTX_INVALID, f"{path} {reason}")


def digest_of(paths: Sequence[str]) -> str:
    """Return a digest of every byte of some files; InvalidInput when one cannot be read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    try:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                digest.update(os.fstat(file.fileno()).st_size.to_bytes(8, "little"))
                while n := file.readinto(buffer):
                    digest.update(buffer[:n])
    except OSError as reason:
        raise error(lib.LCTX_INVALID, f"its weights cannot be read again: {reason}") from None
    return digest.hexdigest()


def pages(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the pages of a tensor that are looked at: the first, the last, others between."""
    if end - start <= N_PAGES * PAGE:
        yield start, end - start
        return
    for i in range(N_PAGES):
        yield start + (end - start - PAGE) * i // (N_PAGES - 1), PAGE


def _quick(paths: Sequence[str], layouts: Sequence[Layout]) -> tuple[str, str]:
    """Return the digests of the headers, and of pages of all tensors."""
    header, data = hashlib.sha256(), hashlib.sha256()
    for path, layout in zip(paths, layouts, strict=True):
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            starts = sorted({*layout.starts.values()})
            if starts and starts[-1] > size:
                raise error(lib.LCTX_INVALID, f"{path} ends after {size} bytes, before its last tensor begins")
            header.update(os.pread(file.fileno(), min(layout.header, size), 0))
            data.update(size.to_bytes(8, "little"))
            for start, end in zip(starts, [*starts[1:], size], strict=False):  # the first of several may have none
                for offset, length in pages(start, end):
                    data.update(os.pread(file.fileno(), length, offset))
    return header.hexdigest(), data.hexdigest()
