"""Identity of a model: digests of the headers of its files, of some pages of every tensor, and of every byte."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pylongctx._cache_folder import cache_folder
from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx._platform import lower_priority
from pylongctx.errors import LctxError
from pylongctx.model_files.gguf import FileLayout, file_id, layout_of, shards

FORMAT = 2  # of identities; increment it when KV entries change, such as when llama.cpp changes a model's graph
PAGE, N_PAGES = 4096, 8  # bytes of a page, and pages per tensor that are hashed whenever a model is opened
LOWEST_PRIORITY = 19
READ_BYTES = 1 << 20  # bytes per read
SETTLED = 2 * 10**9  # ns since the last write: file systems may give two closer writes the same time


class ModelFiles:
    """All files of a model, in their state when it was opened.

    ``path`` is the first of them. ``header`` is a digest of all bytes before the tensor data, ``pages`` of the size and
    ``N_PAGES`` pages of each tensor. Raises InvalidInput when a file is missing, or cannot be read as GGUF.
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
        """Raise InvalidInput when a file was written or replaced since the model was opened."""
        check_unchanged(self.paths, self._found)

    def weights(self) -> str:
        """Return a digest of every byte. It is saved in the cache folder, so that files are read once.

        Raises InvalidInput when it is not saved yet and the files changed since they were opened.
        """
        with self._guard:
            if not self._weights:
                self._weights = self._recalled() or self._computed()
            return self._weights

    def prepare(self) -> None:
        """Compute ``weights`` in a background thread."""
        threading.Thread(target=self._prepare, name="pylongctx-weights", daemon=True).start()

    def _prepare(self) -> None:
        lower_priority(threading.get_native_id(), LOWEST_PRIORITY)
        with suppress(LctxError):  # raised again when a caller needs the digest
            self.weights()

    def _computed(self) -> str:
        self.check()
        began = time.time_ns()
        LOG.info("hashing %s once, to identify the model in a KV store", self.paths[0])
        digest = digest_of(self.paths)
        self.check()
        if began - max(max(found.st_mtime_ns, found.st_ctime_ns) for found in self._found) > SETTLED:
            with suppress(OSError):  # without a cache folder, the next process computes it again
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
        """The file that stores ``weights``."""
        name = repr((FORMAT, list(map(file_id, self._found)), self.header, self.pages))
        return cache_folder() / "weights" / hashlib.sha256(name.encode()).hexdigest()


def stats(paths: Sequence[str]) -> list[os.stat_result]:
    """Return the identities of files; InvalidInput when one is missing."""
    try:
        return [os.stat(path) for path in paths]
    except OSError as reason:
        raise error(lib.LCTX_INVALID, f"a file of the model is missing: {reason}") from None


def check_unchanged(paths: Sequence[str], before: Sequence[os.stat_result]) -> None:
    """Raise InvalidInput when a file was written or replaced."""
    for path, old, new in zip(paths, before, stats(paths), strict=True):
        if file_id(old) != file_id(new):
            reason = "changed after it was opened, so the weights in use are unknown; open it again"
            raise error(lib.LCTX_INVALID, f"{path} {reason}")


def digest_of(paths: Sequence[str]) -> str:
    """Return a digest of every byte of files; InvalidInput when one cannot be read."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
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
    """Yield offset and length of the sampled pages of a tensor: the first, the last, and others between them."""
    if end - start <= N_PAGES * PAGE:
        yield start, end - start
        return
    for i in range(N_PAGES):
        yield start + (end - start - PAGE) * i // (N_PAGES - 1), PAGE


def _quick(paths: Sequence[str], layouts: Sequence[FileLayout]) -> tuple[str, str]:
    """Return the digests of the headers and of sampled pages of all tensors."""
    header, data = hashlib.sha256(), hashlib.sha256()
    for path, layout in zip(paths, layouts, strict=True):
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            starts = sorted({*layout.starts.values()})
            if starts and starts[-1] > size:
                raise error(lib.LCTX_INVALID, f"{path} ends after {size} bytes, before its last tensor begins")
            header.update(file.read(min(layout.header, size)))
            data.update(size.to_bytes(8, "little"))
            for start, end in zip(starts, [*starts[1:], size], strict=False):  # the first one may have no tensors
                for offset, length in pages(start, end):
                    file.seek(offset)
                    data.update(file.read(length))
    return header.hexdigest(), data.hexdigest()
