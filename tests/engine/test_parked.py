"""Sequences that lost their slots: a conversation goes on after requests in between, and only its new turn is read."""

import pytest
from hybrid_files import path_of
from llamas import F32, METHODS
from needs import need
from serving import poster, running

need("server", "fastapi", "httpx")

from pylongctx.engine.session import TAIL  # noqa: E402

SIZE = 64 << 20
STORY = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
MORE = " And then, on a Tuesday, everything changed."
TITLE = "Find a short title for a conversation about two cities."


@pytest.fixture(params=[*METHODS, None])
def server(request, embedded_f32):
    with running(n_seq=1, path=embedded_f32, method=request.param, settings={"parked_bytes": SIZE}, **F32) as server:
        yield server


def completions(server):
    """Return a function that completes a prompt, and returns the text and how many of its tokens were evaluated."""
    post = poster(server)

    def complete(prompt, **more):
        found = post("/completion", prompt=prompt, n_predict=8, temperature=0.0, **more)
        return found["content"], found["timings"]["prompt_n"]

    return complete


def n_tokens(server, text):
    return len(server.host.tokens(text))


def test_a_title_in_between_costs_a_conversation_nothing(server):
    """Two conversations and their titles take turns on one sequence."""
    complete = completions(server)
    talks = [STORY, STORY[40:]]
    for turn in range(3):
        for i, talk in enumerate(talks):
            said, n = complete(talk)
            assert turn == 0 or n <= n_tokens(server, MORE) + 2
            assert complete(f"{TITLE} {i} {turn}")[1] <= n_tokens(server, f"{TITLE} {i} {turn}") + 1
            talks[i] = talk + said + MORE
    want = completions(server)(talks[0])[0]
    server.erase()
    assert complete(talks[0], cache_prompt=False)[0] == want
    assert 0 < server.metric("parked_bytes") <= SIZE


@pytest.mark.parametrize("name", ["qwen3next", "gemma3"])
def test_what_cannot_be_cut_goes_on(name, tmp_path):
    sizes = {"n_ctx": 512, "n_ubatch": 32, "method": "full"} | F32
    with running(n_seq=1, path=path_of(tmp_path, name), settings={"parked_bytes": SIZE}, **sizes) as server:
        post = poster(server)

        def complete(prompt):
            asked = {"n_predict": 8, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
            found = post("/completion", prompt=prompt, **asked)
            return found["tokens"], found["timings"]["prompt_n"]

        first, title, more = list(range(10, 200)), list(range(200, 240)), [5, 6, 7]
        said, _ = complete(first)
        assert complete(title)[1] == len(title)
        want, n = complete([*first, *said, *more])
        assert n == len(more) + 1
        complete(title)
        again, n = complete([*first, *said, *more])  # the same prompt, whose answer is in memory too
        assert again == want and n <= TAIL
        complete(title)
        assert complete([*first[:-3], 7, 8, 9])[1] <= TAIL + 3  # another end, as without the reasoning of an answer
        server.erase()
        assert complete([*first, *said, *more])[0] == want


RULES = ["corm,window=8,recent=24,evict_every=16", "h2o,budget=64", "longheads,chunk_size=16,window=64+tova,budget=96"]


@pytest.mark.parametrize("n_seq", [1, 2])
@pytest.mark.parametrize("method", RULES)
def test_a_turn_without_the_last_reasoning_evaluates_its_end(embedded_f32, method, n_seq):
    """What a rule has evicted since the prompt does not come back, so its end is kept."""
    settings = {"parked_bytes": SIZE}
    with running(n_seq=n_seq, path=embedded_f32, method=method, settings=settings, **F32) as server:
        post = poster(server)
        asked = {"temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        prompt = server.host.tokens(STORY * 2)
        for turn in range(3):
            n = post("/completion", prompt=prompt, n_predict=60, **asked)["timings"]["prompt_n"]
            assert turn == 0 or n <= TAIL + 20
            prompt = [*prompt[:-3], *range(300 + 20 * turn, 320 + 20 * turn)]  # no reasoning, an answer, a question
        want = post("/completion", prompt=prompt, n_predict=20, **asked)["tokens"]
        fresh = post("/completion", prompt=prompt, n_predict=20, cache_prompt=False, **asked)["tokens"]
        assert want == fresh


def test_nothing_is_kept_where_nothing_may_be(embedded_model):
    with running(n_seq=1, path=embedded_model) as server:
        complete = completions(server)
        said, n = complete(STORY)
        complete(TITLE)
        assert complete(STORY + said)[1] >= n
        assert server.metric("parked_bytes") == 0


def test_keys_do_not_share_sequences(embedded_model):
    keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    settings = {"parked_bytes": SIZE, "api_keys": ("one", "two")}
    with running(n_seq=1, path=embedded_model, settings=settings) as server:
        n = []
        for key in (*keys, *keys):
            body = {"prompt": STORY, "n_predict": 1}
            n.append(server.http.post("/completion", json=body, headers=key).json()["timings"]["prompt_n"])
        assert n[0] == n[1] > 10 and max(n[2:]) <= 1


def test_the_least_recently_used_goes_first(embedded_model):
    talks = [f"{i} {STORY}" for i in range(4)]
    with running(n_seq=1, path=embedded_model, settings={"parked_bytes": SIZE}) as plain:
        complete = completions(plain)
        complete(talks[0])
        complete(talks[1])
        size = plain.metric("parked_bytes")
    with running(n_seq=1, path=embedded_model, settings={"parked_bytes": int(2.5 * size)}) as server:
        complete = completions(server)
        for talk in talks:
            complete(talk)
        assert size < server.metric("parked_bytes") <= 2.5 * size
        assert complete(talks[2])[1] <= 2  # 1 and 2 were kept
        assert complete(talks[0])[1] > 70


def test_the_default_is_a_part_of_the_free_memory(embedded_model, monkeypatch):
    monkeypatch.setattr("pylongctx.serve.service.free_bytes", lambda: 1 << 30)
    with running(n_seq=1, path=embedded_model, settings={"parked_bytes": None}) as server:
        complete = completions(server)
        said, n = complete(STORY)
        complete(TITLE)
        assert complete(STORY + said)[1] < n / 4
        assert server.engine.parked.capacity <= 1 << 28
