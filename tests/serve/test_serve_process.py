"""``pylongctx serve`` as a process: options, signals, warnings."""

import argparse
import errno
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from needs import need
from serving import PATIENCE, events

from pylongctx.cli import main, serve

httpx = need("server", "fastapi", "httpx")


class Process:
    """A running server; ``stop`` sends a signal and returns the exit status and what it said."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "pylongctx", "serve", "--port", "0", "-c", "512", "-t", "1", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = []
        while not (found := re.search(r"serving at (http://\S+)", self.line())):
            pass
        self.url = found[1]

    def line(self):
        line = self.process.stderr.readline()
        self.said.append(line)
        assert line, "".join(self.said)
        return line

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        rest = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, "".join(self.said) + rest


@contextmanager
def started(*options):
    process = Process(*options)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
        process.process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_server(number):
    with started() as server:
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).json() == {"status": "ok"}
        status, said = server.stop(number)
        assert status == 0
        assert "Traceback" not in said
        assert "warning" not in said


def test_a_running_answer_may_end_in_the_time_of_grace():
    with started("--grace", "30") as server:
        body = {"prompt": "It was", "max_tokens": 200, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            chunks = events(response)
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            assert list(chunks)[-1]["usage"]["completion_tokens"] == 200
        assert server.stop()[0] == 0


def test_an_answer_without_end_is_cut_off_after_it():
    with started("--grace", "1", "-c", "60000") as server:
        body = {"prompt": "It was", "max_tokens": 59000, "logit_bias": {"2": -100.0}, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            next(response.iter_lines())
            assert server.stop()[0] == 0


def test_it_listens_at_several_addresses(tmp_path):
    path = tmp_path / "model.sock"
    left = socket.socket(socket.AF_UNIX)  # of a process that was killed
    left.bind(str(path))
    left.close()
    with started("--host", "127.0.0.1", "--host", f"127.0.0.2,{path}") as server:
        second, third = server.line(), server.line()
        assert second.endswith(f"{server.url.replace('.1:', '.2:')}\n") and third.endswith(f"{path}\n")
        assert httpx.get(f"{server.url.replace('.1:', '.2:')}/health", timeout=PATIENCE).status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=PATIENCE) as client:
            asked = {"prompt": "It was", "max_tokens": 2}
            assert client.post("http://localhost/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 2
            assert client.get("http://elsewhere.example/props").status_code == 403
        status, said = server.stop()
        assert status == 0 and "warning" not in said
    assert not path.exists()


def test_who_lets_others_in_without_a_key_is_warned():
    with started("--host", "0.0.0.0") as server:
        assert "set --api-key" in server.line()


def test_with_a_key_there_is_no_warning(monkeypatch):
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    with started("--host", "0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
        assert "warning" not in server.stop()[1]


def test_options_reach_the_server():
    words = "-np 3 --method longheads -n 7 -a mine,yours --temp 0 --embeddings --pooling mean --chat-template chatml"
    more = "--tags a,,b --dry-multiplier 0.8 --samplers dry;top-k"
    with started(*words.split(), *more.split()) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        (model,) = http.get("/v1/models").json()["data"]
        assert (model["id"], model["aliases"], model["tags"]) == ("mine", ["mine", "yours"], ["a", "b"])
        assert http.get("/v1/models/yours").json() == model
        assert model["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        params = http.get("/props").json()["default_generation_settings"]["params"]
        assert (params["dry_multiplier"], params["samplers"]) == (0.8, ["dry", "top_k"])
        assert http.get("/props").json()["total_slots"] == 3
        assert http.get("/v1/longctx").json()["method"].startswith("longheads")
        messages = [{"role": "user", "content": "Why?"}]
        answer = http.post("/v1/chat/completions", json={"messages": messages}).json()
        assert answer["usage"]["completion_tokens"] <= 7
        assert "<|im_start|>user\nWhy?" in http.post("/apply-template", json={"messages": messages}).json()["prompt"]
        assert len(http.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]) == 256


@pytest.fixture
def folder(embedded_model, tmp_path):
    for name in ("one", "two"):
        shutil.copy(embedded_model, tmp_path / f"{name}.gguf")
    return tmp_path


def processes_of(number):
    """Return the processes that one has started and that run."""
    import psutil

    found = []
    for child in psutil.Process(number).children():
        with suppress(psutil.Error):  # it has ended
            found += [child] if "--alias" in child.cmdline() else []
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_of_several_models_leaves_no_process(folder, number):
    import psutil

    with started("--models", str(folder), "--models-max", "2", "--slot-save-path", str(folder)) as server:
        for name in ("one", "two"):
            body = {"model": name, "prompt": "It was", "max_tokens": 2}
            found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).json()
            assert (found["model"], found["usage"]["completion_tokens"]) == (name, 2)
        children = processes_of(server.process.pid)
        assert len(children) == 2
        status, said = server.stop(number)
        assert status == (0 if number == signal.SIGTERM else -number)
        assert "models: one, two" in said
        assert "[two] pylongctx: full" in said
        gone, alive = psutil.wait_procs(children, PATIENCE)
        assert (len(gone), alive) == (2, [])
    assert not any("Traceback" in line for line in said.splitlines())


def test_options_of_several_models(monkeypatch):
    from pylongctx.cli.serve import child_words, model_words

    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    line = "serve -c 512 --models a,b --models-dir c --models-max 2 --models-memory 1.5 --no-models-autoload -np 2"
    argv = [*line.split(), "--slot-save-path", "saved", "--temp=0", "--embeddings", "--api-key", "a", "--api-key=b"]
    args = parser.parse_args(argv)
    assert model_words(args) == ["a", "b", "c"]
    assert child_words(argv) == ["-c", "512", "-np", "2", "--temp=0", "--embeddings"]
    web = ["--path", "x", "--api-prefix=/llm", "--ssl-cert-file", "c", "--ssl-key-file", "k", "--reuse-port"]
    assert child_words([*argv, *web]) == child_words(argv)
    assert model_words(parser.parse_args([*argv, "--socket", "5"])) == []
    for words in (["model.gguf"], ["-m", "model.gguf"], ["--alias", "mine"]):
        with pytest.raises(ValueError, match="cannot be combined with"):
            model_words(parser.parse_args([*argv, *words]))
    monkeypatch.setenv("LLAMA_ARG_MODELS_DIR", "d,e")
    assert model_words(parser.parse_args(["serve"])) == ["d", "e"]
    assert model_words(parser.parse_args(["serve", "model.gguf"])) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--models", "/nowhere"], "neither a folder, a .gguf file"),
        (["--models", "/nowhere", "model.gguf"], "cannot be combined with"),
        (["-np", "0"], "at least 1 sequence"),
        (["-np", "9", "-ub", "8"], "raise -ub"),
        (["--embeddings"], "--pooling"),
        (["--port", "1", "--host", "192.0.2.1"], "choose another --host or --port"),
        (["--host", "a.sock", "--reuse-port"], "--reuse-port shares a port, but a.sock is a Unix socket"),
        (["--method", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_served_is_said(capsys, words, reason):
    assert main(["serve", "--port", "0", "-c", "512", *words]) == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", " \n\n", "# not filled in\n", "\t"])
@pytest.mark.parametrize("where", ["--api-key", "--api-key-file", "LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE"])
def test_a_source_of_keys_without_a_key_opens_nothing(capsys, tmp_path, monkeypatch, where, text):
    (tmp_path / "keys").write_text(text)
    words = {"--api-key": ["--api-key", text], "--api-key-file": ["--api-key-file", str(tmp_path / "keys")]}
    if where not in words:
        monkeypatch.setenv(where, str(tmp_path / "keys") if "FILE" in where else text)
    assert main(["serve", "--port", "0", "-c", "512", *words.get(where, [])]) == 1
    said = capsys.readouterr().err
    assert (where in said or "--api-key-file" in said) and "holds no API key" in said


def test_an_empty_variable_is_not_read_beside_a_key(monkeypatch):
    monkeypatch.setenv("LLAMA_API_KEY", "")
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    assert serve.settings(parser.parse_args(["serve", "--api-key", " a, b,"])).api_keys == ("a", "b")


def test_settings_keep_their_defaults(tmp_path):
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    (tmp_path / "keys").write_text("# ours\n c \t\n\n")
    words = f"--api-key a,b --api-key d --api-key-file {tmp_path / 'keys'} --max-body 3 --queue 5 --metrics -cb"
    words += " --host name.example --allowed-hosts one --allowed-hosts two --stall 5 --slot-save-path folder"
    found = serve.settings(parser.parse_args(["serve", *words.split()]))
    assert found.api_keys == ("a", "b", "d", "c")
    assert found.hosts == ("one", "two", "name.example")
    assert (found.stall, found.slot_folder) == (5, Path("folder"))
    assert (found.n_body, found.n_queue, found.n_predict) == (3 << 20, 5, None)
    assert json.dumps(found.sampling) == "{}"


def test_the_packages_of_the_server_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [name for name in sys.modules if name.startswith("pylongctx.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["serve"]) == 1
    assert "pip install 'pylongctx[server]'" in capsys.readouterr().err


def test_localhost_is_of_both_families(monkeypatch, caplog):
    from pylongctx.serve import server

    infos = [(family, 0, 0, "", (at, 0)) for family, at in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))]
    monkeypatch.setattr(server.socket, "getaddrinfo", lambda *args, **more: infos)
    asked = []

    def listen(host, port, shared):
        asked.append((host, port))
        if host == "::1" and len(asked) > 2:
            raise OSError("no ::1 here") from OSError(errno.EADDRNOTAVAIL, "")
        return socket.create_server(("127.0.0.1", 0))

    monkeypatch.setattr(server, "listen", listen)
    with server.listening(["localhost"], 0) as listeners:
        assert asked == [("127.0.0.1", 0), ("::1", listeners[0].getsockname()[1])]
    with caplog.at_level("INFO"), server.listening(["localhost"], 7) as listeners:  # a machine without IPv6
        assert len(listeners) == 1 and "no ::1 here" in caplog.text


def test_a_socket_where_somebody_listens_is_not_replaced(tmp_path):
    from pylongctx.serve.server import listening

    path = str(tmp_path / "a.sock")
    with listening([path], 0) as (listener,):
        listener.listen()
        with pytest.raises(OSError, match=f"cannot listen on {path}, choose another --host"), listening([path], 0):
            pass
        assert Path(path).is_socket()


def test_connections_send_small_packets_at_once():
    from pylongctx.serve.server import listen

    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), client


def test_options_per_model(folder, tmp_path):
    """Of the file of presets, which also names a model; the command line of the server has -c 512."""
    path, first = tmp_path / "models.ini", min(folder.glob("*.gguf"))
    path.write_text(f"[*]\ntemp = 0.25\nc = 1024\n[mine]\nmodel = {first}\ntemp = 0.5\nload-on-startup = true\n")
    words = ("--models-preset", str(path), "--models", str(first))
    with started(*words) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        status = {one["id"]: one["status"]["value"] for one in http.get("/v1/models").json()["data"]}
        assert status == {"mine": "loaded", first.stem: "unloaded"}
        found = {}
        for name in status:
            http.post("/models/load", json={"model": name}).raise_for_status()
            given = http.get(f"/props?model={name}").json()["default_generation_settings"]
            found[name] = given["params"]["temperature"], given["n_ctx"]
        assert found == {"mine": (0.5, 512), first.stem: (0.25, 512)}


def test_a_server_of_one_model_frees_it_when_it_is_idle():
    with started("--sleep-idle-seconds", "1") as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        end = time.monotonic() + PATIENCE
        while not http.get("/health").json()["is_sleeping"] or processes_of(server.process.pid):
            assert time.monotonic() < end
            time.sleep(0.1)
        answer = http.post("/v1/completions", json={"prompt": "It was", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert len(processes_of(server.process.pid)) == 1
