"""A server whose conversations lose their oldest turns: routes, usage, slots, metrics."""

import threading

import pytest
from needs import need
from serving import events, poster, running

openai = need("server", "openai", "httpx", "fastapi")

N_CTX = 256
SYSTEM = {"role": "system", "content": "Tell me a story."}
ENDLESS = [[2, -100.0]]  # the embedded model's end token


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    settings = {"slot_folder": tmp_path_factory.mktemp("slots")}
    with running(n_seq=2, n_ctx=N_CTX, overflow="evict_middle", settings=settings) as server:
        yield server


@pytest.fixture
def ask(server):
    return poster(server)


def history(n, name="day"):
    """Return a conversation of ``n`` turns that waits for an answer."""
    turns = (
        [
            {"role": "user", "content": f"And what happened on {name} {i}?"},
            {"role": "assistant", "content": f"On {name} {i} nothing happened."},
        ]
        for i in range(n)
    )
    return [SYSTEM, *(message for turn in turns for message in turn)][:-1]


def evaluated(server):
    return server.ask(lambda: server.engine.counters.prompt_tokens)


def test_two_conversations_beyond_the_context_evaluate_what_is_new(server, ask):
    """Each on a sequence of its own, at the same time; usage, /slots and /metrics count what has left."""
    metric, found = server.metric("dropped_tokens_total"), {}

    def talk(name):
        found[name] = [
            server.client.chat.completions.create(
                model="any", messages=history(n, name), max_tokens=4, temperature=0, seed=1
            ).usage
            for n in range(1, 16)
        ]

    threads = [threading.Thread(target=talk, args=(name,)) for name in ("day", "night")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for usages in found.values():
        details = [usage.prompt_tokens_details.model_dump() for usage in usages]
        turns = [one.get("dropped_turns", 0) for one in details]
        assert turns == sorted(turns) and turns[0] == 0 and 5 < turns[-1] < 14
        assert all(usage.prompt_tokens - one["cached_tokens"] < 80 for usage, one in zip(usages, details, strict=True))
        assert all(("dropped_tokens" in one) == (one.get("dropped_turns", 0) > 0) for one in details)
    reported = [usage.prompt_tokens_details.model_dump() for usages in found.values() for usage in usages]
    n_gone = sum(one.get("dropped_tokens", 0) for one in reported)
    assert server.metric("dropped_tokens_total") - metric == n_gone
    slots = [slot["n_tokens_dropped"] for slot in server.http.get("/slots").json()]
    assert sorted(slots) == sorted(usages[-1].prompt_tokens_details.dropped_tokens for usages in found.values())


def test_a_conversation_finds_its_sequence(server, ask):
    """By what stays of it, not by its beginning, which all conversations share."""
    known = {"day": 9, "night": 9}
    for name in ("day", "night", "night", "day", "day", "night"):
        known[name] += 1
        found = ask("/v1/chat/completions", messages=history(known[name], name), max_tokens=4, temperature=0)["usage"]
        n_read = found["prompt_tokens"] - found["prompt_tokens_details"]["cached_tokens"]
        assert known[name] == 10 or n_read < 80


def test_a_long_turn_leaves_in_place(server, ask):
    """What stays is less than half, and is not copied to the empty sequence: its end would be read again."""
    long = [SYSTEM, {"role": "user", "content": "word " * 105}, *history(3)[1:]]
    first = ask("/v1/chat/completions", messages=long[:-2], max_tokens=4, temperature=0)["usage"]
    assert "dropped_tokens" not in first["prompt_tokens_details"]
    second = ask("/v1/chat/completions", messages=long, max_tokens=4, temperature=0)["usage"]
    assert second["prompt_tokens_details"]["dropped_turns"] == 1
    assert second["prompt_tokens"] - second["prompt_tokens_details"]["cached_tokens"] < 80


def test_all_apis_tell_what_has_left(server, ask):
    messages = history(12)
    chat = ask("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0)["usage"]
    gone = {name: chat["prompt_tokens_details"][name] for name in ("dropped_tokens", "dropped_turns")}
    assert gone["dropped_turns"] > 3
    response = ask("/v1/responses", input=messages, max_output_tokens=4, temperature=0)["usage"]
    assert gone.items() <= response["input_tokens_details"].items()
    message = {"system": SYSTEM["content"], "messages": messages[1:], "max_tokens": 4, "temperature": 0}
    assert gone.items() <= ask("/v1/messages", **message)["usage"].items()
    with server.http.stream("POST", "/v1/messages", json=message | {"stream": True}) as stream:
        (delta,) = [event for event in events(stream) if event["type"] == "message_delta"]
    assert gone.items() <= delta["usage"].items()
    asked = {"messages": messages, "max_tokens": 4, "temperature": 0, "stream_options": {"include_usage": True}}
    chunks = list(server.client.chat.completions.create(model="any", stream=True, **asked))
    assert gone.items() <= chunks[-1].usage.prompt_tokens_details.model_dump().items()
    assert (
        "dropped_tokens"
        not in ask("/v1/chat/completions", messages=history(1), max_tokens=4)["usage"]["prompt_tokens_details"]
    )


def test_a_request_that_fits_is_answered_exactly(server, ask):
    """The sequence holds its whole text, of which the last rows have read what left."""
    for n in (11, 12):
        ask("/v1/chat/completions", messages=history(n), max_tokens=4, temperature=0)
    slot, seam = server.ask(
        lambda: next((s.session.tokens.tolist(), s.session.seam) for s in server.engine.slots if s.session.seam)
    )
    found = ask_again = server.http.post("/completion", json={"prompt": slot, "n_predict": 4, "temperature": 0}).json()
    assert found["timings"]["cache_n"] == seam
    server.erase()
    ask_again = ask("/completion", prompt=slot, n_predict=4, temperature=0)
    assert ask_again["content"] == found["content"]


def test_completions_keep_their_first_tokens(server, ask):
    prompt = "It was the best of times, it was the worst of times."
    asked = {"prompt": prompt, "temperature": 0, "logit_bias": ENDLESS, "return_tokens": True, "id_slot": 0}
    for n_keep, stays in ((None, 5), (8, 9), (0, 1), (-1, len(server.host.model.tokenize(prompt.encode())))):
        found = ask("/completion", n_predict=400, n_keep=n_keep, **asked)
        assert (found["tokens_predicted"], found["truncated"], found["stop_type"]) == (400, True, "limit")
        held = server.ask(lambda: server.engine.slots[0].session)
        assert held.seam == stays
        assert held.tokens[:stays].tolist() == server.host.model.tokenize(prompt.encode())[:stays]
        assert found["tokens_cached"] == held.n_tokens
    found = ask("/completion", n_predict=-1, **asked)
    assert found["tokens_evaluated"] + found["tokens_predicted"] == N_CTX
    assert ask("/completion", 400, prompt="word " * 600)["error"]["code"] == "context_length_exceeded"


def test_an_answer_continues_beyond_the_context(server, ask):
    found = ask("/v1/chat/completions", messages=history(3), max_tokens=150, temperature=0, logit_bias=ENDLESS)
    assert found["usage"]["completion_tokens"] == 150
    assert found["usage"]["prompt_tokens_details"]["dropped_turns"] > 0
    found = ask("/v1/chat/completions", messages=history(3), temperature=0, logit_bias=ENDLESS)
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens_details"]["dropped_turns"] == 2


def test_a_sequence_in_a_file_continues(server, ask):
    for n in (11, 12):
        ask("/v1/chat/completions", messages=history(n), max_tokens=4, temperature=0, id_slot=0)
    assert ask("/slots/0?action=save", filename="chat")["n_saved"] > 100
    server.erase()
    assert ask("/slots/1?action=restore", filename="chat")["n_restored"] > 100
    usage = server.http.post(
        "/v1/chat/completions", json={"messages": history(13), "max_tokens": 4, "temperature": 0, "id_slot": 1}
    ).json()["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 80
