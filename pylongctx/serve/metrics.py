"""GET /metrics: numbers for Prometheus."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pylongctx.serve.service import Service

TYPE = CONTENT_TYPE_LATEST


class Answers:
    """Counts answers by route and status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("route", "status")
        self._counter = Counter("pylongctx_http_requests", "Answers.", names, registry=self.registry)

    def add(self, route: str, status: int) -> None:
        """Count an answer."""
        self._counter.labels(route, str(status)).inc()


class _State(Collector):
    def __init__(self, service: "Service", kv: int) -> None:
        self._service = service
        self._kv = kv

    def collect(self) -> Iterator[Any]:
        engine, counters = self._service.engine, self._service.engine.counters
        for name, help, value in (
            ("prompt_tokens", "Tokens of prompts that were evaluated.", counters.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that were not evaluated again.", counters.cached_tokens),
            ("generated_tokens", "Tokens that were generated.", counters.generated_tokens),
            ("steps", "Batches that were evaluated.", counters.steps),
            ("busy_seconds", "Time in which batches were evaluated.", counters.busy_seconds),
            ("completed", "Completions that came to their end.", counters.completed),
            ("cancelled", "Completions whose client went away.", counters.cancelled),
            ("failed", "Completions that failed.", counters.failed),
        ):
            yield CounterMetricFamily(f"pylongctx_{name}", help, value)
        for name, help, value in (
            ("kv_bytes", "Bytes of KV memory in use.", self._kv),
            ("sequences", "Sequences of the context.", len(engine.slots)),
            ("sequences_busy", "Sequences with a completion.", engine.n_busy),
            ("completions_waiting", "Completions that wait for a sequence.", engine.n_waiting),
            ("requests_active", "Requests that run or wait.", self._service.n_requests),
        ):
            yield GaugeMetricFamily(f"pylongctx_{name}", help, value)


def page(service: "Service", kv: int) -> bytes:
    """Return the text for Prometheus."""
    state = CollectorRegistry()
    state.register(_State(service, kv))
    return b"".join(map(generate_latest, (state, service.answers.registry)))
