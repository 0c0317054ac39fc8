"""The parts of a server, and its settings."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pylongctx import __version__
from pylongctx._free import free_bytes
from pylongctx._lib import build_info
from pylongctx.completions.embeddings import RANK, Embedder
from pylongctx.completions.request import FIELDS
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.thread import EngineThread
from pylongctx.llama import Llama
from pylongctx.parallel import Host
from pylongctx.serve.errors import ApiError, unavailable
from pylongctx.serve.metrics import Answers
from pylongctx.serve.streams import Streams

Given = ParamSpec("Given")
Result = TypeVar("Result")
MOST_PARKED = 8 << 30  # default of parked sequences: this, or a fraction of the free memory if that is less
PARKED_SHARE = 0.25
SOON = 0.02  # maximum wait of /metrics for the end of a step, in seconds


@dataclass(frozen=True)
class Settings:
    """The settings of a server; ``pylongctx serve --help`` explains the options that set them."""

    alias: str
    aliases: tuple[str, ...] = ()  # additional names of the model
    tags: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()  # empty: no key is needed
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # in addition to the names of the machine and addresses
    n_queue: int = 64
    n_predict: int | None = None
    n_body: int = 64 << 20  # maximum bytes of a request
    body_patience: float = 30.0  # seconds to receive the body of a request, plus one for every 64 KiB
    document_bytes: int = 2 << 30
    parked_bytes: int | None = 0  # of sequences that lost their slots; None: by the free memory
    stall: float = 120.0
    step: float = 0.15  # seconds; 0: no limit
    patience: float | None = 10.0  # idle seconds after which a stream sends a comment; None: never
    grace: float = 10.0
    rejoin: float = 300.0  # seconds that a stream with X-Conversation-Id is kept without a reader; 0: none is
    slots: bool = True
    slot_folder: Path | None = None
    unknown_fields: str = "warn"
    unknown_content: str = "note"
    sampling: dict[str, Any] = field(default_factory=dict)  # defaults of requests, by the names of Llama
    template: dict[str, Any] = field(default_factory=dict)  # defaults: enable_thinking, chat_template_kwargs
    spm_infill: bool = False
    cache_prompt: bool = True
    prefills: bool = True  # whether answers continue a last message of the assistant
    page: bool = True
    static_folder: Path | None = None  # files to serve instead of the page
    prefix: str = ""  # of the paths of all routes
    tls: tuple[str, str] | None = None  # files of the certificate and its key


class Service:
    """A model, the engine that runs it, and the threads that wait for it; ``embedder`` is the model for embeddings."""

    def __init__(self, host: Host, settings: Settings, embedder: Llama | None = None) -> None:
        self.host = host
        self.settings = settings
        self._vectors = embedder
        self.embedder = None if embedder is None else Embedder(embedder.session)
        self.engine = EngineThread(host.sessions, host.library, settings.step or None, _parked_bytes(host, settings))
        self.engine.documents.limit = settings.document_bytes
        self.started = int(time.time())
        self.answers = Answers()
        self._kv_bytes = 0
        self._counting: Future[int] | None = None
        self.is_stuck = False  # at the end: the model is still in use
        self.n_requests = 0  # requests for tokens, waiting or running
        self.most_requests = host.n_seq + settings.n_queue
        self.streams = Streams(settings.rejoin)
        self.pool = ThreadPoolExecutor(self.most_requests, "pylongctx-request")

    @cached_property
    def fingerprint(self) -> str:
        """The build that generates answers: OpenAI's ``system_fingerprint``."""
        return fingerprint()

    def prefills(self, asked: bool | None) -> bool:
        """Return whether an answer continues a last message of the assistant."""
        return self.settings.prefills if asked is None else asked

    def sampling_params(self) -> SamplingParams:
        """Return the default sampling settings of requests."""
        given = self.settings.sampling
        return SamplingParams(
            seed=self.host.seed,
            penalty_last_n=self.host.last_n_tokens_size,
            logit_bias=given.get("logit_bias") or {},
            **{field: given[name] for name, field in FIELDS.items() if name in given},
        )

    def close(self) -> None:
        """End all requests and free the model, unless it is still in use after the grace period."""
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
        """Raise ApiError when the engine has failed, or made no progress for too long."""
        if self.engine.failure is not None:
            raise unavailable(f"the engine has failed, restart the server: {self.engine.failure}")
        if self.engine.stalled() > self.settings.stall:
            raise unavailable(f"the engine has made no progress for {self.engine.stalled():.0f} s")

    async def between_steps(self, future: "Future[Result]") -> Result:
        """Wait for a function between two steps of the engine; ApiError when its step makes no progress."""
        waited = asyncio.wrap_future(future)
        while not (await asyncio.wait([waited], timeout=self.settings.stall / 2))[0]:
            self.check_engine()
        return waited.result()

    async def kv_bytes(self) -> int:
        """Return the bytes of the KV cache, or the last known value if a step takes longer than ``SOON``."""
        if self._counting is None or self._counting.done():
            self._counting = self.engine.call(self.host.kv_bytes)
        await asyncio.wait([asyncio.wrap_future(self._counting)], timeout=SOON)
        if self._counting.done() and self._counting.exception() is None:
            self._kv_bytes = self._counting.result()
        return self._kv_bytes

    def admit(self) -> None:
        """Count a request for tokens; ApiError when too many wait. Must be followed by ``leave``."""
        self.check_engine()
        if self.n_requests >= self.most_requests:
            raise unavailable(
                f"{self.n_requests} requests are running or waiting, try again later (--queue sets the limit)"
            )
        self.n_requests += 1

    def leave(self) -> None:
        """Stop counting a request."""
        self.n_requests -= 1

    async def threaded(self, function: Callable[Given, Result], *args: Given.args, **options: Given.kwargs) -> Result:
        """Run a function in a thread and return its result; the call counts as a waiting request."""
        with self.admitted():
            return await self.in_thread(function, *args, **options)

    async def in_thread(self, function: Callable[Given, Result], *args: Given.args, **options: Given.kwargs) -> Result:
        """Run a function in a thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, partial(function, *args, **options))

    def vectors(self) -> Embedder:
        """Return the model for embeddings; ApiError when there is none."""
        if self.embedder is None or self.embedder.pooling == RANK:
            raise ApiError(
                501, "not_supported_error", "this server does not serve embeddings: start it with --embeddings"
            )
        return self.embedder

    def ranker(self) -> Embedder:
        """Return the model for reranking; ApiError when there is none."""
        if self.embedder is None or self.embedder.pooling != RANK:
            reason = "this server does not rerank documents: start it with --reranking and a model for it"
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


def _parked_bytes(host: Host, settings: Settings) -> int:
    """Return the limit of parked sequences; the free memory is counted without a model that is mapped but not read."""
    if settings.parked_bytes is not None:
        return settings.parked_bytes
    room = free_bytes() - host.model.info.size * (1 - host.share_on_devices)
    return max(0, min(MOST_PARKED, int(PARKED_SHARE * room)))


def fingerprint() -> str:
    """Return the build."""
    return f"b{build_info()['series']}-pylongctx-{__version__}"
