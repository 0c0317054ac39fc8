"""Who may ask the server: hosts, origins, keys, and what users see of each other."""

import pytest
from llamas import TEXT
from needs import need
from serving import running

httpx = need("server", "fastapi", "httpx")

KEYS = ("one-key", "another-key")
LONG = TEXT.decode() * 2


@pytest.fixture(scope="module")
def server():
    settings = {"hosts": ("longctx.example",), "cors_origins": ("https://page.example",)}
    with running(n_seq=1, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return a server with a user for each of two keys."""
    settings = {"api_keys": KEYS, "slot_folder": tmp_path_factory.mktemp("slots")}
    with running(n_seq=2, settings=settings) as server:
        yield server


def as_user(server, number):
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS[number]}"}, timeout=60)


def error(response):
    return response.status_code, response.json()["error"]["code"]


# ---- browsers ----


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "longctx", "a b"]
)
@pytest.mark.parametrize("path", ["/", "/slots", "/v1/longctx", "/v1/models"])
def test_a_name_that_is_not_ours_is_refused(server, host, path):
    assert error(server.http.get(path, headers={"Host": host})) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1:80", "[::1]:8080", "192.0.2.7", "longctx.example:443"],
)
def test_names_of_this_machine_and_those_that_were_given_are_ours(server, host):
    assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_with_a_star_any_name_is():
    with running(n_seq=1, settings={"hosts": ("*",)}) as server:
        assert server.http.get("/v1/models", headers={"Host": "any.example"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://longctx.example:1"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_other_sites_are_refused(server, origin, method):
    response = server.http.request(method, "/slots/0" if method == "POST" else "/slots", headers={"Origin": origin})
    assert error(response) == (403, "origin_not_allowed")


@pytest.mark.parametrize("origin", ["own", "https://page.example"])
def test_the_own_page_and_those_that_were_named_may_ask(server, origin):
    origin = server.url if origin == "own" else origin
    assert server.http.post("/tokenize", json={"content": "a"}, headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_post_that_any_page_can_send_changes_nothing(server, kind):
    server.http.post("/completion", json={"prompt": "It was", "n_predict": 2}).raise_for_status()
    headers = {} if kind is None else {"Content-Type": kind}
    assert error(server.http.post("/slots/0?action=erase", headers=headers)) == (415, None)
    assert server.http.get("/slots").json()[0]["n_past"] > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({"Sec-Fetch-Site": "cross-site"}, 415),
        ({"User-Agent": "Mozilla/5.0"}, 415),
        ({"Origin": "http://evil.example"}, 403),
    ],
)
def test_clients_of_ollama_need_not_say_what_they_send(server, headers, status):
    response = server.http.post("/api/chat", content=b'{"messages": []}', headers=headers)
    assert response.status_code == status, response.text


@pytest.mark.parametrize("headers", [{"Content-Type": "application/json; charset=utf-8"}, {"X-Requested-With": "curl"}])
def test_without_a_body_a_header_is_enough(server, headers):
    assert server.http.post("/slots/0?action=erase", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://127.0.0.1:3000", 200),
        ("https://[::1]:3000", 200),
        ("http://notlocalhost", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost:3000.evil.example", 403),
    ],
)
def test_pages_of_this_machine_may_ask_when_they_are_let(origin, status):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with running(n_seq=1, settings={"cors_origins": ("localhost",)}) as server:
        response = server.http.options("/completions", headers=headers)
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/chat/completions", {"Authorization": "Bearer wrong"}, 401),
        ("/v1/chat/completions", {"Content-Type": "text/plain", "Authorization": f"Bearer {KEYS[0]}"}, 415),
        ("/v1/chat/completions", {"Authorization": f"Bearer {KEYS[0]}"}, 400),
        ("/nowhere", {"Authorization": f"Bearer {KEYS[0]}"}, 404),
    ],
)
@pytest.mark.parametrize("origin", ["https://page.example", "https://other.example"])
def test_a_page_can_read_why_it_is_refused(origin, path, headers, status):
    settings = {"cors_origins": ("https://page.example",), "api_keys": KEYS}
    given = {"Content-Type": "application/json", "Origin": origin} | headers
    with running(n_seq=1, settings=settings) as server:
        response = server.http.post(path, content=b"{}", headers=given)
    known = origin == "https://page.example"
    assert response.status_code == (status if known else 403)
    assert response.headers.get("access-control-allow-origin") == (origin if known else None)
    assert not known or "X-Unserved-Fields" in response.headers["access-control-expose-headers"]


def test_a_page_that_forgets_the_prefix_can_read_it():
    with running(n_seq=1, settings={"cors_origins": ("*",), "prefix": "/llm"}) as server:
        response = server.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (404, "*")


# ---- users ----


def test_what_one_user_has_read_is_not_shared_with_another(shared):
    shared.erase()

    def cached(number):
        with as_user(shared, number) as http:
            answer = http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1, "temperature": 0}).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    (first, text), (again, _), (other, same), (still, _) = cached(0), cached(0), cached(1), cached(0)
    assert (first, other) == (0, 0)
    assert again > 0
    assert still > 0  # the other one took the other sequence
    assert same == text


def test_no_user_erases_what_another_one_has_read(shared):
    shared.erase()
    with as_user(shared, 0) as own, as_user(shared, 1) as other:
        own.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1})
        (seq,) = [slot["id"] for slot in own.get("/slots").json() if slot["n_past"]]
        headers = {"X-Requested-With": "test"}
        refused = other.post(f"/slots/{seq}?action=erase", headers=headers)
        assert refused.status_code == 400 and "nothing of yours" in refused.json()["error"]["message"]
        erased = own.post(f"/slots/{seq}?action=erase", headers=headers)
        assert erased.status_code == 200 and erased.json()["n_erased"] > 0


def test_what_two_users_read_at_the_same_time_is_not_shared(shared):
    shared.erase()
    body = {"prompt": LONG, "max_tokens": 2, "temperature": 0, "stream": True, "return_progress": True}
    with (
        shared.held(),
        as_user(shared, 0).stream("POST", "/v1/completions", json=body) as first,
        as_user(shared, 1).stream("POST", "/v1/completions", json=body) as second,
    ):
        shared.release()
        texts = ["".join(response.iter_text()) for response in (first, second)]
    assert all('"cache": 0' in text and '"processed": 0' in text for text in texts)


def test_a_saved_sequence_is_for_who_has_saved_it(shared):
    shared.erase()
    with as_user(shared, 0) as one, as_user(shared, 1) as two:
        one.post("/completion", json={"prompt": LONG, "n_predict": 1, "id_slot": 0}).raise_for_status()
        refused = two.post("/slots/0?action=save", json={"filename": "a"})
        assert refused.status_code == 400
        assert "nothing of yours" in refused.json()["error"]["message"]
        saved = one.post("/slots/0?action=save", json={"filename": "a"}).json()
        assert two.post("/slots/1?action=restore", json={"filename": "a"}).status_code == 400
        assert one.post("/slots/1?action=restore", json={"filename": "a"}).json()["n_restored"] == saved["n_saved"]


def test_one_key_or_none_shares_all():
    with running(n_seq=1, settings={"api_keys": KEYS[:1]}) as server, as_user(server, 0) as http:
        for n_cached in (False, True):
            usage = http.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1}).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) == n_cached
