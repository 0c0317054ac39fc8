"""The model of a server: a Llama whose context has several sequences."""

from typing import Any

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

    def _open(self, settings: dict[str, Any], spec: str) -> Session:
        return super()._open(settings | {"n_seq_max": self.n_seq}, spec)

    @property
    def session(self) -> Session:
        """The first sequence."""
        return self._session

    @property
    def chunked(self) -> LongHeads | None:
        """The part of the method that reads chunks."""
        parts = self.method.parts if self.method else ()
        return next((part for part in parts if isinstance(part, LongHeads)), None)
