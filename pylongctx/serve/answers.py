"""How many answers were given."""

from prometheus_client import CollectorRegistry, Counter


class Requests:
    """Counts answers by route and status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("route", "status")
        self._counter = Counter("pylongctx_http_requests", "Answers.", names, registry=self.registry)

    def add(self, route: str, status: int) -> None:
        """Count an answer."""
        self._counter.labels(route, str(status)).inc()
