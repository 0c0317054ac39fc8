"""What the catalogue knows of a model, wherever it comes from."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pylongctx._units import bytes_text

Progress = Callable[[int, int], None]
OFFLINE = (
    "Without a network use the embedded model: commands take it when no model is named, in Python it is "
    "pylongctx.models.embedded_model()"
)
LICENSES = {
    "Apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "Gemma": "https://ai.google.dev/gemma/terms",
    "Llama 3.1": "https://www.llama.com/llama3_1/license/",
    "Llama 3.2": "https://www.llama.com/llama3_2/license/",
}


@dataclass(frozen=True, kw_only=True)
class Entry(ABC):
    """A model with a name.

    Attributes
    ----------
    name : str
        What it is called in commands and as ``model_path``.
    file : str
        Its GGUF file.
    size : int
        Bytes of the file.
    sha256 : str
        Of the file, in hexadecimal.
    n_ctx_train : int
        Its trained context in tokens.
    license : str
        A key of ``LICENSES``.
    sampling : mapping
        How its authors advise to sample, and what keeps a small model from repeating itself: arguments of
        ``create_chat_completion`` that ``ask``, ``chat`` and ``serve`` begin with.
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
        """The site that it comes from."""

    @property
    @abstractmethod
    def source(self) -> str:
        """The packages or the repository on that site."""

    @abstractmethod
    def path(self) -> Path | None:
        """Return the file, or None when it is not here."""

    @abstractmethod
    def fetch(self, progress: Progress | None = None) -> Path:
        """Fetch the file, and return it once its sha256 is right; nothing is left of one that is not.

        Parameters
        ----------
        progress : callable or None
            Called as ``progress(n_done, n_total)``, in bytes.

        Raises
        ------
        ConnectionError
            When the site cannot be reached, or does not have the file.
        ValueError
            When something else came than the catalogue names.
        OSError
            When the file cannot be written.
        """

    @property
    def about(self) -> str:
        """Name, file, size, license and source in a line."""
        license = f"license {self.license} ({LICENSES[self.license]})"
        return f"{self.name}: {self.file}, {bytes_text(self.size)}, {license}, from {self.source} on {self.origin}"


def check_sha256(found: str, expected: str, what: str) -> None:
    """Raise ValueError unless a sha256 is the expected one."""
    if found != expected:
        raise ValueError(f"{what} is not what the catalogue names: its sha256 is {found}, not {expected}")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
