"""Entries of the catalogue, independent of their source."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pylongctx._units import bytes_text

Progress = Callable[[int, int], None]
OFFLINE = (
    "Without a network use the embedded model: it is the default of commands, and in Python it is "
    "pylongctx.models.embedded_model()"
)
LICENSES = {
    "Apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "Gemma": "https://ai.google.dev/gemma/terms",
    "Llama 3.1": "https://www.llama.com/llama3_1/license/",
    "Llama 3.2": "https://www.llama.com/llama3_2/license/",
}


@dataclass(frozen=True, kw_only=True)
class CatalogEntry(ABC):
    """A named model.

    Attributes
    ----------
    name : str
        Its name in commands and as ``model_path``.
    file : str
        Its GGUF file.
    size : int
        Bytes of the file.
    sha256 : str
        Digest of the file, in hexadecimal.
    n_ctx_train : int
        Its trained context in tokens.
    license : str
        A key of ``LICENSES``.
    sampling : mapping
        Sampling settings recommended by its authors, or against repetition of a small model: default arguments of
        ``create_chat_completion`` in ``ask``, ``chat`` and ``serve``.
    """

    name: str
    file: str
    size: int
    sha256: str
    n_ctx_train: int
    license: str
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    @abstractmethod
    def origin(self) -> str:
        """The site of its source."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The packages or the repository on that site."""

    @abstractmethod
    def path(self) -> Path | None:
        """Return the file, or None if it is not downloaded."""

    @abstractmethod
    def fetch(self, progress: Progress | None = None) -> Path:
        """Download the file, and return it after checking its sha256; a file with a wrong digest is removed.

        Parameters
        ----------
        progress : callable or None
            Called as ``progress(n_done, n_total)``, in bytes.

        Raises
        ------
        ConnectionError
            When the site cannot be reached, or the file is missing there.
        ValueError
            When the file does not match the catalogue.
        OSError
            When the file cannot be written.
        """

    @property
    def about(self) -> str:
        """Name, file, size, license and source in one line."""
        license = f"license {self.license} ({LICENSES[self.license]})"
        return f"{self.name}: {self.file}, {bytes_text(self.size)}, {license}, from {self.source} on {self.origin}"


def check_sha256(found: str, expected: str, what: str) -> None:
    """Raise ValueError unless a sha256 is the expected one."""
    if found != expected:
        raise ValueError(f"{what} does not match the catalogue: its sha256 is {found}, not {expected}")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
