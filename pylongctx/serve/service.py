"""What a server consists of, and its settings."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pylongctx.embeddings import Embedder
from pylongctx.engine.thread import EngineThread
from pylongctx.llama import Llama
from pylongctx.serve.errors import unavailable
from pylongctx.serve.host import Host
from pylongctx.serve.metrics import Answers


@dataclass(frozen=True)
class Settings:
    """How a server behaves.

    Attributes
    ----------
    alias : str
        The model's name for clients.
    api_keys : tuple of str
        Keys of which a client must send one; none: everybody may ask.
    cors_origins : tuple of str
        Origins of pages that may ask from a browser.
    n_queue : int
        Requests that may wait for a sequence.
    n_predict : int or None
        Most tokens of an answer, whatever the client asks for; None: the context.
    n_body : int
        Most bytes of a request.
    patience : float
        Seconds without news after which a stream gets a comment.
    grace : float
        Seconds that running requests have when the server ends.
    sampling : dict
        Values for what a request leaves out, by the names of Llama.
    template : dict
        The same for the template: ``enable_thinking``, ``chat_template_kwargs``.
    """

    alias: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    n_queue: int = 64
    n_predict: int | None = None
    n_body: int = 64 << 20
    patience: float = 10.0
    grace: float = 10.0
    sampling: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)


class Service:
    """A model, the engine that runs it, and the threads that wait for it.

    Parameters
    ----------
    host : Host
        The model.
    settings : Settings
        How to behave.
    embedder : Llama or None
        The same file, opened for embeddings.
    """

    def __init__(self, host: Host, settings: Settings, embedder: Llama | None = None) -> None:
        self.host = host
        self.settings = settings
        self._vectors = embedder
        self.embedder = None if embedder is None else Embedder(embedder.session)
        self.engine = EngineThread(host.sessions)
        self.started = int(time.time())
        self.answers = Answers()
        self.n_requests = 0  # that want tokens, waiting or running
        self.most_requests = host.n_seq + settings.n_queue
        self.pool = ThreadPoolExecutor(self.most_requests, "pylongctx-request")

    def close(self) -> None:
        """End all requests and free the model."""
        self.engine.close()
        self.pool.shutdown()
        self.host.close()
        if self._vectors is not None:
            self._vectors.close()

    def admit(self) -> None:
        """Count a request that wants tokens; ApiError when too many wait. Must be followed by ``leave``."""
        if self.engine.failure is not None:
            raise unavailable(f"the engine has failed, restart the server: {self.engine.failure}")
        if self.n_requests >= self.most_requests:
            raise unavailable(f"{self.n_requests} requests run or wait, try again later (--queue allows more)")
        self.n_requests += 1

    def leave(self) -> None:
        """Count a request no more."""
        self.n_requests -= 1

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.admit()
        try:
            yield
        finally:
            self.leave()
