"""A server whose layers are on other machines outlives them: requests get an error that says which one was lost."""

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager

from needs import need
from test_devices import reserved_port, worker

httpx = need("server", "fastapi", "httpx")

PATIENCE = 120.0


@contextmanager
def serving(model, *options):
    """Run a server in a process; yields a client of it, and the process."""
    command = [
        sys.executable,
        "-m",
        "pylongctx",
        "serve",
        str(model),
        "--port",
        "0",
        "-c",
        "512",
        "-np",
        "2",
        "-t",
        "1",
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "http://" in line)
        url = line[line.index("http://") :].strip()
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            yield client, process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def complete(client, n=2):
    return client.post("/completion", json={"prompt": "It was", "n_predict": n, "temperature": 0})


def test_a_worker_that_ends_in_the_middle_of_an_answer(embedded_model):
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(2)]
        workers = [stack.enter_context(worker(port)) for port in ports]
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        client, process = stack.enter_context(serving(embedded_model, "--rpc", ",".join(endpoints), "-ngl", "99"))
        before = complete(client).json()["content"]

        body = {"prompt": "It was", "n_predict": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/completion", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            workers[1].kill()
            workers[1].wait()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        (error,) = [event["error"] for event in events if "error" in event]
        assert endpoints[1] in error["message"] and endpoints[0] not in error["message"]

        refused = complete(client)  # the worker is not back yet
        assert refused.status_code in (500, 502, 503), refused.text
        texts = [refused.text, *(complete(client).text for _ in range(2))]  # one may meet the process that is ending
        assert any(endpoints[1] in one for one in texts), texts
        assert client.get("/health").json() == {"status": "ok"} and process.poll() is None

        stack.enter_context(worker(ports[1]))
        again = complete(client)
        if again.status_code == 502:  # it met the process that was about to end, and says so
            assert "the next request starts it again" in again.text
            again = complete(client)
        assert again.status_code == 200, again.text
        assert again.json()["content"] == before
        assert client.post("/completion", json={"model": "any", "prompt": "a", "n_predict": 1}).status_code == 200
        assert len(client.get("/v1/models").json()["data"]) == 1
        assert len(client.get("/slots").json()) == 2
