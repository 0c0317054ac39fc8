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
    """A named model."""

    name: str  # in commands and as ``model_path``
    file: str
    size: int  # bytes of the file
    sha256: str
    n_ctx_train: int
    license: str  # a key of ``LICENSES``
    # What its authors recommend, or what keeps a small model from repeating itself: the default arguments of
    # ``create_chat_completion`` in ``ask``, ``chat`` and ``serve``.
    sampling: Mapping[str, float] = field(default_factory=dict)
    # Commands choose among models with a rank when none is named: 1 invents answers about a text, higher ones answer
    # better. 0 is only used by name.
    rank: int = 0
    kv_bytes: int = 0  # of K and V for a token, in f16

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

        ``progress`` is called with the bytes done and their total. Raises ConnectionError when the site cannot be
        reached or lacks the file, ValueError when the file does not match the catalogue, and OSError when it cannot be
        written.
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
