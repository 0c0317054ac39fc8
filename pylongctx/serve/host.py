"""The model of a server: a Llama whose context has several sequences."""

from typing import Any

from pylongctx._lib import lib
from pylongctx._session import Session
from pylongctx.llama import Llama
from pylongctx.methods import LongHeads


class Host(Llama):
    """A Llama whose context has ``n_seq`` sequences of ``n_ctx`` tokens each; other arguments are those of Llama."""

    def __init__(self, model_path: str, n_seq: int, **arguments: Any) -> None:
        if n_seq < 1:
            raise ValueError(f"a server needs at least 1 sequence, not {n_seq}")
        self.n_seq = n_seq
        super().__init__(model_path, **arguments)
        if not self.verbose:
            lib.lctx_log_set_level(0)  # llama.cpp calls it an error that a client went away; others become exceptions

    def _settings(self, given: dict[str, Any], threads: tuple[int, int]) -> dict[str, Any]:
        return super()._settings(given, threads) | {"n_seq_max": self.n_seq}

    @property
    def session(self) -> Session:
        """The first sequence."""
        return self._session

    @property
    def chunked(self) -> LongHeads | None:
        """The part of the method that reads chunks."""
        parts = self.method.parts if self.method else ()
        return next((part for part in parts if isinstance(part, LongHeads)), None)
