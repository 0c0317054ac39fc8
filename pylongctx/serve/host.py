"""The model of a server: several sequences in one context."""

from typing import Any

from pylongctx._lib import lib
from pylongctx.chat.template import Templates
from pylongctx.engine.opening import Opened
from pylongctx.engine.session import Session
from pylongctx.llama import Llama
from pylongctx.methods import Method


class Host:
    """A model whose context has ``n_seq`` sequences of ``n_ctx`` tokens each.

    Parameters
    ----------
    model_path : str
        GGUF file.
    n_seq : int
        How many sequences.
    **arguments
        As of ``Llama``, with its defaults.

    Attributes
    ----------
    name : str
        The model's name in answers.
    """

    def __init__(self, model_path: str, n_seq: int, **arguments: Any) -> None:
        if n_seq < 1:
            raise ValueError(f"a server needs at least 1 sequence, not {n_seq}")
        defaults = Llama.__init__.__kwdefaults__ or {}
        if unknown := arguments.keys() - defaults.keys():
            raise TypeError(f"Llama has no argument {', '.join(sorted(unknown))}")
        given = {**defaults, **arguments, "model_path": model_path}
        self._opened = Opened(given, n_seq)
        self.n_seq = n_seq
        self.name = self.model_path = self._opened.path
        self.model = self._opened.model
        self.sessions = self._opened.sessions
        self.metadata = self.model.metadata()
        self.templates = Templates(self.model, given["chat_format"])
        self.seed: int = given["seed"]
        self.last_n_tokens_size: int = given["last_n_tokens_size"]
        if not self._opened.verbose:
            lib.lctx_log_set_level(0)  # llama.cpp calls it an error that a client went away; others become exceptions

    @property
    def session(self) -> Session:
        """The first sequence."""
        return self.sessions[0]

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return self.session.method

    @property
    def n_ctx(self) -> int:
        """The context window of a sequence in tokens."""
        return self.session.n_ctx

    def kv_bytes(self) -> int:
        """Return the bytes of KV memory in use, 0 with llama.cpp's own cache, which does not tell."""
        return self.session.context.kv_usage().bytes if self.method else 0

    def add_lora(self, path: str, scale: float = 1.0) -> None:
        """Use a LoRA adapter, before the first request."""
        self._opened.adapters.add(self.session, path, scale)

    def close(self) -> None:
        """Free model and context."""
        self._opened.close()
