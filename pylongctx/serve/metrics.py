"""GET /metrics: metrics for Prometheus."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from pylongctx.engine.job import Job
from pylongctx.store import KVStore

if TYPE_CHECKING:
    from pylongctx.serve.service import Service

Row = tuple[str, str, str, float]  # kind, name, description and value of a metric
TYPE = CONTENT_TYPE_LATEST
SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")  # a line of the text format
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # histogram buckets
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Answers:
    """Counts answers by route and status, and measures the time of answers and tokens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("route", "status")
        self._counter = Counter("pylongctx_http_requests", "Answers.", names, registry=self.registry)
        self._latency = self._histogram("http_request_seconds", "Time of an answer.", SECONDS, "route")
        self._first = self._histogram(
            "time_to_first_token_seconds", "Time from the request to its first token.", SECONDS
        )
        self._token = self._histogram(
            "time_per_output_token_seconds", "Mean time per token of an answer, without the first.", PER_TOKEN
        )
        self._waited = self._histogram("queue_seconds", "Time from the request to the start of its prefill.", SECONDS)

    def add(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._counter.labels(route, str(status)).inc()
        if status:
            self._latency.labels(route).observe(seconds)

    def add_job(self, job: Job) -> None:
        """Count a finished completion."""
        if not (job.started_at and job.prefilled_at and job.n_generated):
            return
        self._waited.observe(max(0.0, job.started_at - job.created_at))
        self._first.observe(max(0.0, job.prefilled_at - job.created_at))
        if job.n_generated > 1 and job.ended_at:
            self._token.observe((job.ended_at - job.prefilled_at) / (job.n_generated - 1))

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"pylongctx_{name}", help, labels, registry=self.registry, buckets=buckets)


def _own(service: "Service", kv: int) -> Iterator[Row]:
    """Yield the metrics of the engine and the store."""
    engine, counters = service.engine, service.engine.counters
    for name, help, value in (
        ("prompt_tokens", "Prompt tokens that were evaluated.", counters.prompt_tokens),
        ("cached_tokens", "Prompt tokens that were reused from a cache.", counters.cached_tokens),
        ("generated_tokens", "Tokens that were generated.", counters.generated_tokens),
        ("dropped_tokens", "Tokens that were dropped because they did not fit.", counters.dropped_tokens),
        ("steps", "Batches that were evaluated.", counters.steps),
        ("busy_seconds", "Time of the evaluation of batches.", counters.busy_seconds),
        ("completed", "Completions that ended normally.", counters.completed),
        ("cancelled", "Completions whose client disconnected.", counters.cancelled),
        ("failed", "Completions that failed.", counters.failed),
        *_store(service.host.store),
    ):
        yield "counter", f"{name}_total", help, value
    yield "gauge", "kv_bytes", "Bytes of KV memory in use.", kv
    yield "gauge", "document_bytes", "Bytes of prefilled documents.", engine.documents.bytes
    yield "gauge", "parked_bytes", "Bytes of sequences that lost their slots.", engine.parked.n_bytes
    yield "gauge", "sequences", "Sequences of the context.", len(engine.slots)
    yield "gauge", "sequences_busy", "Sequences with a completion.", engine.n_busy
    yield "gauge", "completions_waiting", "Completions waiting for a sequence.", engine.n_waiting
    yield "gauge", "requests_active", "Running and waiting requests.", service.n_requests


def _store(store: KVStore | None) -> list[tuple[str, str, float]]:
    """Return the metrics of the KV store: names, descriptions and values."""
    if store is None:
        return []
    usage = store.usage
    return [
        ("kv_store_hits", "Prompts with a prefix from the KV store.", usage.hits),
        ("kv_store_misses", "Prompts without a prefix in the KV store.", usage.misses),
        ("kv_store_tokens", "Tokens loaded from the KV store.", usage.tokens),
        ("kv_store_read_bytes", "Bytes read from the KV store.", usage.bytes_read),
        ("kv_store_written_bytes", "Bytes written to the KV store.", usage.bytes_written),
        ("kv_store_saved_seconds", "Time saved by tokens from the KV store.", usage.seconds_saved),
        ("kv_store_lost_blocks", "Blocks that were damaged, unreadable or not written.", usage.lost),
    ]


def page(service: "Service", kv: int) -> bytes:
    """Return the metrics in Prometheus' text format."""
    own, theirs = _lines("pylongctx_", _own(service, kv)), _lines("llamacpp:", _as_llama_server(service))
    return own + generate_latest(service.answers.registry) + theirs


def _lines(prefix: str, rows: Iterable[Row]) -> bytes:
    """Return metrics as text; the client library would change some of llama-server's names."""
    names = ((kind, prefix + name, help, value) for kind, name, help, value in rows)
    return "".join(f"# HELP {n} {help}\n# TYPE {n} {kind}\n{n} {value}\n" for kind, n, help, value in names).encode()


def _as_llama_server(service: "Service") -> Iterator[Row]:
    """Yield the metrics that llama-server has."""
    engine, counters = service.engine, service.engine.counters
    prompts = _rate(counters.prompt_tokens, counters.prompt_seconds)
    answers = _rate(counters.generated_tokens - counters.completed, counters.answer_seconds)  # without first tokens
    yield "counter", "prompt_tokens_total", "Prompt tokens that were evaluated.", counters.prompt_tokens
    yield "counter", "prompt_tokens_cached_total", "Prompt tokens that were cached.", counters.cached_tokens
    yield "counter", "prompt_seconds_total", "Time of prefills.", counters.prompt_seconds
    yield "counter", "tokens_predicted_total", "Tokens that were generated.", counters.generated_tokens
    yield "counter", "tokens_predicted_seconds_total", "Time of answers.", counters.answer_seconds
    yield "counter", "n_decode_total", "Batches that were evaluated.", counters.steps
    yield "counter", "n_tokens_max", "Maximum tokens of a sequence.", counters.longest
    drafted, accepted = counters.drafted_tokens, counters.accepted_tokens
    yield "counter", "spec_decode_num_draft_tokens_total", "Draft tokens that were evaluated.", drafted
    yield "counter", "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted.", accepted
    yield "counter", "spec_decode_num_drafts_total", "Drafts.", counters.drafts
    yield "gauge", "prompt_tokens_seconds", "Prompt tokens per second.", prompts
    yield "gauge", "predicted_tokens_seconds", "Generated tokens per second.", answers
    yield "gauge", "requests_processing", "Running completions.", engine.n_busy
    yield "gauge", "requests_deferred", "Waiting completions.", engine.n_waiting
    yield "gauge", "n_busy_slots_per_decode", "Sequences in a batch.", _rate(counters.sequences, counters.steps)


def _rate(n: float, of: float) -> float:
    return max(0.0, n / of) if of else 0.0


def merged(answers: Answers, pages: Mapping[str, str]) -> str:
    """Merge the metrics of several servers, labeled by model, with the unlabeled ones of the router."""
    families: dict[str, list[str]] = {}
    for model, page in {"": generate_latest(answers.registry).decode(), **pages}.items():
        family: list[str] = []
        for line in page.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line.split(" ", 3)[2], [])
                family += [] if line in family else [line]
            elif found := SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (f"model={_quoted(model)}", found[2])))
                family.append(f"{found[1]}{{{labels}}} {found[3]}")
    return "\n".join(line for family in families.values() for line in family) + "\n"


def _quoted(text: str) -> str:
    """Return a text escaped as the value of a label."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
