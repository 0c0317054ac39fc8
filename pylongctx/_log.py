"""Log messages of the package, from the logger ``pylongctx``."""

import logging
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # Python 3.10 cannot subscript it at run time
    Handler = logging.StreamHandler[TextIO]
else:
    Handler = logging.StreamHandler

LOG = logging.getLogger("pylongctx")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"pylongctx: {level}{super().format(record)}"


class _Stderr(Handler):
    """Writes to the current ``sys.stderr``, which may have been replaced since the import."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show() -> None:
    """Write messages to stderr, unless the program has its own handlers."""
    if not LOG.hasHandlers():
        LOG.addHandler(_Stderr())
    if LOG.level == logging.NOTSET:
        LOG.setLevel(logging.INFO)
