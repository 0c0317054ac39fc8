"""The models of a server of several models: files in folders, single files, and names of the catalogue."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pylongctx._lib import InvalidInput
from pylongctx.catalog import CATALOG
from pylongctx.model_files.gguf import SPLIT_NAME
from pylongctx.serve.cards import Card, card_of

FIRST_SHARD = re.compile(r"(.*)-00001-of-\d{5}\.gguf", re.DOTALL)
PROJECTOR = "mmproj"  # prefix of files with image projectors of other models


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded.

    Attributes
    ----------
    name : str
        Its name for clients.
    word : str
        Argument of ``pylongctx serve --model``: a path, or a name of the catalogue.
    """

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
    """The models of a server, searched again on every access.

    Parameters
    ----------
    words : sequence of str
        Folders, files and names.

    Raises
    ------
    ValueError
        When a word is invalid, or two models have the same name.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        found = [source for word in words for source in _sources(word)]
        if not found:
            raise ValueError(f"there is no .gguf file in {', '.join(words)}")
        names = [source.name for source in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two models are called {twice!r}: rename a file")

    def sources(self) -> dict[str, ModelSource]:
        """Return all models by name; the first one of those with the same name."""
        found: dict[str, ModelSource] = {}
        for word in self._words:
            for source in _sources(word):
                found.setdefault(source.name, source)
        return found


class OneModel:
    """A shelf of one model, which is used for any name in a request.

    Parameters
    ----------
    name : str
        Its name for clients.
    word : str
        See ``ModelSource``.
    """

    def __init__(self, name: str, word: str) -> None:
        self.only = ModelSource(name, word)

    def sources(self) -> dict[str, ModelSource]:
        """Return the model by its name."""
        return {self.only.name: self.only}


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
