"""What all readers share: the text of a file with notes, refusals, limits, and packages of the extra ``documents``."""

import importlib
from collections.abc import Collection
from typing import Any, NamedTuple

MAX_BYTES = 1 << 28  # of a file, and of what is unpacked from it
NAMED = 3  # names in a list, the others are counted
INSTALL = "install it with: pip install 'pylongctx[documents]'"


class Refused(ValueError):  # noqa: N818 - reads as what happened
    """A file that is not read; the message continues a sentence whose subject is the file."""


class Extract(NamedTuple):
    """The text of a file, and notes about what was not read."""

    text: str
    notes: tuple[str, ...] = ()


def package(module: str, name: str, files: str) -> Any:
    """Import a module of an optional package; ImportError says how to install the package."""
    try:
        return importlib.import_module(module)
    except ImportError as reason:
        raise ImportError(f"{files} need the package {name}: {INSTALL}") from reason


def listed(names: Collection[str]) -> str:
    """Return names with commas; after the first ones their number.

    Examples
    --------
    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    some = ", ".join(list(names)[:NAMED])
    return some if len(names) <= NAMED else f"{some} and {len(names) - NAMED} more"


def counted(n: int, one: str, many: str = "") -> str:
    """Return a number with its noun.

    Examples
    --------
    >>> counted(1, "page"), counted(2, "page")
    ('1 page', '2 pages')
    """
    return f"{n} {one if n == 1 else many or one + 's'}"
