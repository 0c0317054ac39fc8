"""A server of several models in a thread of the test process, whose models are processes."""

import asyncio
import threading
import time
from contextlib import contextmanager

from serving import PATIENCE

WORDS = ("-c", "512", "-t", "1", "-np", "1", "--grace", "5")


class Routing:
    """A server of several models that listens on a free port of this machine.

    Attributes
    ----------
    http : httpx.Client
        Its client.
    router : Router
        The server's parts.
    """

    def __init__(self, words, settings, limits, options, autoload, only):
        import httpx

        from pylongctx.serve.children import Children, Limits, OneModel, Shelf
        from pylongctx.serve.router import Router, create_app
        from pylongctx.serve.server import listen, make_server
        from pylongctx.serve.service import Settings

        settings = Settings(alias="none", **{"grace": 5.0} | dict(settings))
        children = Children([*WORDS, *options], Limits(**limits), settings.api_keys, settings.slot_folder)
        shelf = Shelf([str(word) for word in words]) if only is None else OneModel(only, str(words[0]))
        self.router = Router(shelf, children, settings, autoload)
        self.children = children
        listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = make_server(create_app(self.router), settings)
        self.thread = threading.Thread(target=self._run, args=(listener,))
        self.thread.start()
        headers = {"Authorization": f"Bearer {settings.api_keys[0]}"} if settings.api_keys else {}
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, headers=headers)

    def _run(self, listener):
        async def serve():
            self.loop = asyncio.get_running_loop()
            await self.server.serve([listener])

        asyncio.run(serve())

    def close(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join()

    def status(self):
        """Return what each model's process does."""
        return {model["id"]: model["status"]["value"] for model in self.http.get("/v1/models").json()["data"]}

    def loaded(self):
        return {name for name, value in self.status().items() if value == "loaded"}

    def complete(self, model, status=200, **more):
        body = {"model": model, "prompt": "It was", "max_tokens": 4, "temperature": 0} | more
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == status, response.text
        return response.json()

    def child(self, name):
        """Return the process of a model."""
        return self.children.of(self.router.source(name))

    def until(self, condition):
        """Wait until a condition holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)


@contextmanager
def routing(*words, settings=(), options=(), autoload=True, only=None, **limits):
    """Serve several models while the block runs; ``limits`` are those of ``Limits``, ``options`` of every process.

    ``only`` is the name of the only model, for any name in requests.
    """
    server = Routing(words, settings, {"grace": 5.0} | limits, options, autoload, only)
    try:
        yield server
    finally:
        server.close()
