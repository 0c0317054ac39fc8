"""Reading files of many kinds as text, and all files of a folder."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pylongctx._log import LOG
from pylongctx.readers.extract import MAX_BYTES, Extract, Refused, listed
from pylongctx.readers.kinds import HEAD, TEXT, check_head, kind_of

MAX_FILES = 1000  # with text, in a folder


@dataclass(frozen=True)
class FileText:
    """The text of a file."""

    name: str  # as given
    text: str
    notes: tuple[str, ...] = ()  # how it was read, and what was left out

    @property
    def framed(self) -> str:
        """The text with a header line for a prompt; unchanged without a name."""
        return f"--- File: {self.name} ---\n{self.text}\n" if self.name else f"{self.text}\n"


def read_file(name: str | Path) -> FileText:
    """Return the text of a file, without the markup of HTML, e-mail and the like.

    Raises ValueError when it cannot be read as text or has none, ImportError when the package for its kind is not
    installed, and OSError when it cannot be opened.
    """
    return text_of(_bytes(Path(name).expanduser()), str(name))


def plain_text(name: str | Path) -> str:
    """Return the text of a file; of one that is a text as it stands, with its markup. Notes become warnings.

    Raises what ``read_file`` raises.
    """
    return without_notes(text_of(_bytes(Path(name).expanduser()), str(name), markup=True))


def without_notes(file: FileText) -> str:
    """Return the text of a file; notes about how it was read become warnings."""
    for note in file.notes:
        LOG.warning("%s: %s", file.name, note)
    return file.text


def text_of(data: bytes, name: str, markup: bool = False) -> FileText:
    """Return the text in the bytes of a file, see ``read_file``; ``markup`` keeps the markup of text files."""
    title = name or "standard input"
    try:
        return FileText(name, *_extract(data, name, markup))
    except Refused as reason:
        raise ValueError(f"{title} {reason}") from reason


def read_all(names: Iterable[str]) -> tuple[list[FileText], list[str]]:
    """Return the texts of files and of all files in folders, and notes about files in folders that were left out.

    Raises ValueError when a folder has no text or too many, and what ``read_file`` raises for a file that is named.
    """
    files: list[FileText] = []
    left_out: list[str] = []
    for name in names:
        if Path(name).expanduser().is_dir():
            found, lines = _read_folder(name)
            files += found
            left_out += [f"left out of {name}: {line}" for line in lines]
        else:
            files.append(read_file(name))
    return files, left_out


def _extract(data: bytes, name: str, markup: bool) -> Extract:
    kind = kind_of(data, name)
    if kind.is_markup and markup:
        kind = TEXT
    try:
        found = kind.read(data)
    except (Refused, ImportError, MemoryError):
        raise
    except Exception as reason:  # parsers of untrusted bytes raise what they meet in damaged ones
        raise Refused(f"is damaged ({kind.title}: {reason}): copy, save or download it again") from reason
    if kind is not TEXT and not found.text.strip():
        raise Refused(f"has no text ({kind.title})")
    return found


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes: name a part of it")
    return data


# ---- folders ----


def _read_folder(name: str) -> tuple[list[FileText], list[str]]:
    """Return the texts in a folder in the order of their paths, and a line for every reason why others are left out."""
    folder = Path(name).expanduser()
    found: list[FileText] = []
    left_out: dict[str, list[str]] = {}
    for path in _paths(folder):
        try:
            found.append(_read_in_folder(path, folder))
        except (ValueError, ImportError, OSError) as reason:
            why = _why(reason).removeprefix(f"{path} ")
            left_out.setdefault(why, []).append(str(path.relative_to(folder)))
    lines = [f"{listed(paths)}{'' if len(paths) == 1 else ': each'} {why}" for why, paths in left_out.items()]
    if not found:
        raise ValueError("; ".join([f"there is no text file in the folder {name}", *lines]))
    if len(found) > MAX_FILES:
        raise ValueError(f"the folder {name} has {len(found)} text files, more than {MAX_FILES}: name some of them")
    return found, lines


def _why(reason: Exception) -> str:
    """Return why a file is left out as a sentence whose subject is the file."""
    if isinstance(reason, OSError):
        return f"cannot be opened: {reason.strerror or reason}"
    return f"is not read, as {reason}" if isinstance(reason, ImportError) else str(reason)


def _read_in_folder(path: Path, folder: Path) -> FileText:
    if any(part.startswith(".") for part in path.relative_to(folder).parts):
        raise Refused("is hidden")
    if path.is_dir():
        raise Refused("is a link to a folder, or a folder that cannot be opened")
    if not path.is_file():
        raise Refused("is not a regular file")
    with path.open("rb") as file:
        head = file.read(HEAD)
    if not head:
        raise Refused("is empty")
    check_head(head)  # without reading films to the end
    return read_file(path)


def _paths(folder: Path) -> list[Path]:
    """Return the files in a folder, and folders that are not entered, in their order."""
    paths: list[Path] = []

    def keep(error: OSError) -> None:
        paths.append(Path(error.filename))

    for place, folders, names in os.walk(folder, onerror=keep):
        closed = [one for one in folders if one.startswith(".") or (Path(place) / one).is_symlink()]
        paths += [Path(place) / one for one in (*closed, *names)]
        folders[:] = [one for one in folders if one not in closed]
    return sorted(paths)
