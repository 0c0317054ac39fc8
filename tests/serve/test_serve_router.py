"""A server of several models, each in a process of its own."""

import gzip
import json
import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest
from conftest import BASE
from needs import need
from routing import routing
from serving import events, running
from tiny_gguf import make_model

httpx = need("server", "fastapi", "ollama", "httpx")

ENDLESS = {"max_tokens": 400, "logit_bias": {"2": -100.0}, "stream": True}  # ends with the context
ASKED = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module")
def folder(embedded_model, tmp_path_factory):
    """Return a folder of three models, two of them the same."""
    path = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copy(embedded_model, path / f"{name}.gguf")
    make_model(path / "three.gguf", BASE, seed=3)
    (path / "mmproj-one.gguf").write_bytes(b"")
    (path / "notes.txt").write_text("no model")
    return path


@pytest.fixture(scope="module")
def server(folder):
    with routing(folder, n=2) as server:
        yield server


def stream(server, model, **more):
    return server.http.stream("POST", "/v1/completions", json={"model": model, "prompt": "It was"} | ENDLESS | more)


# ---- loading ----


def test_a_model_is_loaded_when_a_request_names_it(folder, embedded_model):
    with routing(folder, n=2) as server:
        assert server.status() == {"one": "unloaded", "three": "unloaded", "two": "unloaded"}
        with running(n_seq=1) as alone:
            expected = alone.http.post("/v1/completions", json={"prompt": "It was", "max_tokens": 4, "temperature": 0})
        found = server.complete("one")
        assert found["choices"] == expected.json()["choices"]
        assert found["model"] == "one"
        assert server.loaded() == {"one"}
        (entry,) = [one for one in server.http.get("/models").json()["data"] if one["id"] == "one"]
        assert entry["meta"]["n_vocab"] == 2048
        assert entry["path"] == str(folder / "one.gguf")
        assert entry["status"]["args"][:3] == ["serve", "-c", "512"]
        server.complete("two")
        server.complete("one")
        assert server.loaded() == {"one", "two"}
        assert server.complete("three")["model"] == "three"
        assert server.loaded() == {"one", "three"}  # two was used before one
        assert server.http.post("/models/unload", json={"model": "one"}).json() == {"success": True}
        assert server.loaded() == {"three"}
        assert server.http.post("/models/load", json={"model": "two:latest"}).json() == {"success": True}
        assert server.loaded() == {"two", "three"}
        pids = [server.child(name)._process.pid for name in ("two", "three")]
    assert not any(map(is_running, pids))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_answer_is_never_cut_off_by_another_model(folder):
    with routing(folder, n=1) as server:
        found = {}

        def ask(name):
            found[name] = server.complete(name)

        with stream(server, "one") as response:
            chunks = events(response)
            next(chunks)
            others = [threading.Thread(target=ask, args=(name,)) for name in ("two", "three", "one")]
            for other in others:
                other.start()
                server.until(lambda: server.child("one").leaving)
            rest = list(chunks)
        assert rest[-1]["usage"]["completion_tokens"] == 400
        for other in others:
            other.join()
        assert {name: one["model"] for name, one in found.items()} == {"one": "one", "two": "two", "three": "three"}
        assert len(server.loaded()) == 1


def test_who_goes_away_while_others_answer_costs_them_nothing(folder):
    with routing(folder, n=1) as server, stream(server, "one") as response:
        chunks = events(response)
        next(chunks)
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json={"model": "two", "prompt": "a"}, timeout=0.1)
        server.until(lambda: not server.child("one").leaving)
        assert list(chunks)[-1]["usage"]["completion_tokens"] == 400
        assert server.complete("one")["model"] == "one"
        assert server.status() == {"one": "loaded", "three": "unloaded", "two": "unloaded"}


def test_requests_for_one_model_load_it_once(folder):
    with routing(folder, n=1) as server:
        threads = [threading.Thread(target=server.complete, args=("one",)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        page = server.http.get("/metrics").text
        assert 'route="/v1/completions",status="200"} 5.0' in page.replace('model="one",', "")


def test_a_client_that_goes_away_does_not_stop_a_load(folder):
    with routing(folder) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json={"model": "one", "prompt": "a"}, timeout=0.1)
        server.until(lambda: server.loaded() == {"one"})
        server.until(lambda: server.child("one").is_idle)
        assert server.http.post("/models/unload", json={"model": "one"}).json() == {"success": True}


def test_what_all_models_may_take(folder):
    with routing(folder) as server:
        server.complete("one")
        n_bytes = server.child("one").n_bytes
        assert n_bytes > 2 * server.child("one").source.size  # the memory of its process
        server.children.limits = replace(server.children.limits, memory=n_bytes * 3 // 2)
        server.complete("two")  # its file would fit next to model one, its process does not
        assert server.loaded() == {"two"}
        server.children.limits = replace(server.children.limits, memory=n_bytes // 2)
        assert server.complete("two")["model"] == "two"  # which is loaded
        error = server.complete("one", status=503)["error"]["message"]
        assert "'one'" in error and "--models-memory" in error
        server.complete("three", status=503)  # as is found out when it is loaded
        assert server.loaded() == set()


def test_without_autoload_a_model_must_be_asked_for(folder):
    with routing(folder, autoload=False) as server:
        assert "/models/load" in server.complete("one", status=400)["error"]["message"]
        assert len(server.http.get("/slots", params={"model": "two", "autoload": "true"}).json()) == 1
        server.http.post("/models/load", json={"model": "one"}).raise_for_status()
        assert server.complete("one")["model"] == "one"
    with routing(folder) as server:
        assert server.http.get("/slots", params={"model": "two", "autoload": "0"}).status_code == 400


# ---- trouble ----


def test_a_process_that_ends_is_named_and_started_again(server):
    with stream(server, "one") as response:
        chunks = events(response)
        next(chunks)
        os.kill(server.child("one")._process.pid, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(chunks)
    server.until(lambda: server.status()["one"] == "unloaded")
    (entry,) = [one for one in server.http.get("/models").json()["data"] if one["id"] == "one"]
    assert (entry["status"]["failed"], entry["status"]["exit_code"]) == (True, -9)
    assert server.complete("one")["model"] == "one"
    found = {}
    os.kill(server.child("one")._process.pid, signal.SIGSTOP)  # a request waits for its answer
    asking = threading.Thread(target=lambda: found.update(server.complete("one", status=502)))
    asking.start()
    server.until(lambda: not server.child("one").is_idle)
    os.kill(server.child("one")._process.pid, signal.SIGKILL)
    asking.join()
    assert "'one' ended (signal 9)" in found["error"]["message"]
    assert server.complete("one")["model"] == "one"


def test_a_model_that_cannot_be_loaded_is_named(folder, tmp_path):
    (tmp_path / "broken.gguf").write_bytes((folder / "one.gguf").read_bytes()[:5000])
    with routing(tmp_path) as server:
        message = server.complete("broken", status=500)["error"]["message"]
        assert "'broken' cannot be loaded: " in message
        assert "broken.gguf" in message
        (entry,) = server.http.get("/models").json()["data"]
        assert entry["status"]["value"] == "unloaded"
        assert (entry["status"]["failed"], entry["status"]["exit_code"]) == (True, 1)
        shutil.copy(folder / "one.gguf", tmp_path / "one.gguf")
        assert [model["name"] for model in server.http.get("/api/tags").json()["models"]] == ["one"]
        assert server.complete("one")["model"] == "one"


def test_a_client_that_goes_away_ends_the_work_on_its_answer(server):
    with stream(server, "one", max_tokens=None) as response:
        next(response.iter_lines())
    server.until(lambda: server.child("one").is_idle)
    slots = server.http.get("/slots", params={"model": "one"}).json()
    server.until(lambda: not server.http.get("/slots", params={"model": "one"}).json()[0]["is_processing"])
    assert len(slots) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/completions", {"model": "four", "prompt": "a"}, 404, ["'four'", "'one', 'three', 'two'"]),
        ("POST", "/v1/completions", {"prompt": "a"}, 400, ["has no field model"]),
        ("POST", "/v1/completions", {"model": 5}, 400, ["has no field model"]),
        ("POST", "/v1/completions", [1], 400, ["has no field model"]),
        ("GET", "/slots", None, 400, ["has no field model"]),
        ("GET", "/nothing?model=five", None, 404, ["'five'"]),
        ("GET", "/v1/models/five", None, 404, ["'five'"]),
        ("POST", "/models/load", {"model": "five"}, 404, ["'five'"]),
        ("POST", "/models/unload", {}, 400, ["has no field model"]),
        ("POST", "/api/chat", {"model": "five", "messages": ASKED}, 404, ["'five'"]),
    ],
)
def test_which_model_must_be_said(server, method, path, body, status, words):
    response = server.http.request(method, path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    for word in words:
        assert word in (error if path.startswith("/api") else error["message"])


def test_errors_of_a_model_are_passed_on(server):
    response = server.http.post("/v1/completions", json={"model": "one", "prompt": "a", "best_of": 3, "top_a": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    response = server.http.post("/v1/completions", json={"model": "one", "prompt": "a", "max_tokens": 1, "top_a": 1})
    assert response.headers["x-unserved-fields"] == "top_a"
    assert server.http.get("/nothing?model=one").status_code == 404
    assert server.http.post("/v1/completions", content=b"{").status_code == 415
    cut = server.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert "not JSON" in cut.json()["error"]["message"]


# ---- other routes ----


def test_a_single_model_needs_no_name(folder):
    with routing(folder / "one.gguf") as server:
        assert server.complete(None)["model"] == "one"
        assert len(server.http.get("/slots").json()) == 1
        assert server.http.post("/tokenize", json={"content": "a"}).json()["count"] > 0
        assert server.http.post("/slots/0?action=erase", headers={"x-requested-with": "a"}).json()["id_slot"] == 0


def test_numbers_of_all_models(server):
    for name in ("one", "two"):
        server.complete(name)
    lines = server.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("pylongctx_http_requests_total") and "/v1/completions" in line]
    assert all(any(f'model="{name}"' in line for line in found) for name in ("one", "two"))
    assert any(line.startswith('pylongctx_http_requests_total{model="",route="/{path:path}"') for line in lines)
    assert len([line for line in lines if line.startswith("# TYPE pylongctx_http_requests_total")]) == 1
    alone = server.http.get("/metrics", params={"model": "one"}).text
    assert "model=" not in alone and "pylongctx_http_requests_total" in alone


def test_pages_of_numbers_become_one():
    from pylongctx.serve.metrics import Answers, merged

    page = '# HELP a Some.\n# TYPE a counter\na{b="}"} 1.0\n# HELP c:d More.\n# TYPE c:d gauge\nc:d 2\n'
    lines = merged(Answers(), {"x": page, 'y"\\': page}).splitlines()
    at = lines.index("# HELP a Some.")
    assert lines[at:] == [
        *("# HELP a Some.", "# TYPE a counter", 'a{model="x",b="}"} 1.0', 'a{model="y\\"\\\\",b="}"} 1.0'),
        *("# HELP c:d More.", "# TYPE c:d gauge", 'c:d{model="x"} 2', 'c:d{model="y\\"\\\\"} 2'),
    ]


def test_what_the_server_says_of_itself(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    props = server.http.get("/props").json()
    assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, True)
    assert server.http.get("/props", params={"model": "one"}).json()["model_alias"] == "one"
    (one,) = [model for model in server.http.get("/v1/models").json()["data"] if model["id"] == "one"]
    assert one["architecture"]["input_modalities"] == ["text"]
    assert server.http.get("/v1/models/one").json()["id"] == "one"
    assert "<html" in server.http.get("/").text
    assert server.http.head("/").status_code == 200
    assert server.http.head("/v1/models").status_code == 200
    assert server.http.head("/slots", params={"model": "one"}).status_code == 200
    assert server.http.get("/v1/longctx", params={"model": "one"}).json()["n_ctx"] == 512


def test_files_of_a_folder_are_served_next_to_models(folder, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "index.html").write_text("a page")
    (tmp_path / "a.txt").write_text("a text")
    with routing(folder, settings={"static_folder": tmp_path, "prefix": "/llm"}) as server:
        assert server.http.get("/llm/a.txt").text == "a text"
        assert server.http.get("/llm/deep/").text == "a page"
        assert server.http.get("/llm/").text == "Ollama is running"
        assert server.http.get("/llm/slots", params={"model": "one"}).json()[0]["id"] == 0
        body = {"model": "one", "prompt": "a", "max_tokens": 1}
        assert server.http.post("/llm/v1/completions", json=body).json()["model"] == "one"
        assert server.http.get("/llm/b.txt").status_code == 400  # no file, and no model is named
        assert server.http.get("/llm/b.txt", params={"model": "one"}).status_code == 404


def test_files_are_found_when_they_come(folder, tmp_path):
    shutil.copy(folder / "one.gguf", tmp_path / "one.gguf")
    with routing(tmp_path) as server:
        assert set(server.status()) == {"one"}
        shutil.copy(folder / "three.gguf", tmp_path / "later.gguf")
        assert server.complete("later")["model"] == "later"
        (tmp_path / "one.gguf").unlink()
        assert server.complete("one", status=404)["error"]["code"] == "model_not_found"


def test_keys_are_asked_for_before_a_model_is_loaded(folder):
    keys = {"api_keys": ("first", "second")}
    with routing(folder, settings=keys) as server:
        body = {"model": "one", "prompt": "It was the best of times, it was the worst", "max_tokens": 1}
        none = httpx.post(f"{server.url}/v1/completions", json=body)
        assert none.status_code == 401
        assert server.loaded() == set()
        cached = []
        for key in ("first", "first", "second"):
            found = httpx.post(
                f"{server.url}/v1/completions", json=body, timeout=60, headers={"Authorization": f"Bearer {key}"}
            )
            cached.append(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, False]  # users share nothing
        assert server.http.get("/metrics").status_code == 200
        assert "second" not in server.http.get("/v1/models").text  # users do not see each other's keys


def test_a_stream_is_read_again_from_the_process_of_its_model(folder):
    with routing(folder, settings={"api_keys": ("first", "second")}) as server:
        get = lambda name, **more: server.http.get("/v1/stream", params={"conv_id": name} | more)  # noqa: E731
        assert get("a::one").status_code == 404
        assert server.loaded() == set()
        found = {}
        for name, model in (("a::one", "one"), ("a::two", "two"), ("b", "one")):
            with server.http.stream(
                "POST",
                "/v1/completions",
                json={"model": model, "prompt": "a", "max_tokens": 3, "stream": True},
                headers={"X-Conversation-Id": name},
            ) as response:
                found[name] = response.read()
        assert get("a::two").content == found["a::two"]
        assert get("b", model="one", **{"from": 9}).content == found["b"][9:]
        body = {"conversation_ids": ["a", "b"]}
        entries = server.http.post("/v1/streams/lookup", json=body).json()
        assert {one["conversation_id"] for one in entries} == set(found)
        second = {"Authorization": "Bearer second"}
        assert server.http.post("/v1/streams/lookup", json=body, headers=second).json() == []
        assert server.http.delete("/v1/stream", params={"conv_id": "a::two"}).status_code == 204
        assert get("a::two").status_code == 404


def test_pages_of_others_are_let_in_by_both(folder):
    origin = {"origin": "http://page.example"}
    with routing(folder, settings={"cors_origins": ("http://page.example",)}, options=["--cors-origin", "*"]) as server:
        found = server.http.post("/v1/completions", json={"model": "one", "prompt": "a"}, headers=origin)
        assert found.headers.get_list("access-control-allow-origin") == ["http://page.example"]
        asking = origin | {"access-control-request-method": "POST"}
        assert server.http.options("/v1/completions", headers=asking).status_code == 200


def test_sequences_of_each_model_have_a_folder(folder, tmp_path):
    with routing(folder, settings={"slot_folder": tmp_path}) as server:
        server.complete("one")
        saved = server.http.post("/slots/0?action=save&model=one", json={"filename": "a"})
        assert saved.json()["n_saved"] > 0
        assert (tmp_path / "one" / "a").is_file()


# ---- clients of Ollama ----


def test_ollamas_client(server):
    import ollama

    client = ollama.Client(host=server.url, timeout=60)
    names = [model.model for model in client.list().models]
    assert names == ["one", "three", "two"]
    found = client.chat("one:latest", ASKED, options={"num_predict": 3, "temperature": 0})
    assert (found.model, found.eval_count) == ("one", 3)
    parts = list(client.generate("one", "Say hello", stream=True, options={"num_predict": 3}))
    assert [part.done for part in parts][-1] is True
    assert "one" in [model.model for model in client.ps().models]
    client.generate("three", "")
    assert "three" in server.loaded()
    assert client.generate("three", keep_alive=0).done_reason == "unload"
    assert "three" not in server.loaded()
    shown = client.show("three")
    assert (shown.details.family, shown.capabilities) == ("llama", ["completion"])
    assert "three" not in server.loaded()
    assert client.show("one").capabilities == ["completion", "tools"]
    with pytest.raises(ollama.ResponseError, match="not supported"):
        client.pull("one")
    with pytest.raises(ollama.ResponseError, match="there is no model 'four'"):
        client.chat("four", ASKED)
    assert server.http.get("/api/version").json() and server.http.head("/api/tags").status_code == 200


def test_compressed_bodies_and_answers_pass(server):
    body = gzip.compress(json.dumps({"model": "one", "content": "It was " * 200}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    answer = server.http.post("/tokenize", content=body, headers=headers)
    assert answer.headers["content-encoding"] == "gzip" and len(answer.json()["tokens"]) > 200


def test_a_body_in_chunks_may_declare_a_length(server):
    """Proxies send both headers, of which HTTP ignores the length."""
    import socket
    from urllib.parse import urlsplit

    body = b'{"model": "one", "content": "a b"}'
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port), 60) as connection:
        connection.sendall(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        found = b"".join(iter(lambda: connection.recv(4096), b""))
    assert found.startswith(b"HTTP/1.1 200"), found


# ---- idle models ----

IDLE = 1.0  # seconds


def test_an_idle_model_sleeps_until_the_next_request(folder):
    """What asks about it keeps it neither awake, nor wakes it; a long answer does."""
    with routing(folder, idle=IDLE) as server:
        first = server.complete("one")["choices"]
        pid = server.child("one")._process.pid
        with stream(server, "two") as response:
            chunks = events(response)
            next(chunks)
            server.until(lambda: server.status()["one"] == "sleeping")
            server.until(lambda: not is_running(pid))
            assert len(list(chunks)) > 100
            assert server.status()["two"] == "loaded"
        asking = lambda: server.http.get("/props?model=two").json()["is_sleeping"]  # noqa: E731
        server.until(asking)
        server.http.get("/metrics?model=two").raise_for_status()
        assert server.status() == {"one": "sleeping", "two": "sleeping", "three": "unloaded"}
        assert server.complete("one")["choices"] == first
        assert server.status() == {"one": "loaded", "two": "sleeping", "three": "unloaded"}
        assert server.http.get("/props?model=one").json()["is_sleeping"] is False


def test_the_only_model_sleeps_too(folder):
    with routing(folder / "one.gguf", only="one", idle=IDLE) as server:
        assert server.http.get("/health").json() == {"status": "ok", "is_sleeping": False}
        server.complete("anything")
        server.until(lambda: server.http.get("/health").json() == {"status": "ok", "is_sleeping": True})
        assert server.http.get("/props").json()["is_sleeping"] is True
        assert "pylongctx" in server.http.get("/metrics").text
        assert server.http.get("/health").json()["is_sleeping"] is True
        server.complete("anything")
        assert server.http.get("/health").json()["is_sleeping"] is False
