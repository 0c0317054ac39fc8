"""A server in a thread of the test process, and its clients."""

import threading
import time
from contextlib import contextmanager

from pylongctx.models import embedded_model

ALIAS = "tiny"
DEFAULTS = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PATIENCE = 60.0  # seconds that a test waits before it fails


class Running:
    """A service that listens on a free port of this machine.

    Attributes
    ----------
    client : openai.OpenAI
        The real client.
    http : httpx.Client
        For what OpenAI does not have.
    """

    def __init__(self, service):
        import httpx
        import openai

        from pylongctx.serve.app import create_app
        from pylongctx.serve.server import listen, make_server

        listener = listen("127.0.0.1", 0)
        self.service, self.engine, self.host = service, service.engine, service.host
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = make_server(create_app(service), service.settings)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()
        key = (*service.settings.api_keys, "none")[0]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def close(self):
        self.client.close()
        self.http.close()
        self.server.should_exit = True
        self.thread.join()

    def ask(self, function):
        """Return what a function finds between two steps of the engine."""
        return self.engine.call(function).result(PATIENCE)

    def wait_for(self, condition):
        """Wait until a condition holds; a round trip to the server paces the question."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "waited too long"
            self.http.get("/health")

    def erase(self):
        """Forget all sequences, as between two tests."""
        for one in [self.engine.erase(slot.id, slot.session.owner) for slot in self.engine.slots if slot.job is None]:
            one.result(PATIENCE)

    @contextmanager
    def held(self):
        """Stop the engine between two steps while the block runs, or until ``release``."""
        event = threading.Event()
        self.release = event.set
        self.engine.call(lambda: event.wait(PATIENCE))
        try:
            yield
        finally:
            event.set()

    def metric(self, name):
        """Return a number of /metrics."""
        lines = dict(line.rsplit(" ", 1) for line in self.http.get("/metrics").text.splitlines() if line[0] != "#")
        return float(lines[f"pylongctx_{name}"])


@contextmanager
def running(n_seq=2, embedder=None, settings=(), path=None, **arguments):
    """Open a model and serve it while the block runs."""
    from pylongctx.parallel import Host
    from pylongctx.serve.service import Service, Settings

    host = Host(str(path or embedded_model()), n_seq, **DEFAULTS | arguments)
    server = Running(Service(host, Settings(**{"alias": ALIAS, "grace": 1.0} | dict(settings)), embedder))
    try:
        yield server
    finally:
        server.close()


def poster(server):
    """Return a function that posts to the server, whose sequences are empty, and checks the status."""
    server.erase()

    def post(path, status=200, **body):
        response = server.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    return post


def forced(server, monkeypatch, text):
    """Let the model say a text and end, whatever it is asked."""
    from pylongctx.engine.job import Job

    wanted = [*server.host.model.tokenize(text.encode(), False, True), server.host.model.info.token_eos]

    def choose(self, tokens, row):
        return wanted[self.n_generated]

    monkeypatch.setattr(Job, "choose", choose)


def events(response):
    """Yield the objects of a stream of server-sent events, up to its end."""
    import json

    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def stream(server, path="/completion", **body):
    """Return the events of a stream of llama-server's own routes."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        return list(events(response))
