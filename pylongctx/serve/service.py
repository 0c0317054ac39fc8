"""What a server consists of, and its settings."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pylongctx import __version__
from pylongctx._lib import build_info
from pylongctx.completer import completion_defaults
from pylongctx.embeddings import RANK, Embedder
from pylongctx.engine.thread import EngineThread
from pylongctx.llama import Llama
from pylongctx.sampling import SamplingParams
from pylongctx.serve.errors import ApiError, unavailable
from pylongctx.serve.host import Host
from pylongctx.serve.metrics import Answers

Result = TypeVar("Result")
SOON = 0.02  # seconds that /metrics waits for the end of a step


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
        Origins of pages that may ask from a browser; ``localhost``: all of this machine, ``*``: all.
    hosts : tuple of str
        Names of this server beside those of the own machine and addresses; with ``*`` any.
    n_queue : int
        Requests that may wait for a sequence.
    n_predict : int or None
        Most tokens of an answer whose request does not say how many; None: the context.
    n_body : int
        Most bytes of a request.
    body_patience : float
        Seconds in which the body of a request must come, with one more for every 64 KiB.
    stall : float
        Seconds in which a step does not go on, after which the server says that it is not well.
    step : float
        Seconds of a step in which answers are written and prompts are evaluated; 0: no bound.
    patience : float or None
        Seconds without news after which a stream gets a comment; None: never.
    grace : float
        Seconds that running requests have when the server ends.
    slots : bool
        Whether /slots tells what the sequences do.
    page : bool
        Whether there is a chat page.
    slot_folder : Path or None
        Where sequences are saved; None: they are not.
    aliases : tuple of str
        More names of the model.
    tags : tuple of str
        What ``/v1/models`` tells of it beside its names.
    document_bytes : int
        Most bytes of the rows of documents.
    unknown_fields : str
        What happens to fields of requests that have no effect: ``warn``, ``ignore``, or ``refuse``.
    sampling : dict
        Values for what a request leaves out, by the names of Llama.
    spm_infill : bool
        Whether ``/infill`` writes the suffix before the prefix.
    template : dict
        The same for the template: ``enable_thinking``, ``chat_template_kwargs``.
    cache_prompt : bool
        Whether a request that does not say so uses what was evaluated before.
    prefills : bool
        Whether an answer goes on with a last message of the assistant, where a request does not say so.
    static_folder : Path or None
        Files that are served in place of the chat page.
    prefix : str
        Begins the paths of all routes.
    tls : tuple of str or None
        Files of a certificate and of its key; None: no TLS.
    """

    alias: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    n_queue: int = 64
    n_predict: int | None = None
    n_body: int = 64 << 20
    body_patience: float = 30.0
    stall: float = 120.0
    step: float = 0.15
    patience: float | None = 10.0
    grace: float = 10.0
    slots: bool = True
    page: bool = True
    slot_folder: Path | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    document_bytes: int = 2 << 30
    unknown_fields: str = "warn"
    spm_infill: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    cache_prompt: bool = True
    prefills: bool = True
    static_folder: Path | None = None
    prefix: str = ""
    tls: tuple[str, str] | None = None


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
        self.engine = EngineThread(host.sessions, host.library, settings.step or None)
        self.engine.documents.limit = settings.document_bytes
        self.started = int(time.time())
        self.answers = Answers()
        self._kv_bytes = 0
        self._counting: Future[int] | None = None
        self.is_stuck = False  # at the end: somebody still uses the model
        self.n_requests = 0  # that want tokens, waiting or running
        self.most_requests = host.n_seq + settings.n_queue
        self.pool = ThreadPoolExecutor(self.most_requests, "pylongctx-request")

    @cached_property
    def fingerprint(self) -> str:
        """What made an answer: OpenAI's ``system_fingerprint``."""
        return fingerprint()

    def prefills(self, asked: bool | None) -> bool:
        """Return whether an answer goes on with a last message of the assistant."""
        return self.settings.prefills if asked is None else asked

    def sampling_params(self) -> SamplingParams:
        """Return how tokens are chosen when a request says nothing."""
        known = {**completion_defaults(), **self.settings.sampling}
        given = {name: known[name] for name in SamplingParams.__dataclass_fields__ if name in known}
        given |= {"seed": self.host.seed, "penalty_last_n": self.host.last_n_tokens_size, "temp": known["temperature"]}
        return SamplingParams(**given | {"logit_bias": known["logit_bias"] or {}})

    def close(self) -> None:
        """End all requests and free the model, unless somebody still uses it after the time of grace."""
        self.is_stuck = not self.engine.close(self.settings.grace)
        ending = threading.Thread(target=self.pool.shutdown, daemon=True)
        ending.start()
        ending.join(self.settings.grace)
        self.is_stuck |= ending.is_alive()
        if self.is_stuck:
            return
        self.host.close()
        if self._vectors is not None:
            self._vectors.close()

    def check_engine(self) -> None:
        """Raise ApiError when the engine has failed, or has not taken a step for long with work waiting."""
        if self.engine.failure is not None:
            raise unavailable(f"the engine has failed, restart the server: {self.engine.failure}")
        if self.engine.stalled() > self.settings.stall:
            raise unavailable(f"the engine does not go on for {self.engine.stalled():.0f} s, with work waiting")

    async def between_steps(self, future: "Future[Result]") -> Result:
        """Wait for what the engine does between two steps; ApiError when its step does not go on."""
        waited = asyncio.wrap_future(future)
        while not (await asyncio.wait([waited], timeout=self.settings.stall / 2))[0]:
            self.check_engine()
        return waited.result()

    async def kv_bytes(self) -> int:
        """Return the bytes of the KV cache, as they were last seen when a step takes longer than ``SOON``."""
        if self._counting is None or self._counting.done():
            self._counting = self.engine.call(self.host.kv_bytes)
        await asyncio.wait([asyncio.wrap_future(self._counting)], timeout=SOON)
        if self._counting.done() and self._counting.exception() is None:
            self._kv_bytes = self._counting.result()
        return self._kv_bytes

    def admit(self) -> None:
        """Count a request that wants tokens; ApiError when too many wait. Must be followed by ``leave``."""
        self.check_engine()
        if self.n_requests >= self.most_requests:
            raise unavailable(f"{self.n_requests} requests run or wait, try again later (--queue allows more)")
        self.n_requests += 1

    def leave(self) -> None:
        """Count a request no more."""
        self.n_requests -= 1

    async def threaded(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns in a thread; who asks waits in the queue of requests."""
        with self.admitted():
            return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    def vectors(self) -> Embedder:
        """Return what makes embeddings; ApiError where nothing does."""
        if self.embedder is None or self.embedder.pooling == RANK:
            raise ApiError(501, "not_supported_error", "this server makes no embeddings: start it with --embeddings")
        return self.embedder

    def ranker(self) -> Embedder:
        """Return what judges documents; ApiError where nothing does."""
        if self.embedder is None or self.embedder.pooling != RANK:
            reason = "this server ranks no documents: start it with --reranking, and a model with a head for that"
            raise ApiError(501, "not_supported_error", reason)
        return self.embedder

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.admit()
        try:
            yield
        finally:
            self.leave()


def fingerprint() -> str:
    """Return which build this is."""
    return f"b{build_info()['series']}-pylongctx-{__version__}"
