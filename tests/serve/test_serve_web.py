"""What is around the routes: files, a prefix, TLS, and defaults of requests."""

import argparse
import shutil
import ssl
import subprocess

import pytest
from chat_templates import THINKING
from needs import lacks, need
from serving import events, forced, running

httpx = need("server", "fastapi", "httpx")

from pylongctx.cli import serve as command  # noqa: E402
from pylongctx.serve.server import listen  # noqa: E402

SAID = "<think>\nI think so\n</think>\n\nYes."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("www")
    for name, text in (("index.html", "<p>mine"), ("a b.css", "p {}"), ("deep/index.html", "deep"), ("health", "no")):
        (found / name).parent.mkdir(exist_ok=True)
        (found / name).write_text(text, encoding="utf-8")
    (found.parent / "secret.txt").write_text("secret", encoding="utf-8")
    (found / "out.txt").symlink_to(found.parent / "secret.txt")
    return found


def given(*words):
    made = argparse.ArgumentParser()
    command.add_parser(made.add_subparsers())
    return command.settings(made.parse_args(["serve", *words]))


# ---- files ----


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_files_of_a_folder_stand_in_place_of_the_page(folder, keys):
    with running(settings={"static_folder": folder, "api_keys": keys}) as server:
        for path, text in (("/", "<p>mine"), ("/index.html", "<p>mine"), ("/a%20b.css", "p {}"), ("/deep/", "deep")):
            found = server.http.get(path)
            assert (found.status_code, found.text) == (200, text), path
        assert server.http.get("/a%20b.css").headers["content-type"].startswith("text/css")
        assert server.http.get("/health").json()["status"] == "ok"  # a route goes first
        assert server.http.get("/app.js").status_code == (401 if keys else 404)
        for path in ("/none.html", "/out.txt", "/../secret.txt", "/%2e%2e/secret.txt", "/deep/../../secret.txt"):
            found = server.http.get(path)
            assert found.status_code in (401, 404) and "secret" not in found.text.replace("secret.txt", "")
        wanted = {"prompt": "a", "max_tokens": 1}
        assert server.http.post("/v1/completions", json=wanted).status_code == (401 if keys else 200)
        assert server.http.get("/v1/models").status_code == (401 if keys else 200)


def test_a_folder_without_an_index_leaves_the_root(folder):
    with running(settings={"static_folder": folder / "deep" / ".."}) as server:
        assert server.http.get("/").text == "<p>mine"
    (folder / "empty").mkdir()
    with running(settings={"static_folder": folder / "empty"}) as server:
        assert server.http.get("/").status_code == 200 and "mine" not in server.http.get("/").text


# ---- the prefix ----


def test_a_prefix_begins_all_paths(folder):
    with running(settings={"prefix": "/llm/v2", "static_folder": folder, "api_keys": ("k",)}) as server:
        body, headers = {"prompt": "a", "max_tokens": 1}, {"Authorization": "Bearer k"}
        for path in ("/health", "/v1/models", "/", "/llm", "/llm/v2", "/llm/v2x/health"):
            found = server.http.get(path, headers=headers)
            assert found.status_code == 404
            assert "begin with /llm/v2" in found.json()["error"]["message"]
        assert server.http.get("/llm/v2/health").json()["status"] == "ok"
        assert server.http.get("/llm/v2/deep/").text == "deep"
        assert server.http.post("/llm/v2/v1/completions", json=body).status_code == 401
        found = server.http.post("/llm/v2/v1/completions", json=body, headers=headers)
        assert found.json()["usage"]["completion_tokens"] == 1


# ---- TLS and ports ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        lacks("build", "no openssl to make a certificate")
    found = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    files = ("-keyout", str(found / "key.pem"), "-out", str(found / "cert.pem"))
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    return str(found / "cert.pem"), str(found / "key.pem")


def test_a_server_with_a_certificate(certificate):
    with running(settings={"tls": certificate}) as server:
        trusted = ssl.create_default_context(cafile=certificate[0])
        url = server.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:
            assert client.get("/health").json()["status"] == "ok"
            with client.stream("POST", "/completion", json={"prompt": "a", "n_predict": 3, "stream": True}) as answer:
                assert list(events(answer))[-1]["stop"] is True
        with pytest.raises(httpx.HTTPError):
            server.http.get("/health")


def test_several_servers_on_one_port():
    with listen("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port, shared=True) as second:
            assert second.getsockname()[1] == port
        with pytest.raises(OSError, match="cannot listen on"):
            listen("127.0.0.1", port)


# ---- options ----


def test_options_become_settings(folder, certificate):
    words = ["--path", folder, "--api-prefix", "/llm", "--ssl-cert-file", certificate[0], "--ssl-key-file"]
    found = given(*map(str, words), certificate[1], "-to", "600", "--sse-ping-interval", "5", "--no-cache-prompt")
    assert (found.static_folder, found.prefix, found.tls) == (folder, "/llm", certificate)
    assert (found.body_patience, found.patience, found.cache_prompt, found.prefills) == (600, 5, False, True)
    plain = given("--sse-ping-interval", "-1", "--no-prefill-assistant", "--reasoning-effort", "high")
    assert (plain.patience, plain.prefills, plain.prefix, plain.tls) == (None, False, "", None)
    assert plain.template["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert given("--reasoning-effort", "default").template == {}
    assert given("--path", str(folder), "--socket", "5").static_folder is None  # behind a server of several models


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--path /no/such/folder", "--path /no/such/folder is not a folder"),
        ("--api-prefix llm", "--api-prefix must begin with /"),
        ("--api-prefix /llm/", "must not end with /"),
        ("--ssl-cert-file x", "needs both --ssl-cert-file and --ssl-key-file"),
        ("--ssl-cert-file /no/c --ssl-key-file /no/k", "/no/c is not a file"),
        ("--timeout 0", "--timeout must be above 0, not 0"),
        ("--timeout nan", "--timeout must be above 0"),
        ("--sse-ping-interval -2", "--sse-ping-interval must be above 0"),
    ],
)
def test_settings_that_make_no_sense(words, message):
    with pytest.raises(ValueError, match=message):
        given(*words.split())


# ---- defaults of requests ----


@pytest.mark.parametrize("default", [True, False])
def test_whether_a_prompt_is_taken_over_where_a_request_does_not_say_so(default):
    body = {"prompt": "It was the best of times, it was the worst of times.", "n_predict": 1}
    with running(n_seq=1, settings={"cache_prompt": default}) as server:
        for more, cached in (
            ({}, False),
            ({}, default),
            ({"cache_prompt": True}, True),
            ({"cache_prompt": False}, False),
        ):
            found = server.http.post("/completion", json=body | more).json()
            assert (found["timings"]["cache_n"] > 0) == cached


@pytest.mark.parametrize("default", [True, False])
def test_whether_an_answer_continues_with_the_last_message(default):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    with running(settings={"prefills": default}, chat_format="chatml") as server:
        for more, continues in (
            ({}, default),
            ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ):
            body = {"messages": messages, "max_tokens": 1, "verbose": True, **more}
            found = server.http.post("/v1/chat/completions", json=body).json()
            assert found["__verbose"]["prompt"].endswith("Well,") == continues


@pytest.mark.parametrize(("format", "apart"), [(None, True), ("auto", True), ("deepseek", True), ("none", False)])
@pytest.mark.parametrize("streamed", [False, True])
def test_where_thoughts_are(monkeypatch, format, apart, streamed):
    with running(chat_format=THINKING) as server:
        server.host.templates.reasoning_format = format
        forced(server, monkeypatch, SAID)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "stream": streamed}
        if streamed:
            with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                deltas = [one["choices"][0]["delta"] for one in events(answer) if one["choices"]]
            said = {name: "".join(d.get(name) or "" for d in deltas) for name in ("content", "reasoning_content")}
        else:
            said = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        if apart:
            assert (said["content"].strip(), said["reasoning_content"].strip()) == ("Yes.", "I think so")
        else:
            assert said["content"].strip() == SAID and not said.get("reasoning_content")
