"""A step that does not end: the server reports it, lets clients go, and ends on a signal."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from needs import need
from serving import PATIENCE, running

httpx = need("server", "fastapi", "httpx")

STALL = 0.3
BODY = '{"prompt": "It was", "max_tokens": 3}'
# a server whose first step takes longer than any client waits
ENDLESS = """
import sys, time
from pylongctx.cli import main
from pylongctx.engine.context import Context
Context.decode = lambda *args: time.sleep(1000)
sys.exit(main(["serve", "--port", "0", "-c", "512", "-t", "1", "--grace", "1", "--stall", "0.2"]))
"""


@pytest.fixture
def server():
    with running(n_seq=1, settings={"stall": STALL}) as server:
        yield server


@pytest.fixture
def stuck(server, monkeypatch):
    """Return a server whose steps end when it is released."""
    event, begun, decode = threading.Event(), threading.Event(), server.engine.context.decode

    def wait(*args):
        begun.set()
        assert event.wait(PATIENCE)
        return decode(*args)

    monkeypatch.setattr(server.engine.context, "decode", wait)
    server.release, server.begun = event.set, begun
    yield server
    event.set()


def post(server, then=lambda client: None):
    """Send a completion over a socket of its own."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), PATIENCE) as client:
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{BODY}".encode())
        then(client)


def test_health_fails_while_a_step_does_not_end(stuck):
    post(stuck, lambda client: stuck.begun.wait(PATIENCE))
    stuck.wait_for(lambda: stuck.http.get("/health").status_code == 503)
    assert "has made no progress" in stuck.http.get("/health").json()["error"]["message"]
    assert stuck.http.get("/v1/longctx").status_code == 503  # it does not wait for the engine either
    for path in ("/slots", "/metrics"):  # which tell what was before the step
        assert stuck.http.get(path).status_code == 200
    assert stuck.http.post("/completion", content=BODY, headers={"Content-Type": "application/json"}).status_code == 503
    stuck.release()
    stuck.wait_for(lambda: stuck.http.get("/health").status_code == 200)
    assert stuck.http.get("/slots").status_code == 200


def test_a_step_that_takes_long_is_not_a_reason_to_refuse(server, monkeypatch):
    """It computes: neither /health nor a request is refused, and /metrics has the last values."""
    decode, begun = server.engine.context.decode, threading.Event()

    def compute(*args):
        begun.set()
        end = time.monotonic() + 8 * STALL
        while time.monotonic() < end:
            sum(range(1000))
        return decode(*args)

    monkeypatch.setattr(server.engine.context, "decode", compute)
    answers = []
    asked = {"content": BODY, "headers": {"Content-Type": "application/json"}}
    both = [
        threading.Thread(target=lambda: answers.append(server.http.post("/completion", **asked).status_code))
        for _ in range(2)
    ]
    both[0].start()
    assert begun.wait(PATIENCE)
    both[1].start()
    for _ in range(20):
        assert server.http.get("/health").status_code == 200
        began = time.monotonic()
        metrics = server.http.get("/metrics")
        assert metrics.status_code == 200 and "pylongctx_kv_bytes" in metrics.text
        assert metrics.headers["process-start-time-unix"] == str(server.service.started)
        if time.monotonic() - began > STALL:
            continue  # another program had the processor
        time.sleep(STALL / 8)
    for one in both:
        one.join(PATIENCE)
    assert answers == [200, 200]


def test_a_server_that_has_nothing_to_do_is_well(server):
    from pylongctx.engine.job import Job
    from pylongctx.engine.sampling.params import SamplingParams
    from pylongctx.engine.sampling.sampler import Sampler

    model = server.host.model
    slow = Job(model.check_tokens([1, 5, 6]), Sampler(model, SamplingParams(seed=1, temp=0.0)), 60)
    server.engine.submit(slow)
    slow.take()  # and no more: the engine waits for its reader
    time.sleep(2 * STALL)
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.engine.n_busy == 1
    server.engine.cancel(slow)


def test_who_goes_away_is_not_held_by_a_step(stuck):
    post(stuck, lambda client: stuck.begun.wait(PATIENCE))
    began = time.monotonic()
    stuck.wait_for(lambda: stuck.service.n_requests == 0)
    assert time.monotonic() - began < 5
    assert stuck.engine.n_busy == 1  # the step has not ended
    stuck.release()
    stuck.wait_for(lambda: stuck.engine.n_busy == 0)
    assert stuck.http.get("/health").status_code == 200


def test_a_signal_ends_it_too():
    process = subprocess.Popen([sys.executable, "-c", ENDLESS], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "http://" in line)
        url = httpx.URL(line[line.index("http://") :].strip())
        while not _is_stuck(url):
            pass
        process.send_signal(signal.SIGTERM)
        assert "did not end in time" in process.communicate(timeout=30)[1]
        assert process.returncode == 1
    finally:
        process.kill()
        process.wait()


def _is_stuck(url):
    """Ask for an answer, and return whether the server says that it makes none."""
    with suppress(httpx.TimeoutException):
        httpx.post(f"{url}/completion", content=BODY, headers={"Content-Type": "application/json"}, timeout=0.5)
    return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503
